"""The story of docs/how-to/replay.md, told by its own commands."""

import json
import re
from pathlib import Path

import pytest
from pages import Reader, blocks

PAGE = "docs/how-to/replay.md"


def rounded(text: str) -> list[str]:
    """Return the lines of a text, without the digits of norms and losses, the last of which another machine changes."""
    text = re.sub(r"(net\.\d|loss|norm) [\d.e+]+", r"\1 #", text)
    return re.sub(r"targets from [\d.]+", "targets from #", text).splitlines()


@pytest.mark.slow
def test_the_bad_shard_is_found_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reader, said = Reader(tmp_path, tiny=()), []
    for block in blocks(PAGE):
        if block.title:
            reader.write(block.title, block.text)
        for command in block.commands:
            said.append((command, reader.command(command)))
    runs = tmp_path / "runs" / "shards"
    spikes = [json.loads(line) for line in (runs / "version_0" / "spikes.jsonl").read_text().splitlines()]
    assert [one["step"] for one in spikes] == [21, 22, 51, 52]
    shown = rounded("\n".join(text for _, text in said))
    told = "\n".join(block.text for block in blocks(PAGE) if block.language == "text")
    for line in rounded(told):
        assert line in shown or not line.strip() or line == "..." or "is a spike" in line
    for spared in ("version_1", "version_2"):
        losses = [json.loads(line)["train/loss"] for line in (runs / spared / "metrics.jsonl").read_text().splitlines()]
        assert max(losses) < 3
    assert (runs / "version_0.replay-1" / "metrics.jsonl").read_text().count("gradients/net.0") >= 20
    assert sum("Every bit is the same up to step 60, by the checkpoints." in text for _, text in said) == 1
