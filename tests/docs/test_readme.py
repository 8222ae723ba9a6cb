"""The README keeps to its size, says its limits early, and its loop and its task do what it says."""

import re
from pathlib import Path

import pytest
from pages import Reader, blocks, read

README = read("README.md").splitlines()
PRINT_DIGEST = """
import hashlib
print("weights", hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in {}.parameters())).hexdigest())
"""


def block(language: str) -> str:
    """Return the text of the first block of a language."""
    return next(block.text for block in blocks("README.md") if block.language == language)


def test_it_is_short_and_says_the_main_things_first() -> None:
    assert len(README) <= 110
    assert "CPU with gloo" in "\n".join(README[:10])
    first = "\n".join(README[:20])
    assert "make demo" in first
    assert len(set(re.findall(r"\b[0-9a-f]{64}\b", first))) == 1
    table = "\n".join(README).partition("## Where to go next\n")[2]
    assert len(re.findall(r"^\| \[", table, re.MULTILINE)) == 6


def test_every_figure_of_speed_links_to_the_page_of_benchmarks() -> None:
    figures = re.findall(r"\[([^\]]*\b\d\.\d\d\b[^\]]*)\]\((\S+)\)", "\n".join(README))
    assert {target for _, target in figures} == {"docs/benchmarks.md"}
    assert len(figures) == len(re.findall(r"(?<!>= )\b\d\.\d\d\b", "\n".join(README)))


@pytest.mark.slow
def test_the_loop_and_the_task_of_the_diff_end_with_the_same_weights(tmp_path: Path) -> None:
    lines = block("diff").splitlines()
    loop = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    task = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    task = task.replace("Parabola(), loader", "task := Parabola(), loader").replace(
        "lg.Trainer(", "lg.Trainer(devices=1, "
    )
    printed = [
        Reader(tmp_path).script(source + PRINT_DIGEST.format(model), "program.py")
        for source, model in ((loop, "net"), (task, "task"))
    ]
    digests = [re.findall(r"^weights ([0-9a-f]{64})$", text, re.MULTILINE) for text in printed]
    assert digests[0] == digests[1] != []
