"""Records the command line, versions, host and code in the run directory each time a run starts.

environment.json     one entry per launch, newest last
uncommitted.diff     uncommitted changes for `git apply`; resuming with different code adds uncommitted-1.diff
config.yaml          the config used to train the latest weights
config_given.yaml    the same config without defaults
starts/N.yaml        the config of launch N, counted from 0 as in environment.json
epochs.jsonl         the step before each epoch; if an epoch has two lines, the later one applies
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
"""Folder in a run directory with the config of each launch."""
LARGEST_DIFF = 1_000_000
"""Maximum size in bytes of stored uncommitted changes. For larger changes, only the file names are stored."""
GIT_SECONDS = 3.0
"""Time limit in seconds for all git commands together. A large repository on a slow disk must not delay startup."""
MOST_NAMES = 200
_TRAINERS = count(1)


def add_start(directory: Path, facts: Mapping[str, Any], save_code: bool, config: str | None = None) -> None:
    """Record that the run was started or resumed, along with the entries in `facts` and the config of this launch."""
    starts = read_starts(directory)
    if not starts and (directory / RECORD).exists():
        os.replace(directory / RECORD, directory / f"{RECORD}.damaged")  # a person may still want to read it
    from ..switches import environment, versions  # not at the top: readers of records need no torch

    code = code_of(Path.cwd()) if save_code else None
    if code is not None:
        diff = code.pop("diff")
        previous = starts[-1]["git"] or {} if starts else {}
        code["diff_file"] = _store_diff(directory, diff, len(starts), previous.get("diff_file")) if diff else None
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
    """Return this process's command, and which of the script's Trainers made the call.

    "script" is the file running as `__main__` (None in a notebook), "module" is the module after `python -m`,
    "trainer" is the Trainer's number in the script, and "fit" is the number of the Trainer's run.
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
    """Return the SHA-256 of a script; None if it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None


def start_config(directory: Path, number: int) -> Path:
    """Return the path to the file that stores a launch's config."""
    return directory / STARTS / f"{number}.yaml"


def store_config(directory: Path, config: str, explicit: str | None) -> None:
    """Store a run's training config in the run directory, both in full and without defaults (`explicit`)."""
    for name, text in ((CONFIG, config), (GIVEN_CONFIG, explicit)):
        if text is not None:
            replace_text(directory / name, text)


def is_stored(directory: Path, config: str) -> bool:
    """Return whether the config is stored in a run directory."""
    try:
        return (directory / CONFIG).read_text(encoding="utf-8") == config
    except (OSError, UnicodeDecodeError):
        return False


def note_epoch(directory: Path, epoch: int, step: int) -> None:
    """Record in a run directory that an epoch started after the given step."""
    if not identity_of(directory):
        return
    # a full disk must not end the training; if the line is missing, `legato samples` raises an error
    with suppress(OSError), (directory / EPOCHS).open("a", encoding="ascii") as file:
        file.write(f'{{"epoch": {epoch}, "step": {step}}}\n')


def epochs_begun(directory: Path) -> dict[int, int]:
    """Return how many steps preceded each epoch that has started, keyed by epoch.

    If an epoch was repeated after a resume, only its most recent start counts.
    """
    begun: dict[int, int] = {}
    if (directory / EPOCHS).is_file():
        for line in (directory / EPOCHS).read_text(encoding="ascii").splitlines():
            with suppress(ValueError):  # a kill may have truncated the line
                entry = json.loads(line)
                begun = {epoch: step for epoch, step in begun.items() if epoch < entry["epoch"]}
                begun[entry["epoch"]] = entry["step"]
    return begun


def last_replicas(directory: Path) -> int | None:
    """Return a run's number of replicas, as recorded when it last started; None if unknown."""
    counts = [start.get("replicas") for start in read_starts(directory) if start.get("stage", "fit") == "fit"]
    return counts[-1] if counts and isinstance(counts[-1], int) else None


def read_starts(directory: Path) -> list[dict[str, Any]]:
    """Return the records of a run's launches, newest last; [] if there are no readable records."""
    try:
        return list(parse_small(directory / RECORD)["starts"])
    except (KeyError, TypeError):
        return []


