"""docs/start/tutorial.md, done by its own commands: what it says of the bad sample, the spikes and the bits holds."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import Reader, blocks
from safetensors.torch import load_file

PAGE = "docs/start/tutorial.md"


def shape(line: str) -> str:
    """Return a line with its measured numbers left out, whose last digits another machine changes."""
    return re.sub(r"(loss|limit) [\d.e+-]+", r"\1 #", line).strip()


def steps_of(run: Path, file: str) -> list[int]:
    return [json.loads(line)["step"] for line in (run / file).read_text().splitlines()]


@pytest.mark.slow
def test_it_leads_from_nothing_to_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    reader, printed = Reader(tmp_path, tiny=(), timeout=300), dict[str, str]()
    for block in blocks(PAGE):
        if block.title:
            reader.write(block.title, block.text)
        for command in block.commands:
            if command.startswith("tensorboard ") or (command == "python plot.py" and not find_spec("matplotlib")):
                continue
            if "accident.Accident" in command:
                with pytest.raises(AssertionError, match=r"Rank 1 of 2 was killed by SIGKILL"):
                    reader.command(command)
            else:
                printed[command] = reader.command(command)
    project = tmp_path / "spirals"
    dirty, clean = project / "runs/dirty/version_0", project / "runs/dirty/version_1"

    blamed = next(text for command, text in printed.items() if command.endswith("--blame")).splitlines()
    first, second = (float(line.split("loss")[1].split()[0]) for line in blamed[1:3])
    assert blamed[1].split()[:2] == ["sample", "77"]
    assert 30 < first / second < 80
    seen = next(text for command, text in printed.items() if command.endswith("index=77"))
    spikes = steps_of(dirty, "spikes.jsonl")
    assert spikes
    assert set(spikes) <= {int(step) for step in re.findall(r"^step (\d+)", seen, re.MULTILINE)}
    assert not (clean / "spikes.jsonl").exists() or steps_of(clean, "spikes.jsonl") == []

    shown = {shape(line) for line in "\n".join(printed.values()).splitlines()}
    for block in blocks(PAGE):
        if block.language == "text" and "is a spike" not in block.text:
            assert {shape(line) for line in block.text.splitlines()} <= shown, str(block)
    assert [
        int(step) for step in re.findall(r"Step (\d+) is a spike", (Path(__file__).parents[2] / PAGE).read_text())
    ] == spikes[:2]
    assert load_file(project / "spirals.safetensors")
    assert (project / "spirals.png").exists() or not find_spec("matplotlib")

    # the run without the accident has the same bits
    reader.command("legato fit configs/dirty.yaml run.name=undisturbed")
    resumed, undisturbed = (
        load_file(max((run / "checkpoints").glob("step-*")) / "model.safetensors")
        for run in (dirty, project / "runs/undisturbed/version_0")
    )
    assert all(resumed[name].equal(tensor) for name, tensor in undisturbed.items())
