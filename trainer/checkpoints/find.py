"""Search for complete checkpoints in folders, and their verification; without torch.

step-00001200/
|-- model.safetensors      contents["state_dict"], under the task's own parameter names
|-- tensors.safetensors    every other tensor
|-- model-00002.safetensors, tensors-00002.safetensors
|                          rank 2's shards of sharded tensors (shards.py)
|-- ../base/3f5a...safetensors
|                          weights that are not trained, of all checkpoints of the folder (frozen_base.py)
|-- state.json             everything else, with marks in place of tensors (codec.py)
`-- manifest.json          sizes and SHA-256 sums of the files; written last: the commit mark
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ...base.errors import CheckpointError
from ...base.location import Location, to_absolute
from ...base.run_names import CHECKPOINTS, parse_small
from .hashed import check_file
from .manifest import MANIFEST, STATE_FILE, Manifest
from .storage import STEP_NAME, fetch_file, folder_at, is_file

log = logging.getLogger("legato")

Check = Callable[[Location], object]
"""Raises CheckpointError for an incomplete checkpoint: `verify`, or `check_sizes` if it is read afterwards. May return
False for one that was found damaged before."""


def directory_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:08d}"


def verify(checkpoint: Location) -> Manifest:
    """Return the manifest, after a check of every file; raises CheckpointError with the problem."""
    content, folder = check_sizes(checkpoint), folder_at(checkpoint.parent)
    for name, expected in content.files.items():
        check_file(fetch_file(folder, checkpoint.name, content, name), expected)
    return content


def check_sizes(checkpoint: Location) -> Manifest:
    """Return the manifest, after a check of the files' sizes; raises what `verify` raises."""
    return folder_at(checkpoint.parent).check_sizes(checkpoint.name)


def load_manifest(checkpoint: Location) -> Manifest:
    """Read the manifest of a checkpoint; raises CheckpointError with the place and the problem."""
    return folder_at(checkpoint.parent).read_manifest(checkpoint.name)


def is_checkpoint_of(run: str, checkpoint: Location) -> bool:
    """Return whether a run has written a checkpoint."""
    with suppress(CheckpointError):
        return load_manifest(checkpoint).run == run
    return False


def checkpoints_in(root: Location) -> list[Location]:
    """Return the committed checkpoints of a folder (those with a manifest), oldest step first."""
    return sorted((root / name for name in folder_at(root).names()), key=checkpoint_step)


def best_checkpoints(root: Location, run: str) -> list[Location]:
    """Return a run's checkpoints with a value that are still in a folder, best first."""
    folder = folder_at(root)
    index = folder.read_index()
    # somebody may have deleted a checkpoint, of which the index does not learn
    names = index.best() if index is not None and index.run == run else []
    return [root / name for name in names if folder.committed(name) == name]


def newest_complete(root: Location, check: Check = verify) -> Location | None:
    """Return the newest checkpoint of a folder that passes `check`; warn of every newer one and its problem.

    If a process died while it replaced a checkpoint, that may be the old one under its temporary name, until the next
    sweep or save restores it.
    """
    candidates = [root / name for name in folder_at(root).candidates()]
    return first_complete(sorted(candidates, key=checkpoint_step)[::-1], check)


def first_complete(paths: Iterable[Location], check: Check) -> Location | None:
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


def checkpoint_step(checkpoint: Location) -> int:
    """Return the step in a checkpoint's name, its temporary one too; under any other name its own, -1 if unreadable."""
    name = checkpoint.name.strip(".").split(".")[0]
    if STEP_NAME.fullmatch(name):
        return int(name.removeprefix("step-"))
    # not verified: the step only sorts, whoever reads the checkpoint checks it
    content, state, folder = Manifest({}, ""), None, folder_at(checkpoint.parent)
    with suppress(CheckpointError):
        content = folder.read_manifest(checkpoint.name)
    with suppress(CheckpointError, OSError):
        state = parse_small(folder.fetch(checkpoint.name, content, [STATE_FILE]) / STATE_FILE)
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if isinstance(step, int) else -1


def resolve(place: Location, check: Check = verify) -> Location:
    """Return the checkpoint at a place: itself, or the newest of a folder or run directory that passes `check`.

    Raises CheckpointError with the places that were tried.
    """
    # "." has no name, and so no place beside it
    place = place if place.name else to_absolute(place)
    if (name := folder_at(place.parent).committed(place.name)) is not None:
        return place.parent / name
    if is_file(place):
        raise CheckpointError(
            f"{place} is a file; a Legato checkpoint is a directory with a {MANIFEST}. Files of other "
            f"programs are read by fit(ckpt_path=...), load_from_checkpoint, validate, test and predict."
        )
    for folder in (place / CHECKPOINTS, place):
        if (newest := newest_complete(folder, check)) is not None:
            return newest
    if isinstance(place, Path) and any(place.glob("*.safetensors")):  # such as an adapter
        raise CheckpointError(
            f"{place} has weights that another library wrote, and no {MANIFEST}: a run cannot go on from them. Begin a "
            f"new run whose task loads them, as in PeftModel.from_pretrained(model, {str(place)!r}, is_trainable=True)."
        )
    raise CheckpointError(
        f"There is no complete checkpoint at {place}: expected a directory with a {MANIFEST}, or one with "
        f"{directory_name(1200)}-like directories, itself or in {CHECKPOINTS}/."
    )
