"""A run on busy cores says what would make it faster."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from tiny import Tiny, make_loader
from torch import nn


class Wide(Tiny):
    """Has layers that torch computes on several threads."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))


@pytest.fixture
def busy_cores():
    """Keep all cores busy with two other programs each."""
    command = [sys.executable, "-c", "while True: pass"]
    programs = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    yield
    for program in programs:
        program.kill()
        program.wait()


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_on_busy_cores_names_trainer_threads(trainer, caplog, busy_cores, threads):
    before = torch.get_num_threads()
    with caplog.at_level(logging.WARNING, "legato"):
        trainer(threads=threads, max_epochs=-1, max_steps=100, log_every_n_steps=10).fit(Wide(), make_loader(1280, 128))
    messages = [record.getMessage() for record in caplog.records if "trainer.threads=1" in record.getMessage()]
    assert len(messages) == (threads > 1)
    assert torch.get_num_threads() == before
