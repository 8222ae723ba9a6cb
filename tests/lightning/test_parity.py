"""The same modules under Lightning and in its room: losses, order of hooks, logged points, rates and weights are equal.

What differs stands in DIFFERENT, with its reason.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("parity_kinds.py")
PACKAGES = ("lightning.pytorch", "legato.compat.lightning.pytorch")

DIFFERENT: dict[tuple[str, str], str] = {}
"""By kind and field, why it differs on one process."""
DIFFERENT_ON_TWO: dict[tuple[str, str], str] = {
    ("accumulation", "metrics"): (
        "Lightning shuffles what it deals out, also of a loader with shuffle=False, so that a step's newest batch, "
        "whose loss is shown, has other samples; Legato keeps the order."
    ),
}
"""The same on two processes."""
ON_TWO = ("plain", "accumulation")
"""Kinds that are run on two processes; each takes Lightning half a minute where the machine is busy."""


def results(folder, processes, kinds=()):
    """Return what each package makes of some kinds, or of all, run beside each other."""
    started = []
    for package in PACKAGES:
        command = [sys.executable, str(SCRIPT), package, str(folder / package), str(processes), *kinds]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    for process in started:
        _, told = process.communicate(timeout=600)
        assert process.returncode == 0, told[-3000:]
    return [json.loads((folder / package).read_text()) for package in PACKAGES]


def differs(first, second):
    """Return whether two results differ by more than rounding."""
    if isinstance(first, list) and isinstance(second, list):
        return len(first) != len(second) or any(map(differs, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() != second.keys() or any(differs(first[name], second[name]) for name in first)
    if isinstance(first, float) and isinstance(second, float):
        return not (math.isclose(first, second, rel_tol=1e-4, abs_tol=1e-4) or first != first != second)
    return first != second


def compared(real, ours):
    """Return kind and field of everything that differs, with both values."""
    assert real.keys() == ours.keys()
    return {
        (kind, name): (real[kind].get(name), ours[kind].get(name))
        for kind in real
        for name in {**real[kind], **ours[kind]}
        if differs(real[kind].get(name), ours[kind].get(name))
    }


def test_one_process(tmp_path):
    real, ours = results(tmp_path, 1)
    assert [kind for kind in real if "error" in real[kind]] == []
    found = compared(real, ours)
    assert {where: values for where, values in found.items() if where not in DIFFERENT} == {}
    assert DIFFERENT.keys() <= found.keys(), "no longer different: take it off the list"
    assert all(reason.endswith(".") for reason in DIFFERENT.values())


def test_two_processes(tmp_path):
    real, ours = results(tmp_path, 2, ON_TWO)
    assert [kind for kind in real if "error" in real[kind]] == []
    found = compared(real, ours)
    assert {where: values for where, values in found.items() if where not in DIFFERENT_ON_TWO} == {}
    assert DIFFERENT_ON_TWO.keys() <= found.keys(), "no longer different: take it off the list"
