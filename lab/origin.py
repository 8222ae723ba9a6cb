"""Compares a run's package versions, git commit and source files with the current ones."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..trainer.runs.record import code_of, installed_packages
from ..trainer.switches import versions
from .history import RunHistory

SHOWN_FILES = 8


def differences(history: RunHistory, step: int) -> Iterator[str]:
    """Yield a line for each kind of change in versions and code since the run computed a step."""
    start, now = history.start_of(step)[1], installed_packages() | versions()
    was: dict[str, Any] = {**(start.get("packages") or {}), **(start.get("versions") or {})}
    if changed := changed_values(was, now):
        yield f"Versions changed since the run: {changed}. Results may differ."
    code = list(code_differences(history.directory, start["git"]) if start.get("git") else ())
    # for files that git does not track, and outside git
    names = [] if code else changed_sources(start)
    yield from [*code, *([f"Code has changed since the run: {listed(names)}."] if names else [])]


def changed_sources(start: Mapping[str, Any]) -> list[str]:
    """Return the module files that have changed since a given launch of the run imported them."""
    folder = Path(start.get("working_directory") or ".")
    paths = {name: (folder if folder.is_dir() else Path.cwd()) / name for name in start.get("sources") or {}}
    texts = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    return [name for name, text in texts.items() if hashlib.sha256(text).hexdigest() != start["sources"][name]]


def listed(names: Sequence[str]) -> str:
    """Join up to SHOWN_FILES names and append the number of names left out."""
    more = f" and {len(names) - SHOWN_FILES} more" if len(names) > SHOWN_FILES else ""
    return ", ".join(names[:SHOWN_FILES]) + more


def changed_values(was: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Return a description of the values that differ, for names in both mappings."""
    return listed([f"{name} {old} -> {now[name]}" for name, old in (was or {}).items() if now.get(name, old) != old])


def code_differences(directory: Path, git: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line that lists the files that differ from the run's commit plus its uncommitted changes."""
    root, commit = Path(git["root"]), str(git["commit"])
    current = code_of(root, commit) if root.is_dir() else None
    if current is None or current["diff_bytes"] is None:
        yield f"The run's commit {commit[:12]} is not in {root}, so its code is not compared."
        return
    stored = git.get("diff_file")
    before = by_file((directory / stored).read_bytes() if stored and (directory / stored).is_file() else b"")
    after = by_file(current["diff"] or b"")
    names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    if names:
        yield f"Code has changed since the run (commit {commit[:12]}): {listed(names)}."


def by_file(diff: bytes) -> dict[str, bytes]:
    """Split a diff by file name."""
    parts = (section.partition(b" b/") for section in diff.split(b"diff --git a/")[1:])
    return {name.decode(errors="replace"): rest for name, _, rest in parts}
