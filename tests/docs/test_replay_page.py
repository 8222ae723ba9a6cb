"""Runs the commands of docs/how-to/replay.md and spike.md and compares their output with the pages."""

import json
import re
from pathlib import Path

import pytest
from pages import Reader, blocks


def rounded(text: str) -> list[str]:
    """Return the lines of a text without the digits of norms and losses, which vary between machines."""
    text = re.sub(r"(net\.\d|loss|norm) +[\d.e+]+ *", r"\1 # ", text)
    return re.sub(r"targets from [\d.]+", "targets from #", text).splitlines()


def run_page(page: str, folder: Path) -> list[str]:
    """Run the commands of a page, check that they print its text blocks, and return their output."""
    reader, outputs = Reader(folder, tiny=()), []
    for block in blocks(page):
        if block.title:
            reader.write(block.title, block.text)
        outputs += map(reader.command, block.commands)
    shown = rounded("\n".join(outputs))
    for line in rounded("\n".join(block.text for block in blocks(page) if block.language == "text")):
        assert line in shown or not line.strip() or line == "..." or "is a spike" in line
    return outputs


def spikes_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "spikes.jsonl").read_text().splitlines()]


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_bad_shard_is_found_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outputs = run_page("docs/how-to/replay.md", tmp_path)
    runs = tmp_path / "runs" / "shards"
    assert spikes_of(runs / "version_0") == [21, 22, 51, 52]
    for spared in ("version_1", "version_2"):
        assert max(losses_of(runs / spared)) < 3
    assert (runs / "version_0.replay-1" / "metrics.jsonl").read_text().count("gradients/net.0") >= 20
    assert sum("The checkpoints are bitwise identical up to step 60." in text for text in outputs) == 1


@pytest.mark.slow
def test_five_commands_lead_from_a_spike_to_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outputs = run_page("docs/how-to/spike.md", tmp_path)
    assert len(outputs) == 5
    assert outputs[1].splitlines()[1].split()[:2] == ["sample", "354"]
    runs = tmp_path / "runs" / "copies"
    assert spikes_of(runs / "version_0") == [16, 27]
    assert max(losses_of(runs / "version_0")) > 90
    assert max(losses_of(runs / "version_1")) < 1
