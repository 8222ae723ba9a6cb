"""Versions, git commit and changed files of a run, compared with those of today."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..trainer.runs.record import package_versions, start_before
from .history import RunHistory

GIT_TIMEOUT = 5.0
SHOWN_FILES = 8


def differences(directory: Path, step: int) -> Iterator[str]:
    """Yield a line for each thing that is not as it was when the run did a step."""
    _, start = start_before(directory, step)
    was: dict[str, Any] = dict(start.get("versions") or {})
    if not was:
        history = RunHistory(directory)
        record = history.after(step) or history.before(step)
        was = dict(record.versions) if record else {}
    now = package_versions()
    changed = [f"{name} {old} -> {now[name]}" for name, old in was.items() if name in now and old != now[name]]
    if changed:
        yield f"Other versions than the run had: {', '.join(changed)}. Bits may differ."
    git = start.get("git") or {}
    if git.get("commit"):
        yield from code_differences(directory, git)


def code_differences(directory: Path, git: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs from the commit and the uncommitted changes that the run had, by the names of files."""
    root = Path(str(git.get("root")))
    today = git_output(root, "diff", "--no-ext-diff", "--no-textconv", "--no-color", str(git["commit"]))
    if today is None:
        yield f"The commit {str(git['commit'])[:12]} that the run had is not in {root}: the code is not compared."
        return
    stored = git.get("diff_file")
    before = (directory / stored).read_bytes() if stored and (directory / stored).is_file() else b""
    then, files = by_file(before), by_file(today)
    differing = sorted(name for name in {*then, *files} if then.get(name) != files.get(name))
    differing = [name for name in differing if name in files or is_changed(root, name, then[name])]
    if differing:
        more = f" and {len(differing) - SHOWN_FILES} more" if len(differing) > SHOWN_FILES else ""
        yield (
            f"Code has changed since the run (commit {str(git['commit'])[:12]}): "
            f"{', '.join(differing[:SHOWN_FILES])}{more}."
        )


def is_changed(root: Path, name: str, diff: bytes) -> bool:
    """Return whether a file is not what a diff made of it; a file that was new then may still be as it was."""
    lines = [line[1:] for line in diff.splitlines() if line.startswith(b"+") and not line.startswith(b"+++")]
    path = root / name
    if path.is_symlink():
        return lines != [os.fsencode(os.readlink(path))]
    return b"new file mode" not in diff or not path.is_file() or path.read_bytes().splitlines() != lines


def by_file(diff: bytes) -> dict[str, bytes]:
    """Return the parts of a diff by the names of their files, without the hashes that git adds."""
    found: dict[str, bytes] = {}
    for part in diff.split(b"diff --git a/")[1:]:
        name, _, rest = part.partition(b"\n")
        lines = [line for line in rest.splitlines() if not line.startswith(b"index ")]
        found[name.split(b" b/")[0].decode(errors="replace")] = b"\n".join(lines)
    return found


def git_output(root: Path, *arguments: str) -> bytes | None:
    """Return what a call of git printed; None where it failed."""
    try:
        command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, timeout=GIT_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
