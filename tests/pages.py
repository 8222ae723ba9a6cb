"""Runs the blocks of Markdown pages as a reader would: writes files, runs scripts and calls commands.

In README.md and docs/**/*.md:

* a block with `title="NAME"` after its language is written to the file NAME;
* the `python` blocks of a page without a title are run as one script, in their order;
* a `yaml` block without a title is checked as part of a config;
* each line of a `bash` block, and each line of a `console` block that begins with `$ `, is a command;
* other blocks (`text`: output, drawings; `diff`) are not run.

All blocks of a page share a folder.
"""

import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from forked import completed, run_module, run_program

import legato

ROOT = Path(legato.__file__).resolve().parent
FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```[ \t]*$", re.DOTALL | re.MULTILINE)
TINY = (
    *(
        "trainer.accelerator=cpu",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=4",
        "trainer.limit_val_batches=2",
    ),
    *("trainer.limit_test_batches=2", "trainer.limit_predict_batches=2"),
)
"""The first settings of each command that trains or evaluates."""
TRAINS = ("fit", "validate", "test", "predict", "check")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The commands of the block, without comments."""
        text = self.text.replace("\\\n", " ")
        lines = [line.strip() for line in text.splitlines()]
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        elif self.language not in ("bash", "sh"):
            return []
        bare_lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
        return [line for line in bare_lines if line]


def pages() -> list[str]:
    """Return the paths of README.md and every page of docs/ in the repository."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def read(page: str) -> str:
    """Return the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page in order."""
    text = read(page)
    for match in FENCE.finditer(text):
        indent, language, rest, body = match.groups()
        title = re.search(r'title="([^"]+)"', rest)
        body = "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, language, title[1] if title else "", body)


def prose(page: str) -> str:
    """Return a page without blocks, code spans, pictures and link targets."""
    text = FENCE.sub("", read(page))
    text = re.sub(r"`[^`\n]+`|!\[[^\]]*\]", "", text)
    return re.sub(r"\]\([^)\s]+\)", "]", text)


class Reader:
    """A user with an empty folder who follows the instructions of a page."""

    def __init__(self, folder: Path, tiny: tuple[str, ...] = TINY, timeout: float = 120) -> None:
        self.folder, self.tiny, self.timeout = folder, tiny, timeout

    def write(self, name: str, text: str) -> None:
        """Write a file and create its parent folders."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def script(self, text: str, name: str = "page.py") -> str:
        """Run the text of a script and return its output. Raises AssertionError if it fails."""
        self.write(name, text)
        return self._finish(name, {}, _run_python, name)

    def command(self, line: str) -> str:
        """Run a shell command and return its output; `legato` and `python` run without importing torch again."""
        words = shlex.split(line)
        piped: str | None = None
        if words[0] == "cd":
            self.folder = self.folder / words[1]
            assert self.folder.is_dir(), line
            return ""
        if "|" in words:
            before, _, line = line.partition(" | ")
            words, piped = shlex.split(line), self.command(before)
        settings = dict(word.split("=", 1) for word in takewhile(lambda word: "=" in word, words))
        words = words[len(settings) :]
        if set(words) & {"|", "&&", ";", ">", "&"}:
            words = ["bash", "-euc", line]
        if words[0] == "legato":
            if (
                len(words) > 1 and words[1] in TRAINS and "--help" not in words
            ):  # settings of the command take precedence
                first = next((i for i, word in enumerate(words[2:], 2) if not word.endswith(".yaml")), len(words))
                words[first:first] = self.tiny
            return self._finish(line, settings, run_module, *words)
        if words[0] == "python":
            return self._finish(line, settings, _run_python, *words[1:])
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            words,
            cwd=self.folder,
            env={**os.environ, "PATH": path, **settings},
            input=piped,
            capture_output=True,
            text=True,
            timeout=self.timeout,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _finish(self, command: str, settings: dict[str, str], *called: Any) -> str:
        done = completed(*called, timeout=self.timeout, cwd=self.folder, env={**os.environ, **settings})
        assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def _run_python(*words: str) -> None:
    warnings.simplefilter("error")
    run_program(*words)
