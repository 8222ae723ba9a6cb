"""Only runs that compile import torch's compiler, whose import takes as long as torch's."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

TASK = """
import json, sys
from multiprocessing import forkserver
import legato as lg
import torch

server = forkserver._forkserver._forkserver_pid

class OneStep(lg.Task):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.server = server

    def training_step(self, batch):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4)

    def on_train_end(self):
        compiler, sympy = "torch._dynamo" in sys.modules, "sympy" in sys.modules
        found = {"compiler": compiler, "sympy": sympy, "server": self.server, "step": self.global_step}
        with open(f"rank-{self.global_rank}.json", "w") as file:
            json.dump(found, file)
"""
CONFIG = """
task: {_target_: one_step.OneStep}
trainer: {max_steps: 1, accelerator: cpu, enable_checkpointing: false}
"""


def fit(folder, *words):
    """Train by the command line in a new Python process; return each rank's records."""
    (folder / "one_step.py").write_text(TASK)
    (folder / "one.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "legato", "fit", "one.yaml", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def test_workers_do_not_import_it_and_their_server_starts_before_the_task_is_imported(tmp_path):
    ranks = fit(tmp_path, "trainer.devices=2")
    assert [(rank["compiler"], rank["sympy"], rank["step"]) for rank in ranks] == [(False, False, 1)] * 2
    assert ranks[0]["server"] is not None  # of the process that read the config


def test_the_server_imports_it_for_workers_that_all_would(tmp_path):
    ranks = fit(tmp_path, "trainer.devices=2", "trainer.reproducible=bitwise")
    assert [rank["compiler"] for rank in ranks] == [True] * 2


ONCE_IT_IS_THERE = """
import sys
import torch
from torch.nn.parallel import DistributedDataParallel
from legato.base import torch_private

def weights_after(step):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": torch.nn.Parameter(torch.ones(1))})
    for _ in range(3):
        step(model, optimizer)
    return [*model.parameters()]

def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    torch_private.step_of(optimizer)()

torch_private.spare_compiler()
spared = weights_after(step)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
with torch_private.no_compiler_for_ddp():
    ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
before = ddp(torch.ones(2, 4)).detach()
assert "torch._dynamo" not in sys.modules
assert "_dynamo" not in vars(torch)

import torch._dynamo
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
assert all(map(torch.equal, weights_after(step), spared))
torch.testing.assert_close(weights_after(torch.compile(step, backend="eager")), spared, rtol=1e-4, atol=1e-5)
assert torch.equal(torch.compile(ddp, backend="eager")(torch.ones(2, 4)), before)
for method in (torch.optim.Optimizer.zero_grad, torch.optim.Optimizer.add_param_group):
    assert vars(method.__wrapped__)["__dynamo_disable"]._torchdynamo_disable  # excluded, as torch does it
torch.distributed.destroy_process_group()
"""


def test_once_it_is_imported_optimizers_and_ddp_behave_as_torch_made_them():
    done = subprocess.run([sys.executable, "-c", ONCE_IT_IS_THERE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
