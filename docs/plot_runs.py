"""Draws docs/images/runs.svg: trains two runs, and plots them with plot.py from docs/how-to/notebooks.md.

Run: python docs/plot_runs.py   (needs matplotlib)
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import legato as lg

PAGE = Path(__file__).parent / "how-to" / "notebooks.md"


class Line(lg.Task):
    """A linear model."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.layer = rate, torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        """Return the squared error."""
        loss = (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), self.rate)


def train_runs() -> None:
    """Train runs/slow and runs/fast in the current folder."""
    for name, rate in (("slow", 0.01), ("fast", 0.05)):
        lg.seed_everything(1)
        trainer = lg.Trainer(
            max_epochs=5, log_every_n_steps=5, accelerator="cpu", logger=lg.loggers.JSONLinesLogger(), run_name=name,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(Line(rate), DataLoader(TensorDataset(torch.randn(320, 4)), 16, shuffle=True))


def plot_runs(picture: Path) -> None:
    """Execute the page's plot.py, and save its figure."""
    block = re.search(r'```python title="plot.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(block[1], names)
    names["pyplot"].gca().set(xlabel="step", ylabel="train/loss")
    names["pyplot"].gcf().set_size_inches(6, 3)
    names["pyplot"].savefig(picture, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "images" / "runs.svg").resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        train_runs()
        plot_runs(target)
        os.chdir(target.parent)
