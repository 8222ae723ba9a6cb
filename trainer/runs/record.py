"""Record of a run in its directory: command line, versions, host and code of each start.

environment.json     a list of starts, the newest last; a resume adds one
uncommitted.diff     what was not committed, as `git apply` takes it; a resume with other code: uncommitted-1.diff
config.yaml          the config that trained the newest weights
config_given.yaml    the same without defaults
starts/N.yaml        the config of start N, counted from 0 as in environment.json
epochs.jsonl         the step after which each epoch began; of two lines for an epoch the later one counts
"""

import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...base.run_names import CONFIG, parse_small
from .run_file import identity_of, replace_text

RECORD, DIFF, GIVEN_CONFIG = "environment.json", "uncommitted.diff", "config_given.yaml"
EPOCHS = "epochs.jsonl"
STARTS = "starts"
"""Folder of the configs of all starts of a run, in its directory."""
LARGEST_DIFF = 1_000_000
"""Bytes of uncommitted changes that are stored; of more only the names of the files are."""
GIT_SECONDS = 3.0
"""Time that all calls of git may take together: a start must not wait for a large repository on a slow disk."""
MOST_NAMES = 200
_TRAINERS = count(1)


def add_start(directory: Path, facts: Mapping[str, Any], save_code: bool, config: str | None = None) -> None:
    """Add a start of the run to the record; `facts`: what the caller knows of it; `config`: what it runs with."""
    starts = read_starts(directory)
    if not starts and (directory / RECORD).exists():
        os.replace(directory / RECORD, directory / f"{RECORD}.damaged")  # a person may still read it
    from ..switches import environment, versions  # who reads records needs no torch

    code = code_of(Path.cwd()) if save_code else None
    if code is not None:
        diff = code.pop("diff")
        before = starts[-1]["git"] or {} if starts else {}
        code["diff_file"] = _store_diff(directory, diff, len(starts), before.get("diff_file")) if diff else None
    starts.append(
        {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "process": os.getpid(),
            "working_directory": str(Path.cwd()),
            **facts,
            "host": {"name": socket.gethostname(), "system": platform.platform(), "cpus": os.cpu_count()},
            "versions": versions(),
            "environment": environment(),
            "git": code,
            "sources": loaded_sources(Path.cwd()) if save_code else {},
            "packages": installed_packages(),
        }
    )
    replace_text(directory / RECORD, json.dumps({"starts": starts}, indent=1, ensure_ascii=False) + "\n")
    if config is not None:
        path = start_config(directory, len(starts) - 1)
        path.parent.mkdir(exist_ok=True)
        path.write_text(config, encoding="utf-8", errors="backslashreplace")


def command_of_process() -> dict[str, Any]:
    """Return the command of this process, and the place in its script of the Trainer that asks for it.

    script, module: what runs as `__main__`, None in a notebook; of `python -m` its name. fit: counted as runs begin.
    """
    main = sys.modules["__main__"]
    script, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    return {
        "command": list(sys.orig_argv),
        "arguments": list(sys.argv),
        "script": script and os.path.abspath(script),
        "script_hash": script and hash_of(script),
        "module": spec and spec.name,
        "trainer": next(_TRAINERS),
        "fit": 0,
    }


def hash_of(file: str) -> str | None:
    """Return the SHA-256 of a script; None where it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None


def start_config(directory: Path, number: int) -> Path:
    """Return the file with the config of a start."""
    return directory / STARTS / f"{number}.yaml"


def store_config(directory: Path, config: str, given: str | None) -> None:
    """Write the config that trained the weights in a run directory, and the same without defaults."""
    for name, text in ((CONFIG, config), (GIVEN_CONFIG, given)):
        if text is not None:
            replace_text(directory / name, text)


def is_stored(directory: Path, config: str) -> bool:
    """Return whether a run directory has this config."""
    try:
        return (directory / CONFIG).read_text(encoding="utf-8") == config
    except (OSError, UnicodeDecodeError):
        return False


def note_epoch(directory: Path, epoch: int, step: int) -> None:
    """Record that an epoch begins after a step, in a run directory."""
    if not identity_of(directory):
        return
    # a full disk must not end the training; without the line `legato samples` refuses to tell
    with suppress(OSError), (directory / EPOCHS).open("a", encoding="ascii") as file:
        file.write(f'{{"epoch": {epoch}, "step": {step}}}\n')


def epochs_begun(directory: Path) -> dict[int, int]:
    """Return the steps done before each epoch that was begun, by epoch, without what a resume has voided."""
    begun: dict[int, int] = {}
    if (directory / EPOCHS).is_file():
        for line in (directory / EPOCHS).read_text(encoding="ascii").splitlines():
            with suppress(ValueError):  # a kill may have torn the line
                entry = json.loads(line)
                begun = {epoch: step for epoch, step in begun.items() if epoch < entry["epoch"]}
                begun[entry["epoch"]] = entry["step"]
    return begun


def last_replicas(directory: Path) -> int | None:
    """Return the replicas of a run, as its newest start has recorded them."""
    found = [one.get("replicas") for one in read_starts(directory) if one.get("stage", "fit") == "fit"]
    return found[-1] if found and isinstance(found[-1], int) else None


def read_starts(directory: Path) -> list[dict[str, Any]]:
    """Return the starts of the run in a run directory, the newest last; none where there is no readable record."""
    try:
        return list(parse_small(directory / RECORD)["starts"])
    except (KeyError, TypeError):
        return []


def jobs_of(directory: Path) -> set[str | None]:
    """Return the ids of the SLURM jobs in which the run in a run directory was started; None for none."""
    return {start.get("slurm_job") for start in read_starts(directory)}


def _store_diff(directory: Path, diff: bytes, number: int, before: str | None) -> str:
    """Write the uncommitted changes of a start, unless the start before had the same; return the file's name."""
    if before is not None and (directory / before).is_file() and (directory / before).read_bytes() == diff:
        return before
    name = f"{Path(DIFF).stem}-{number}.diff" if (directory / DIFF).exists() else DIFF
    (directory / name).write_bytes(diff)
    return name


