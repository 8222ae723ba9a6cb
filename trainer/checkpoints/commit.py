"""Commit of a checkpoint by all ranks, each of which writes its files."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from ...base.errors import CheckpointError
from ...base.location import Location, to_absolute
from ...base.quantities import format_bytes
from ..processes.ranks import SINGLE, Ranks
from .codec import MODEL, OTHERS, FlatState, flatten
from .hashed import FileSum, write_bytes
from .manifest import MODEL_FILE, STATE_FILE, TENSORS_FILE
from .shards import file_name
from .storage import folder_at
from .tensors import write_tensors

T = TypeVar("T")


def write(checkpoint: Location, contents: Mapping[str, Any], *, ranks: Ranks = SINGLE, run: str = "") -> None:
    """Write a checkpoint, replacing an existing one of this name atomically.

    Every one of `ranks` calls this, with the same contents: of a DTensor each writes its shard, and rank 0 the rest.
    `run`: id of the run for the manifest; "": none. Raises CheckpointError if a value cannot be stored, the disk is too
    full or writing fails; nothing is left behind then.
    """
    flat = flatten(contents)
    flat.assign_writers(ranks)
    commit(checkpoint, flat, ranks, run)


def commit(checkpoint: Location, flat: FlatState, ranks: Ranks = SINGLE, run: str = "") -> None:
    """Write a checkpoint whose writers are assigned; see `write`.

    Raises CheckpointError, on every rank, if that fails; an existing checkpoint is kept then.
    """
    checkpoint = to_absolute(checkpoint)
    folder, name, is_first = folder_at(checkpoint.parent), checkpoint.name, ranks.rank == 0
    # of all ranks: the disk is theirs together, and each alone might fit
    needed, begun, stage = sum(ranks.gather_objects(flat.nbytes)), False, ""

    def begin() -> str:
        nonlocal begun
        if not is_first:
            return ""
        folder.require_free_name(name)
        begun = True
        return folder.open_stage(name, needed, run)

    # Each of the three ends with a gather of errors: no rank goes on to the next while another has failed, and the
    # checkpoint is published only when every rank's files are synced.
    try:
        stage = on_all_ranks(ranks, begin)[0]
        sums = on_all_ranks(ranks, lambda: _write_files(partial(folder.write, name, stage), flat, ranks.rank))
        files = {file: entry for written in sums for file, entry in written.items()}
        on_all_ranks(ranks, lambda: folder.publish(name, stage, files, run) if is_first else None)
    except BaseException as error:  # Ctrl-C too: a torn stage would take its space until the next save
        if begun:
            folder.discard(name, stage)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{checkpoint} could not be written: {error.strerror or error} ({format_bytes(needed)} needed). "
                f"Earlier checkpoints are untouched."
            ) from error
        raise


def _write_files(write: Callable[..., FileSum], flat: FlatState, rank: int) -> dict[str, FileSum]:
    """Write this rank's files of a checkpoint: of rank 0 what is not sharded, and of each its shards."""
    files = {}
    if rank == 0:
        state = json.dumps(flat.tree, allow_nan=False).encode("ascii")
        files[STATE_FILE] = write(STATE_FILE, partial(write_bytes, data=state))
        for file, key in ((MODEL_FILE, MODEL), (TENSORS_FILE, OTHERS)):
            files[file] = write(file, partial(write_tensors, tensors=flat.tensors[key]))
    for key, parts in flat.parts.items():
        if parts:  # a rank with replicas of what others write has no file at all
            file = file_name(key, rank)
            blocks = {tensor: part.block for tensor, part in parts.items()}
            files[file] = write(file, partial(write_tensors, tensors=blocks))
    return files


def on_all_ranks(ranks: Ranks, action: Callable[[], T]) -> list[T]:
    """Call `action` on every rank and return the results, by rank.

    Raises its exception here, or another rank's CheckpointError; of any other exception there a CheckpointError.
    """
    if ranks.size == 1:
        return [action()]
    result: Any = None
    error: Exception | None = None
    problem: CheckpointError | None = None
    try:
        result = action()
    except CheckpointError as caught:
        error = problem = caught
    except Exception as caught:  # which another process may not be able to unpickle
        text = f"Rank {ranks.rank} could not write its part of the checkpoint. {type(caught).__name__}: {caught}"
        error, problem = caught, CheckpointError(text)
    answers = ranks.gather_objects((result, problem))
    failures = [failure for _, failure in answers if failure is not None]
    if failures:
        raise error or failures[0]
    return [answer for answer, _ in answers]
