"""Search for complete checkpoints in folders, and their verification; without torch.

step-00001200/
|-- model.safetensors      contents["state_dict"], under the task's own parameter names
|-- tensors.safetensors    every other tensor
|-- model-00002.safetensors, tensors-00002.safetensors
|                          rank 2's shards of sharded tensors (shards.py)
|-- state.json             everything else, with marks in place of tensors (codec.py)
`-- manifest.json          sizes and SHA-256 sums of the files; written last: the commit mark
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from ...base.errors import CheckpointError
from ...base.run_names import CHECKPOINTS, parse_small, require_local
from .hashed import FileSum, check_file
from .manifest import MANIFEST, STATE_FILE, load_manifest, regular_size
from .storage import REPLACED, STEP_NAME, temporary_path

log = logging.getLogger("legato")

Check = Callable[[Path], object]
"""Raises CheckpointError for an incomplete checkpoint: `verify`, or `check_sizes` if it is read afterwards. May return
False for one that was found damaged before."""


def directory_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:08d}"


def verify(directory: Path) -> dict[str, FileSum]:
    """Return the manifest's entries, after a check of every file; raises CheckpointError with the problem."""
    files = check_sizes(directory)
    for name, expected in files.items():
        check_file(directory / name, expected)
    return files


def check_sizes(directory: Path) -> dict[str, FileSum]:
    """Return the manifest's entries, after a check of the files' sizes; raises what `verify` raises."""
    if not directory.is_dir():
        raise CheckpointError(f"There is no checkpoint at {directory}: it is not a directory.")
    files = load_manifest(directory).files
    # links and devices are refused before any is opened
    for name, expected in files.items():
        size = regular_size(directory, name)
        if size != expected.size:
            raise CheckpointError(f"{directory}: {name} has {size:,} bytes, {expected.size:,} were written.")
    return files


def checkpoints_in(root: Path) -> list[Path]:
    """Return the committed checkpoints of a folder (those with a manifest), oldest step first."""
    return [path for path in _candidates(root) if path.name[0] != "." and (path / MANIFEST).is_file()]


def newest_complete(root: Path, check: Check = verify) -> Path | None:
    """Return the newest checkpoint of a folder that passes `check`; warn of every newer one and its problem.

    If a process died while it replaced a checkpoint, that may be the old one under its temporary name, until the next
    sweep or save restores it.
    """
    return first_complete(_candidates(root)[::-1], check)


def first_complete(paths: Iterable[Path], check: Check) -> Path | None:
    """Return the first of these checkpoints that passes `check`; warn of every one before it and its problem."""
    # not all of them: to verify is to read it all
    for path in paths:
        try:
            if check(path) is False:
                continue
        except CheckpointError as error:
            log.warning("The checkpoint %s is passed over, it is not whole. %s", path.name, error)
        else:
            return path
    return None


def _candidates(root: Path) -> list[Path]:
    """Return checkpoints, and those that a dying process was replacing, oldest step first."""
    if not root.is_dir():
        return []
    candidates: dict[str, Path] = {}
    for path in sorted(root.iterdir()):  # ".step-..." sorts first and yields to "step-..."
        name = path.name.removeprefix(".").removesuffix(f".{REPLACED}")
        if path.name not in (name, temporary_path(root / name, REPLACED).name) or path.is_symlink():
            continue
        files = path / MANIFEST, path / STATE_FILE
        # a user may have named a checkpoint: then its files tell it from any other folder
        if path.is_dir() and (STEP_NAME.fullmatch(name) or all(file.is_file() for file in files)):
            candidates[name] = path
    return sorted(candidates.values(), key=checkpoint_step)


def checkpoint_step(path: Path) -> int:
    """Return the step in a checkpoint's name, its temporary one too; under any other name its own, -1 if unreadable."""
    name = path.name.strip(".").split(".")[0]
    if STEP_NAME.fullmatch(name):
        return int(name.removeprefix("step-"))
    # not verified: the step only sorts, whoever reads the checkpoint checks it
    state = parse_small(path / STATE_FILE)
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if isinstance(step, int) else -1


def resolve(path: Path, check: Check = verify) -> Path:
    """Return the checkpoint at a path: itself, or the newest of a folder or run directory that passes `check`.

    Raises CheckpointError with the paths that were tried.
    """
    require_local(path, "The checkpoint")
    # "." has no name, and so no place beside it
    path = path if path.name else path.absolute()
    # the second: a process died while it replaced the checkpoint
    for candidate in (path, temporary_path(path, REPLACED)):
        if (candidate / MANIFEST).is_file():
            return candidate
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file; a Legato checkpoint is a directory with a {MANIFEST}. Files of other "
            f"programs are read by fit(ckpt_path=...), load_from_checkpoint, validate, test and predict."
        )
    for folder in (path / CHECKPOINTS, path):
        if (newest := newest_complete(folder, check)) is not None:
            return newest
    raise CheckpointError(
        f"There is no complete checkpoint at {path}: expected a directory with a {MANIFEST}, or one with "
        f"{directory_name(1200)}-like directories, itself or in {CHECKPOINTS}/."
    )
