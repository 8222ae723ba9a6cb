"""Of many cases in the same processes one that fails, or hangs, takes no other one along."""

import time

import pytest
import torch
from mesh_cases import CNN, mesh, outcome
from shared_processes import run_cases

from legato.base.errors import WorkerError
from legato.base.place import find_place

pytestmark = pytest.mark.slow


def fails_on_one_rank():
    if find_place().rank == 1:
        raise LookupError("rank 1 lacks it")
    return trains()


def trains():
    return outcome(CNN(), strategy=mesh(shard=2), devices=2)[0]


def test_a_case_that_fails_is_reported_by_itself(tmp_path):
    found = run_cases({"first": trains, "fails": fails_on_one_rank, "last": trains}, 2, tmp_path / "cases")
    assert list(found) == ["first", "fails", "last"]
    assert torch.equal(found["first"], found["last"])
    with pytest.raises(LookupError, match="rank 1 lacks it"):
        found["fails"]


def test_a_case_that_hangs_is_reported_by_itself(tmp_path, capfd):
    cases = {"first": lambda: 1, "hangs": lambda: time.sleep(600), "last": lambda: 2}
    found = run_cases(cases, 2, tmp_path / "cases", seconds=2)
    assert (found["first"], found["last"]) == (1, 2)
    with pytest.raises(WorkerError, match="Rank"):
        found["hangs"]
    assert "test_shared_processes.py" in capfd.readouterr().err  # where it was
