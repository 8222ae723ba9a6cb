"""The order of the first epoch after a resume, under DDP with loader workers (Lightning #21938).

Lightning 2.5.3 to 2.6.6 creates the loader's iterator before it sets the epoch of the sampler, so a resumed run repeats
the order of epoch 0: a job that is preempted repeatedly sees the same part of the data.
"""

import json

import pytest
from forked import completed, run_program

pytestmark = pytest.mark.slow

PROGRAM = """
import importlib, json, sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader, Dataset

package, folder, name, epochs, source = sys.argv[1:]
pl = importlib.import_module(package)


class Numbers(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.tensor([float(index)])


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.orders = {}

    def training_step(self, batch, batch_idx):
        self.orders.setdefault(self.current_epoch, []).extend(batch[:, 0].int().tolist())
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


pl.seed_everything(7)
trainer = pl.Trainer(
    max_epochs=int(epochs), accelerator="cpu", devices=2, strategy="ddp", default_root_dir=folder, logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
)
module = Module()
trainer.fit(module, DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1), ckpt_path=source or None)
trainer.save_checkpoint(Path(folder) / f"{name}.ckpt")
if trainer.global_rank == 0:
    (Path(folder) / name).write_text(json.dumps(module.orders))
"""


@pytest.mark.parametrize("package", ["legato.compat.lightning.pytorch", "lightning.pytorch"])
def test_the_first_epoch_after_a_resume_has_its_own_order(tmp_path, package):
    real = package == "lightning.pytorch"
    if real and pytest.importorskip("lightning").__version__ != "2.6.6":
        pytest.skip("#21938 may be mended there")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    def orders(name, epochs, source=""):
        words = [package, str(tmp_path), name, str(epochs), source]
        done = completed(run_program, str(script), *words, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads((tmp_path / name).read_text())

    before = orders("half", 2)
    resumed = orders("rest", 3, str(tmp_path / "half.ckpt"))
    expected = before["0"] if real else orders("whole", 3)["2"]
    assert resumed["2"] == expected != before["1"]