def jobs_of(directory: Path) -> set[str | None]:
    """Return the ids of the SLURM jobs that started the run. Each launch outside SLURM adds None."""
    return {start.get("slurm_job") for start in read_starts(directory)}


def _store_diff(directory: Path, diff: bytes, number: int, previous: str | None) -> str:
    """Save the uncommitted changes at launch unless the previous launch had the same ones. Return the file's name."""
    if previous is not None and (directory / previous).is_file() and (directory / previous).read_bytes() == diff:
        return previous
    name = f"{Path(DIFF).stem}-{number}.diff" if (directory / DIFF).exists() else DIFF
    (directory / name).write_bytes(diff)
    return name


# --- versions ---------------------------------------------------------------------------------------------------------
def installed_packages() -> dict[str, str]:
    """Return the versions of all installed packages, from the names of their metadata folders."""
    # importlib.metadata would open a file for each package, which takes 0.19 s per start for a hundred packages
    names: list[str] = []
    for folder in reversed(sys.path):  # the first folder on the path wins
        with suppress(OSError):  # not a folder, or not readable
            names += os.listdir(folder or ".")
    pairs = (name.removesuffix(".dist-info").rpartition("-") for name in names if name.endswith(".dist-info"))
    return dict(sorted((package, version) for package, _, version in pairs))


# --- code -------------------------------------------------------------------------------------------------------------
def loaded_sources(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each loaded module's source file, without libraries, keyed by path relative to `folder`."""
    legato, libraries = str(Path(__file__).parents[2]), (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    # a list, because another thread may import a module in the meantime
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    hashes: dict[str, str] = {}
    for file in sorted(file for file in files if isinstance(file, str) and file.endswith(".py")):
        if not file.startswith((legato, *libraries)) and "-packages/" not in file and len(hashes) < MOST_NAMES:
            with suppress(OSError):
                hashes[os.path.relpath(file, folder)] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return hashes


def code_of(folder: Path, base: str = "HEAD") -> dict[str, Any] | None:
    """Return the root, commit and branch of a folder's git repository, if there is one, and its changes since `base`.

    "diff" contains the changed files and new .py files, as input for `git apply`. It is None if there are no changes,
    if the diff is larger than LARGEST_DIFF bytes, or if git took too long. "changed" lists the names of these files.
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
    """Return the diff against a commit, including new .py files; None if git fails."""
    # After `git add --intent-to-add`, the diff includes new files, and links as links. The command uses a copy of the
    # index and a separate object folder, so the repository is not changed.
    with tempfile.TemporaryDirectory() as scratch:
        variables = {
            "GIT_INDEX_FILE": os.path.join(scratch, "index"),
            "GIT_OBJECT_DIRECTORY": scratch,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": os.path.abspath(objects),
        }
        with suppress(OSError):  # the repository may have no index yet
            # preserve its time: git compares files newer than the index by content, so the copy must not be newer
            shutil.copy2(index, variables["GIT_INDEX_FILE"])
        _git(root, deadline, "add", "--intent-to-add", "--", "*.py", variables=variables)  # fails without new .py files
        return _git(root, deadline, "diff", "--no-ext-diff", "--no-textconv", "--no-color", base, variables=variables)


def _git(
    folder: Path, deadline: float, *words: str, variables: Mapping[str, str] = MappingProxyType({})
) -> bytes | None:
    """Return git's output; None if git is not installed, fails, or exceeds the time limit."""
    # no optional locks: the user may run a git command at the same time, which must not find the index locked
    options = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false")
    command = ["env", *(f"{name}={value}" for name, value in variables.items()), "git", *options, *words]
    # a file, not a pipe: a process started by a git filter may hold a pipe open after git has exited
    with suppress(OSError, subprocess.SubprocessError), tempfile.TemporaryFile() as output:
        limit = max(deadline - time.monotonic(), 0.0)
        silent = subprocess.DEVNULL
        subprocess.run(command, cwd=folder, stdin=silent, stdout=output, stderr=silent, timeout=limit, check=True)
        output.seek(0)
        return output.read()
    return None
