"""Finds complete checkpoints in folders and verifies them. Does not import torch. A checkpoint consists of these files:

step-00001200/
|-- model.safetensors      contents["state_dict"], using the task's parameter names
|-- tensors.safetensors    every other tensor
|-- model-00002.safetensors, tensors-00002.safetensors
|                          rank 2's shards of sharded tensors (shards.py)
|-- ../base/3f5a...safetensors
|                          frozen weights, shared by all checkpoints in the folder (frozen_base.py)
|-- state.json             everything else, with marks in place of tensors (codec.py)
`-- manifest.json          sizes and SHA-256 sums of the files; it is written last and commits the checkpoint
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
"""Function that raises CheckpointError for an incomplete checkpoint: `verify` or, if the checkpoint is read afterwards,
`check_sizes`. The function may return False for a checkpoint that is already known to be damaged."""


def directory_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:08d}"


def verify(checkpoint: Location) -> Manifest:
    """Verify every file and return the manifest. Raises a CheckpointError that says why if a check fails."""
    content, folder = check_sizes(checkpoint), folder_at(checkpoint.parent)
    for name, expected in content.files.items():
        check_file(fetch_file(folder, checkpoint.name, content, name), expected)
    return content


def check_sizes(checkpoint: Location) -> Manifest:
    """Check the sizes of all files, and return the manifest. Raises the same errors as `verify`."""
    return folder_at(checkpoint.parent).check_sizes(checkpoint.name)


def load_manifest(checkpoint: Location) -> Manifest:
    """Read a checkpoint's manifest. Raises a CheckpointError that identifies its location and the problem."""
    return folder_at(checkpoint.parent).read_manifest(checkpoint.name)


def is_checkpoint_of(run: str, checkpoint: Location) -> bool:
    """Return whether this run wrote the checkpoint."""
    with suppress(CheckpointError):
        return load_manifest(checkpoint).run == run
    return False


def checkpoints_in(root: Location) -> list[Location]:
    """Return the committed checkpoints in a folder (those with a manifest), oldest step first."""
    return sorted((root / name for name in folder_at(root).names()), key=checkpoint_step)


def best_checkpoints(root: Location, run: str) -> list[Location]:
    """Return a run's checkpoints that have a score and are still in the folder, best first."""
    folder = folder_at(root)
    index = folder.read_index()
    # the index is not updated when somebody deletes a checkpoint
    names = index.best() if index is not None and index.run == run else []
    return [root / name for name in names if folder.committed(name) == name]


def newest_complete(root: Location, check: Check = verify) -> Location | None:
    """Return the newest checkpoint in a folder that passes `check`. Warn about newer ones that fail.

    If a process died while replacing a checkpoint, the result may be the old checkpoint under its temporary name. The
    next sweep or save restores the original name.
    """
    candidates = [root / name for name in folder_at(root).candidates()]
    return first_complete(sorted(candidates, key=checkpoint_step)[::-1], check)


def first_complete(paths: Iterable[Location], check: Check) -> Location | None:
    """Return the first checkpoint that passes `check`. Warn about earlier ones that fail."""
    # stop at the first one, because verification reads the whole checkpoint
    for path in paths:
        try:
            if check(path) is False:
                continue
        except CheckpointError as error:
            log.warning("Skipping the incomplete checkpoint %s. %s", path.name, error)
        else:
            return path
    return None


def checkpoint_step(checkpoint: Location) -> int:
    """Return a checkpoint's step from its (possibly temporary) name or, failing that, its state; -1 if unreadable."""
    name = checkpoint.name.strip(".").split(".")[0]
    if STEP_NAME.fullmatch(name):
        return int(name.removeprefix("step-"))
    # not verified: the step is only a sort key, and each reader verifies the checkpoint
    content, state, folder = Manifest({}, ""), None, folder_at(checkpoint.parent)
    with suppress(CheckpointError):
        content = folder.read_manifest(checkpoint.name)
    with suppress(CheckpointError, OSError):
        state = parse_small(folder.fetch(checkpoint.name, content, [STATE_FILE]) / STATE_FILE)
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if isinstance(step, int) else -1


def resolve(place: Location, check: Check = verify) -> Location:
    """Return the checkpoint at a location.

    If the location is a folder of checkpoints or a run directory, return the newest checkpoint that passes `check`.
    Raises a CheckpointError that describes what was expected if there is none.
    """
    # "." has no name and no parent
    place = place if place.name else to_absolute(place)
    if (name := folder_at(place.parent).committed(place.name)) is not None:
        return place.parent / name
    if is_file(place):
        raise CheckpointError(
            f"{place} is a file; a Legato checkpoint is a directory with a {MANIFEST}. To read another program's "
            f"file, use fit(ckpt_path=...), load_from_checkpoint, validate, test or predict."
        )
    for folder in (place / CHECKPOINTS, place):
        if (newest := newest_complete(folder, check)) is not None:
            return newest
    if isinstance(place, Path) and any(place.glob("*.safetensors")):  # an adapter, for example
        raise CheckpointError(
            f"{place} has weights from another library and no {MANIFEST}, so a run cannot resume from it. Start a new "
            f"run whose task loads them, as in PeftModel.from_pretrained(model, {str(place)!r}, is_trainable=True)."
        )
    raise CheckpointError(
        f"There is no complete checkpoint at {place}: expected a directory with a {MANIFEST}, or a directory that "
        f"contains checkpoints such as {directory_name(1200)}, directly or in {CHECKPOINTS}/."
    )
