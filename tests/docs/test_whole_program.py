"""The commands of docs/start/whole-program.md, in its order, on its program."""

import re
from pathlib import Path

import pytest
from pages import Reader, blocks

from legato.trainer.runs.directory import RunDirectory


@pytest.mark.slow
def test_the_commands_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reader, printed = Reader(tmp_path, tiny=("trainer.accelerator=cpu",)), dict[str, str]()
    for block in blocks("docs/start/whole-program.md"):
        if block.title:
            reader.write(block.title, block.text)
        if any("spirals.yaml" in command for command in block.commands):
            printed = {command: reader.command(command) for command in block.commands}
    words = [command.split()[1] for command in printed]
    assert words == ["fit", "fit", "fit", "check", "plan", "samples", "replay", "config", "validate", "runs", "help"]

    run = RunDirectory(tmp_path / "runs" / "spirals" / "version_1")
    kept = {"task.lr": 0.003, "trainer.reproducible": "bitwise", "trainer.devices": 2}
    assert {key: run.config[key] for key in kept} == kept  # the resume on one process found nothing left to train
    assert sorted(path.name for path in (run.path / "starts").iterdir()) == ["0.yaml", "1.yaml"]
    (table,) = (text for command, text in printed.items() if command == "legato runs")
    assert re.search(r"spirals/version_1 +done +640 .* lr=0.003", table)

    assert "task.lr: 0.003" in reader.command("legato show runs/spirals/version_1")
    compared = reader.command("legato compare runs/spirals/version_0 runs/spirals/version_1")
    assert re.search(r"task\.lr +0\.01 +0\.003", compared)
    assert re.search(r"trainer\.reproducible +order +bitwise", compared)
    replayed = reader.command("legato replay runs/spirals/version_1 step=1 until=50")
    assert "learning rate 0.003" in replayed
    assert "bitwise identical" in replayed
