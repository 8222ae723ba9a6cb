"""Versions, git commit and changed files of a run, compared with those of today."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..trainer.runs.record import code_of, package_versions
from .history import RunHistory

SHOWN_FILES = 8


def differences(history: RunHistory, step: int) -> Iterator[str]:
    """Yield a line for each thing that is not as it was when the run did a step."""
    start, now = history.start_of(step)[1], package_versions()
    was: dict[str, Any] = start.get("versions") or {}
    changed = [f"{name} {old} -> {now[name]}" for name, old in was.items() if name in now and old != now[name]]
    if changed:
        yield f"Other versions than the run had: {', '.join(changed)}. Bits may differ."
    if start.get("git"):
        yield from code_differences(history.directory, start["git"])


def code_differences(directory: Path, git: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs from the commit and the uncommitted changes that the run had, by the names of files."""
    root, commit = Path(git["root"]), str(git["commit"])
    today = code_of(root, commit) if root.is_dir() else None
    if today is None or today["diff_bytes"] is None:
        yield f"The commit {commit[:12]} that the run had is not in {root}: the code is not compared."
        return
    stored = git.get("diff_file")
    before = by_file((directory / stored).read_bytes() if stored and (directory / stored).is_file() else b"")
    after = by_file(today["diff"] or b"")
    names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    if names:
        more = f" and {len(names) - SHOWN_FILES} more" if len(names) > SHOWN_FILES else ""
        shown = ", ".join(names[:SHOWN_FILES])
        yield f"Code has changed since the run (commit {commit[:12]}): {shown}{more}."


def by_file(diff: bytes) -> dict[str, bytes]:
    """Return the parts of a diff by the names of their files."""
    parts = (part.partition(b" b/") for part in diff.split(b"diff --git a/")[1:])
    return {name.decode(errors="replace"): rest for name, _, rest in parts}
