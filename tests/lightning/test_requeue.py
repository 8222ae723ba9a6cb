"""A job that is told to end writes hpc_ckpt_N.ckpt, as under Lightning, and goes on from it when it is queued again."""

import os
import re
import signal

import pytest
import torch
from forked import Forked, run_module
from waiting import wait_until

SCRIPT = """
import sys, time, lightning as L, torch
from torch.utils.data import DataLoader, TensorDataset

class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        return (batch[0] * self.slope - 2 * batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def on_train_start(self):
        print("begins at", self.global_step, flush=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        time.sleep(0.1 if "slow" in sys.argv else 0)
        print("step", self.global_step, flush=True)

trainer = L.Trainer(accelerator="cpu", max_epochs=4, logger=False, enable_progress_bar=False, default_root_dir="here")
module = Line()
trainer.fit(module, DataLoader(TensorDataset(torch.linspace(0, 1, 24)), 2))
print("slope", module.slope.item(), "after", trainer.global_step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_job_that_was_told_to_end_goes_on_when_it_is_queued_again(tmp_path, number):
    (tmp_path / "script.py").write_text(SCRIPT)
    job = {**os.environ, "SLURM_JOB_ID": "7"}

    def run(*words, **more):
        return Forked(run_module, "legato", "lightning", "script.py", *words, cwd=tmp_path, env={**job, **more})

    def said(program):
        path = program.folder / "stdout"
        return path.read_text() if path.exists() else ""

    whole = run()
    wait_until(lambda: whole.poll() is not None, 120)
    first = run("slow")
    wait_until(lambda: "step 3" in said(first), 120)
    os.kill(first.pid, number)
    wait_until(lambda: first.poll() is not None, 120)
    (path,) = (tmp_path / "here").glob("hpc_ckpt_*.ckpt")
    step = torch.load(path, weights_only=True)["global_step"]
    assert path.name == f"hpc_ckpt_{step}.ckpt"
    assert 3 <= step < 48
    assert "slope" not in said(first)
    second = run(SLURM_RESTART_COUNT="1")
    wait_until(lambda: second.poll() is not None, 120)
    assert re.findall(r"begins at (\d+)", said(second)) == [str(step)]
    assert said(second).splitlines()[-1] == said(whole).splitlines()[-1]
    assert not list((tmp_path / "here").glob(".requeued-*"))
