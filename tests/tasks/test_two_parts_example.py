"""What is shown about ddp_model_parallel runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import legato

pytestmark = pytest.mark.slow


ROOT = Path(legato.__file__).parent
PAGE = (ROOT / "docs/ddp-model-parallel.md").read_text(encoding="utf-8")


def output_of(folder, *command):
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_learns_the_same_on_one_device_and_in_parts(tmp_path):
    found = re.findall(r"(\w+) +on (\d): val/acc ([\d.]+)", output_of(tmp_path, str(ROOT / "examples/two_parts.py")))
    assert [(kind, int(devices)) for kind, devices, _ in found] == [("Rings", 1), ("InBlocks", 4), ("ByHand", 4)]
    accuracies = [float(accuracy) for *_, accuracy in found]
    assert accuracies == pytest.approx([accuracies[0]] * 3, abs=0.02)
    assert accuracies[0] > 0.7


def test_the_scripts_of_the_page_run(tmp_path):
    scripts = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(scripts) == 2
    script = tmp_path / "script.py"
    script.write_text("\n".join(["import torch", "torch.set_num_threads(1)", *scripts, "print('done')"]))
    assert "done" in output_of(tmp_path, "-W", "error", str(script))
