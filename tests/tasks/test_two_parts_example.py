"""What is shown about ddp_model_parallel runs as it stands."""

import re
from pathlib import Path

import pytest
from forked import completed, run_script

import legato

pytestmark = pytest.mark.slow


ROOT = Path(legato.__file__).parent


def test_the_example_learns_the_same_on_one_device_and_in_parts(tmp_path):
    done = completed(run_script, ROOT / "examples" / "two_parts.py", cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"(\w+) +on (\d): val/acc ([\d.]+)", done.stdout)
    assert [(kind, int(devices)) for kind, devices, _ in lines] == [("Rings", 1), ("InBlocks", 4), ("ByHand", 4)]
    accuracies = [float(accuracy) for *_, accuracy in lines]
    assert accuracies == pytest.approx([accuracies[0]] * 3, abs=0.02)
    assert accuracies[0] > 0.8
