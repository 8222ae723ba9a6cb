"""The same modules with Lightning and Legato: losses, order of hooks, logged points, rates and weights are equal.

DIFFERENT lists the differences, with reasons.
"""

import json
import math
import os
from pathlib import Path

import pytest
from forked import Forked, run_module, run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("parity_kinds.py")
PACKAGES = ("lightning.pytorch", "legato.compat.lightning.pytorch")

CLOSURE = "Forward and backward run before optimizer_step, whose closure returns the loss that is there."
MEAN = "The value of a step is the mean over its accumulated batches, where Lightning has that of the last one."
NEWEST = {("accumulation", field): MEAN for field in ("points", "metrics")}
DIFFERENT = {
    (
        "resume",
        "hooks",
    ): "A run that goes on was checked by a few validation batches when it began, and is not again.",
    ("own optimizer step", "hooks"): CLOSURE,
    **NEWEST,
}
"""Reasons for differences on one process, by kind and field."""
BY_RANK = "Lightning's limit of evaluation batches counts on each rank; Legato's does not depend on how many there are."
DRIFT = "Lightning leaves parameters that were frozen at the start out of DDP; they drift apart once they train."
DIFFERENT_ON_TWO = {
    ("own optimizer step", "hooks"): CLOSURE,
    **NEWEST,
    **{("limits", field): BY_RANK for field in ("hooks", "points", "metrics")},
    **{("overfit_batches", field): BY_RANK for field in ("hooks", "points", "metrics")},
    **{("fast_dev_run", field): BY_RANK for field in ("hooks", "metrics")},
    **{("frozen parts", field): DRIFT for field in ("losses", "points", "metrics", "weights")},
}
"""Reasons for differences on two processes."""


def results(folder, processes):
    """Return the results of each package for all kinds, one after the other in the same processes."""
    started = []
    for package in PACKAGES:
        launcher = (run_module, "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        called = (*(launcher if processes > 1 else (run_script,)), str(SCRIPT), package, str(folder / package))
        started.append(Forked(*called, env=environment))
    for process in started:
        _, output = process.communicate(timeout=600)
        assert process.returncode == 0, output[-3000:]
    results = []
    for package in PACKAGES:
        ranks = [json.loads((folder / f"{package}.{rank}").read_text()) for rank in range(processes)]
        for kind, result in ranks[0].items():
            assert "error" not in result, (package, kind, result)
            if "losses" in result:  # the rank of a sample is not part of the result
                result["losses"] = mean_over([rank[kind]["losses"] for rank in ranks])
        results.append(ranks[0])
    return results


def mean_over(ranks):
    """Return the mean of lists of numbers, or of None, item by item."""
    return [None if None in items else sum(items) / len(items) for items in zip(*ranks, strict=True)]


def differs(first, second):
    """Return whether two results differ by more than rounding."""
    if isinstance(first, list) and isinstance(second, list):
        return len(first) != len(second) or any(map(differs, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() != second.keys() or any(differs(first[name], second[name]) for name in first)
    if isinstance(first, (int, float)) and isinstance(second, (int, float)):
        return not (math.isclose(first, second, rel_tol=1e-4, abs_tol=1e-4) or first != first != second)
    return first != second


def compared(real, ours):
    """Return kind and field of all differences, with both values."""
    assert real.keys() == ours.keys()
    return {
        (kind, name): (real[kind].get(name), ours[kind].get(name))
        for kind in real
        for name in {**real[kind], **ours[kind]}
        if differs(real[kind].get(name), ours[kind].get(name))
    }


@pytest.mark.parametrize(("processes", "different"), [(1, DIFFERENT), (2, DIFFERENT_ON_TWO)])
def test_kinds_of_modules_train_alike(tmp_path, processes, different):
    real, ours = results(tmp_path, processes)
    assert len(real) >= 23
    differences = compared(real, ours)
    assert {where: values for where, values in differences.items() if where not in different} == {}
    assert different.keys() <= differences.keys(), "no longer different: take it off the list"
    assert all(reason.endswith(".") for reason in different.values())
