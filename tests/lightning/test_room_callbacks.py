"""Callbacks of the room against the real package: the same runs under both, and what a script sees of them."""

import importlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from lightning_callbacks import SCENARIOS

import legato.compat.lightning as L


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """Return what every scenario returns under the real package."""
    script = Path(__file__).parents[1] / "lightning_callbacks.py"
    done = subprocess.run(
        [sys.executable, script, "lightning", tmp_path_factory.mktemp("real")],
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout[done.stdout.index("{") :])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_script_sees_the_same(name, real, tmp_path):
    for module in ("callbacks", "utilities.exceptions"):
        importlib.import_module(f"legato.compat.lightning.pytorch.{module}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = json.loads(json.dumps(SCENARIOS[name](L, tmp_path)))
    cases = found.keys() if isinstance(found, dict) else range(len(found))
    for case in cases:
        assert repr(found[case]) == repr(real[name][case]), case
    assert len(found) == len(real[name])
