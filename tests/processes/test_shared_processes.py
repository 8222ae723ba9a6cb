"""Among many cases in the same processes, a case that fails or hangs does not affect the others."""

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
    results = run_cases({"first": trains, "fails": fails_on_one_rank, "last": trains}, 2, tmp_path / "cases")
    assert list(results) == ["first", "fails", "last"]
    assert torch.equal(results["first"], results["last"])
    with pytest.raises(LookupError, match="rank 1 lacks it"):
        results["fails"]


def test_a_case_that_hangs_is_reported_by_itself(tmp_path, capfd):
    cases = {"first": lambda: 1, "hangs": lambda: time.sleep(600), "last": lambda: 2}
    results = run_cases(cases, 2, tmp_path / "cases", seconds=2)
    assert (results["first"], results["last"]) == (1, 2)
    with pytest.raises(WorkerError, match="Rank"):
        results["hangs"]
    assert "test_shared_processes.py" in capfd.readouterr().err  # where it was
