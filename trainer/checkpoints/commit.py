"""Commits a checkpoint: each rank writes its files, and rank 0 publishes them."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from ...base.errors import CheckpointError
from ...base.location import Location, to_absolute
from ...base.quantities import format_bytes
from ..processes.ranks import SINGLE, Ranks
from .codec import MODEL, OTHERS, FlatState, flatten
from .find import verify
from .frozen_base import Base, take_base
from .hashed import FileSum, write_bytes
from .manifest import BASE, MODEL_FILE, STATE_FILE, TENSORS_FILE, base_of
from .shards import file_name
from .storage import Folder, fetch_file, folder_at
from .tensors import read_tensors, write_tensors

T = TypeVar("T")


def no_locks() -> None:
    """Do nothing, because the save holds no locks."""


def write(
    checkpoint: Location,
    contents: Mapping[str, Any],
    *,
    ranks: Ranks = SINGLE,
    run: str = "",
    frozen: Collection[str] = (),
    check_locks: Callable[[], None] = no_locks,
) -> None:
    """Write a checkpoint. If a checkpoint with that name exists, replace it atomically.

    All ranks in `ranks` must call this with the same contents. Each rank writes its shards of DTensors, and rank 0
    writes everything else.

    Args:
        run: id of the run, for the manifest; "" if there is no run.
        frozen: state dict keys of the weights that are stored only once for all checkpoints in the folder.
        check_locks: Function that raises CheckpointError if another run has taken the folder. Rank 0 calls it right
            before it publishes the checkpoint, and after an error, before it deletes files.

    Raises CheckpointError, and leaves no files behind, if a value cannot be stored, the disk does not have enough
    free space, or writing fails.
    """
    flat = flatten(contents, frozen)
    flat.assign_writers(ranks)
    commit(checkpoint, flat, ranks, run, check_locks)


def commit(
    checkpoint: Location, flat: FlatState, ranks: Ranks, run: str, check_locks: Callable[[], None] = no_locks
) -> None:
    """Write a checkpoint whose writers have been assigned; see `write`.

    On failure, raises CheckpointError on every rank and leaves any existing checkpoint unchanged.
    """
    checkpoint = to_absolute(checkpoint)
    folder, name, is_first = folder_at(checkpoint.parent), checkpoint.name, ranks.rank == 0
    files, bases = _tensors_by_file(flat, ranks.rank), list[Base]()
    needed, begun, stage = 0, False, ""

    def take_bases() -> int:
        for file in filter(base_of, files):
            base = take_base(folder, file, files[file], flat.frozen)
            bases.extend([base] if base is not None else ())
        written = [*files.values(), *(base.new for base in bases if base.stored is None)]
        return sum(tensor.nbytes for tensors in written for tensor in tensors.values())

    def begin() -> str:
        nonlocal begun
        if not is_first:
            return ""
        if name == BASE:
            raise CheckpointError(f"A checkpoint cannot be named {BASE!r}: the name is reserved for frozen weights.")
        folder.require_free_name(name)
        begun = True
        return folder.open_stage(name, needed, run)

    def publish() -> None:
        if is_first:
            check_locks()
            folder.publish(name, stage, written, run)

    # Each of the four phases ends with a gather of errors. No rank enters the next phase if another rank has failed,
    # and rank 0 publishes the checkpoint only once the files of all ranks are synced.
    try:
        # summed over ranks: they share the disk, and each rank's share alone might fit
        needed = sum(on_all_ranks(ranks, take_bases))
        stage = on_all_ranks(ranks, begin)[0]
        write, tree = partial(folder.write, name, stage), flat.tree if is_first else None
        sums = on_all_ranks(ranks, lambda: _write_files(write, tree, files) | _write_bases(folder, bases))
        written = {file: entry for rank_sums in sums for file, entry in rank_sums.items()}
        on_all_ranks(ranks, publish)
    except BaseException as error:  # on Ctrl-C, too: an incomplete stage would take up disk space until the next save
        if begun:
            # if another run has taken the folder, files with the same names may be its own
            with suppress(CheckpointError):
                check_locks()
                folder.discard(name, stage)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{checkpoint} could not be written: {error.strerror or error} (it needs {format_bytes(needed)}). "
                f"Earlier checkpoints are unchanged."
            ) from error
        raise


def _tensors_by_file(flat: FlatState, rank: int) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of this rank's files: its shards and, on rank 0, the tensors that are not sharded."""
    files = {MODEL_FILE: dict(flat.tensors[MODEL]), TENSORS_FILE: dict(flat.tensors[OTHERS])} if rank == 0 else {}
    for key, shards in flat.shards.items():
        if shards:  # a rank that has only replicas of other ranks' shards writes no file
            files[file_name(key, rank)] = {name: shard.block for name, shard in shards.items()}
    return files


def _write_files(
    write: Callable[..., FileSum], tree: Any, files: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, FileSum]:
    """Write this rank's files to a checkpoint. Rank 0 also writes state.json; `tree` is None on all other ranks."""
    sums = {}
    if tree is not None:
        state = json.dumps(tree, allow_nan=False).encode("ascii")
        sums[STATE_FILE] = write(STATE_FILE, partial(write_bytes, data=state))
    return sums | {file: write(file, partial(write_tensors, tensors=tensors)) for file, tensors in files.items()}


def _write_bases(folder: Folder, bases: Iterable[Base]) -> dict[str, FileSum]:
    # after the other files, so that on a rank that does not share the folder, writing those fails first
    return {base.file: base.write(folder) for base in bases}


def copy_whole(source: Location, target: Location) -> None:
    """Copy a checkpoint and merge its bases into the copied files. Raises CheckpointError on failure."""
    content, beside, folder = verify(source), folder_at(source.parent), folder_at(target.parent)
    sums, stage = {}, folder.open_stage(target.name, sum(entry.size for entry in content.files.values()), content.run)
    try:
        for file in content.split()[0].files:
            path, base, fill = fetch_file(beside, source.name, content, file), base_of(file), None
            if base in content.files:
                tensors = {**read_tensors(fetch_file(beside, source.name, content, base)), **read_tensors(path)}
                fill = partial(write_tensors, tensors=tensors)
            sums[file] = folder.write(target.name, stage, file, fill or partial(write_bytes, data=path.read_bytes()))
        folder.publish(target.name, stage, sums, content.run)
    except BaseException as error:
        folder.discard(target.name, stage)
        if isinstance(error, OSError):
            raise CheckpointError(f"{target} could not be written: {error.strerror or error}.") from error
        raise


def on_all_ranks(ranks: Ranks, action: Callable[[], T]) -> list[T]:
    """Call `action` on every rank and return the results in rank order.

    If `action` fails on this rank, re-raises its exception. If it fails only on other ranks, raises a CheckpointError
    with the error message from one of them.
    """
    if ranks.size == 1:
        return [action()]
    result: Any = None
    error: Exception | None = None
    failure: CheckpointError | None = None
    try:
        result = action()
    except CheckpointError as caught:
        error = failure = caught
    except Exception as caught:  # another process may be unable to unpickle it
        text = f"Rank {ranks.rank} could not write its part of the checkpoint. {type(caught).__name__}: {caught}"
        error, failure = caught, CheckpointError(text)
    outcomes = ranks.gather_objects((result, failure))
    failures = [failure for _, failure in outcomes if failure is not None]
    if failures:
        raise error or failures[0]
    return [result for result, _ in outcomes]
