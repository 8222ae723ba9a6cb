"""`legato compare --bits`: the first step and the first tensor at which two runs differ."""

import shutil
from pathlib import Path

import pytest
from replayed_folder import RUN, json_lines, legato, make_folder, trained, tree

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


def bits(first: Path, second: Path) -> list[str]:
    return legato("compare", str(first), str(second), "--bits").stdout.splitlines()


def test_the_first_step_and_the_first_tensor_are_found_by_replaying_a_part() -> None:
    """The second run leaves out a sample of step 3, and so differs in it: every weight, and batch norm's averages."""
    first = trained()
    before = tree(first)
    second = first.with_name("version_1")
    sample = legato("samples", str(first), "step=3").stdout.split()[-1]
    legato("fit", "points.yaml", f"trainer.leave_out_samples=[{sample}]")
    lines = bits(first, second)
    start = lines.index("The runs first differ at step 3.")
    assert lines[start + 1].split()[:2] == ["weights", "net.0.weight"]
    assert lines[start + 2].split()[:2] == ["gradients", "net.0.weight"]
    assert tree(first) == before
    third = first.with_name("version_2")
    legato("fit", "points.yaml")
    assert bits(first, third)[-1] == "The checkpoints are bitwise identical up to step 20."


def test_a_damaged_checkpoint_is_named_and_without_it_the_steps_are_computed() -> None:
    first = trained("trainer.max_epochs=2")
    legato("fit", "points.yaml", "trainer.max_epochs=2")
    second = first.with_name("version_1")
    newest = second / "checkpoints" / "step-00000010"
    flip_a_bit(newest / "model.safetensors")
    done = legato("compare", str(first), str(second), "--bits", fails=True)
    assert "step-00000010" in done.stderr
    assert "model.safetensors is damaged" in done.stderr
    shutil.rmtree(newest)
    assert bits(first, second)[-1].startswith("The runs are bitwise identical up to step 10, both in its checkpoint")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_run_of_other_code_is_named() -> None:
    """What the code of today does not give is told from what differs by the config."""
    trained()
    text = Path("points.py").read_text()
    Path("points.py").write_text(text.replace("nn.Dropout(0.2)", "nn.Dropout(0.25)"))
    legato("fit", "points.yaml")
    printed = "\n".join(bits(RUN, RUN.with_name("version_1")))
    assert f"{RUN} no longer matches the run" in printed or f"{RUN.absolute()} no longer matches the run" in printed
    assert "of step 1" in printed


def test_without_checkpoints_the_steps_are_computed_from_the_start() -> None:
    first = trained("trainer.max_epochs=1")
    legato("fit", "points.yaml", "trainer.max_epochs=1", "task.rate=0.06")
    second = first.with_name("version_1")
    for run in (first, second):
        shutil.rmtree(run / "checkpoints")
    lines = bits(first, second)
    start = lines.index("The runs first differ at step 1.")
    assert lines[start + 1].split()[0] == "weights"
    assert lines[start + 2].split() == ["gradients", "the", "same"]
    assert json_lines(first / "metrics.jsonl")