# --- versions ---------------------------------------------------------------------------------------------------------
def installed_packages() -> dict[str, str]:
    """Return the versions of all installed packages, as the names of their folders of metadata have them."""
    # importlib.metadata opens a file for each package: 0.19 s for a hundred of them, at every start
    names: list[str] = []
    for folder in reversed(sys.path):  # the first on the path counts
        with suppress(OSError):  # no folder, or one that may not be read
            names += os.listdir(folder or ".")
    pairs = (name.removesuffix(".dist-info").rpartition("-") for name in names if name.endswith(".dist-info"))
    return dict(sorted((package, version) for package, _, version in pairs))


# --- code -------------------------------------------------------------------------------------------------------------
def loaded_sources(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the file of each loaded module that is no library's, by its path from a folder."""
    legato, libraries = str(Path(__file__).parents[2]), (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    found: dict[str, str] = {}
    for file in sorted(file for file in files if isinstance(file, str) and file.endswith(".py")):
        if not file.startswith((legato, *libraries)) and "-packages/" not in file and len(found) < MOST_NAMES:
            with suppress(OSError):
                found[os.path.relpath(file, folder)] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return found


def code_of(folder: Path, base: str = "HEAD") -> dict[str, Any] | None:
    """Return the git repository of a folder: root, commit, branch, and what differs from `base`; None if there is none.

    "diff" holds changed files and new .py files, as `git apply` takes them; None where there is nothing, where it has
    over LARGEST_DIFF bytes, or where git took too long. "changed" holds the names of these files.
    """
    deadline = time.monotonic() + GIT_SECONDS
    places = ("--show-toplevel", "--git-path", "index", "--git-path", "objects")
    head = _git(folder, deadline, "rev-parse", *places, "HEAD", "--abbrev-ref", "HEAD")
    if head is None:
        return None
    root, index, objects, commit, branch = os.fsdecode(head).splitlines()
    diff = _difference(Path(root), folder / index, folder / objects, base, deadline)
    changed = re.findall(rb"(?m)^diff --git a/(.*?) b/", diff or b"")
    return {
        "root": root,
        "commit": commit,
        "branch": None if branch == "HEAD" else branch,
        "changed": None if diff is None else [name.decode(errors="replace") for name in changed[:MOST_NAMES]],
        "diff_bytes": None if diff is None else len(diff),
        "diff": diff if diff and len(diff) <= LARGEST_DIFF else None,
    }


def _difference(root: Path, index: Path, objects: Path, base: str, deadline: float) -> bytes | None:
    """Return what differs from a commit, new .py files included; None where git does not tell."""
    # Git itself writes new files into the diff, links as links, once it means to add them. It does so in a copy of its
    # index, with a place of its own for objects: the repository is not touched.
    with tempfile.TemporaryDirectory() as scratch:
        variables = {
            "GIT_INDEX_FILE": os.path.join(scratch, "index"),
            "GIT_OBJECT_DIRECTORY": scratch,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": os.path.abspath(objects),
        }
        with suppress(OSError):  # a repository without an index yet
            # with its time: a file as old as the index is compared by its content, which a later copy would spare
            shutil.copy2(index, variables["GIT_INDEX_FILE"])
        _git(root, deadline, "add", "--intent-to-add", "--", "*.py", variables=variables)  # fails where there is none
        return _git(root, deadline, "diff", "--no-ext-diff", "--no-textconv", "--no-color", base, variables=variables)


def _git(
    folder: Path, deadline: float, *words: str, variables: Mapping[str, str] = MappingProxyType({})
) -> bytes | None:
    """Return what git answers; None where it is not installed, fails, or is not done at the deadline."""
    # no optional locks: a git command that the user gives at the same time must not find the index locked
    options = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false")
    command = ["env", *(f"{name}={value}" for name, value in variables.items()), "git", *options, *words]
    # a file and no pipe: what a filter of git's has started may hold a pipe open after git was ended
    with suppress(OSError, subprocess.SubprocessError), tempfile.TemporaryFile() as answer:
        limit = max(deadline - time.monotonic(), 0.0)
        silent = subprocess.DEVNULL
        subprocess.run(command, cwd=folder, stdin=silent, stdout=answer, stderr=silent, timeout=limit, check=True)
        answer.seek(0)
        return answer.read()
    return None
