"""What `make gpu` does on a machine with a GPU, in small form on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import legato

ROOT = Path(legato.__file__).parent


@pytest.mark.slow
def test_the_benchmark_writes_its_table(tmp_path):
    if not (ROOT / "benchmarks").exists():
        pytest.skip("benchmarks are not part of an installed package")
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--device", "cpu", "--out", tmp_path / "gpu"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "gpu.json").read_text())
    by_who = {(row["what"].split(",")[0], row["who"]) for row in results["rows"]}
    assert {("GPT", "by hand"), ("GPT", "legato"), ("GPT", "legato, bitwise")} <= by_who
    assert {("images to the device", "legato"), ("images to the device", "legato, no prefetch")} <= by_who
    assert all(row["value"] > 0 for row in results["rows"])
    table = (tmp_path / "gpu.md").read_text()
    assert table in done.stdout
    assert table.count("tokens/s") == len([row for row in results["rows"] if row["unit"] == "tokens/s"])
