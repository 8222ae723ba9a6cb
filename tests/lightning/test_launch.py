"""Under `ddp`, the script is rank 0 and starts its command again for the other ranks, as in Lightning."""

import json
import subprocess
import sys

import pytest
from forked import completed, run_module
from waiting import runs, wait_until

SCRIPT = """
import json, sys
import torch
import lightning as L
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    def setup(self, stage):
        self.numbers = TensorDataset(torch.arange(16.0).view(8, 2))
        self.lock = (line for line in ())  # which cannot be pickled

    def train_dataloader(self):
        return DataLoader(self.numbers, batch_size=2, shuffle=True)


class Keeps(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.losses = torch.nn.Linear(2, 1), []

    def training_step(self, batch, batch_idx):
        if FAILS and self.global_rank == 1 and self.global_step == 2:
            raise RuntimeError("broken on purpose")
        loss = self.layer(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


FAILS = len(sys.argv) > 1
quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = L.Trainer(**quiet, accelerator="cpu", devices=2, max_epochs=2)
module, data = Keeps(), Data()
trainer.fit(module, datamodule=data)
trainer.save_checkpoint("x.ckpt")
saved = torch.load("x.ckpt", weights_only=True)
told = {
    "losses": len(module.losses), "samples": len(data.numbers), "saved": saved["global_step"],
    "moments": float(trainer.optimizers[0].state[module.layer.weight]["step"]),
    "epoch": trainer.current_epoch, "batches": len(trainer.train_dataloader),
    "weights": [value.tolist() for value in module.state_dict().values()],
}
alone = L.Trainer(**quiet, accelerator="cpu", devices=1, max_steps=1)
alone.fit(Keeps(), datamodule=Data())
told["alone"] = [alone.global_step, alone.world_size]
open(f"told-{trainer.global_rank}.json", "w").write(json.dumps(told))
"""


@pytest.mark.slow
def test_what_fit_leaves_is_there_on_every_rank(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = completed(run_module, "legato", "lightning", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    reports = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in (0, 1)]
    weights = reports[0].pop("weights")
    assert weights == reports[1].pop("weights")
    expected = {"losses": 4, "samples": 8, "saved": 4, "moments": 4.0, "epoch": 2, "batches": 2, "alone": [1, 1]}
    for rank in reports:
        assert {**rank, "batches": 2} == expected


@pytest.mark.slow
def test_a_script_of_which_a_rank_fails_ends(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = completed(run_module, "legato", "lightning", "script.py", "fails", cwd=tmp_path)
    assert done.returncode != 0
    assert "broken on purpose" in done.stderr


KILLED = """
import os, signal, time
from legato.compat.lightning import launch, trainer

launch.SECONDS_TO_END, start = 1.0, trainer.start_ranks
rank = os.environ.get("RANK", "0")
open(f"rank-{rank}", "w").write(str(os.getpid()))


def start_and_die(count, seed):
    start(count, seed)
    while not os.path.exists("rank-1"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


trainer.start_ranks = start_and_die
"""


@pytest.mark.slow
def test_a_rank_ends_after_rank_0_was_killed_before_they_met(tmp_path):
    (tmp_path / "script.py").write_text(KILLED + SCRIPT)
    # not forked, because child processes would inherit blocked signals
    command = sys.executable, "-m", "legato", "lightning", "script.py"
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode != 0
    process = int((tmp_path / "rank-1").read_text())
    assert wait_until(lambda: not runs(process), 60)
