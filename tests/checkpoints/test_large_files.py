"""Large files of a checkpoint: a save that fails in the middle, and a save that outlives its program."""

import resource
import subprocess
import sys
import threading

import pytest
import torch

from legato.base.errors import CheckpointError
from legato.trainer.checkpoints import commit, reading

pytestmark = pytest.mark.slow

SIZE = (64 << 20) + 12_345
"""No multiple of a page, nor of a block."""


def test_a_write_that_fails_ends_the_save(tmp_path):
    commit.write(tmp_path / "step-00000001", {"state_dict": {"a": torch.ones(3)}})
    before, threads = resource.getrlimit(resource.RLIMIT_FSIZE), threading.active_count()
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, before[1]))
    try:
        with pytest.raises(CheckpointError, match="could not be written: File too large"):
            commit.write(tmp_path / "step-00000001", {"state_dict": {"a": torch.zeros(SIZE // 4)}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.equal(reading.read_checkpoint(tmp_path / "step-00000001")["state_dict"]["a"], torch.ones(3))
    assert threading.active_count() == threads


ENDS_AT_ONCE = """
import sys
from pathlib import Path
import torch
from legato.trainer.checkpoints.background import Writer
Writer().save(Path(sys.argv[1]), {"state_dict": {"a": torch.ones(20 << 20)}})
raise SystemExit(3)
"""


def test_a_program_that_ends_finishes_a_large_save(tmp_path):
    done = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE, tmp_path / "step-00000001"], check=False)
    assert done.returncode == 3
    assert reading.read_checkpoint(tmp_path / "step-00000001")["state_dict"]["a"].sum() == 20 << 20
