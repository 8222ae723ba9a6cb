"""Reads a checkpoint on all ranks. Each byte is read and hashed by exactly one rank.

Rank 0 reads and broadcasts the values that all ranks need. If only shards of tensors are needed, each rank verifies the
file whose number matches its rank. That file contains the rank's shards if the layout has not changed since the
checkpoint was written. If the number of processes has changed, a rank also reads slices from other files.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from ...base.errors import CheckpointError
from ...base.location import Location
from ..processes.ranks import SINGLE, Ranks
from .codec import MODEL, OTHERS, FlatState, flatten, unflatten
from .commit import on_all_ranks
from .find import check_sizes, resolve
from .foreign import read_file
from .hashed import FileSum, check_file, parse_json
from .manifest import BASE_FILE, MODEL_FILE, SHARD_FILE, STATE_FILE, TENSORS_FILE
from .shards import ShardFiles, load_stored
from .storage import fetch_file, folder_at, is_file, local_file
from .tensors import read_tensors

KEYS = {"model": "state_dict", "base": "state_dict", "tensors": "optimizer_states"}
"""Maps the start of a file's name to the key in the contents for the shards in that file."""


def read(source: Location) -> dict[str, Any]:
    """Read a checkpoint at a location (see `resolve`), or another program's file without renaming its weights."""
    if not is_file(source):
        return read_checkpoint(resolve(source))
    with local_file(source) as path:
        return read_file(path)


def read_checkpoint(checkpoint: Location, in_parts: Collection[str] = (), ranks: Ranks = SINGLE) -> dict[str, Any]:
    """Verify a checkpoint and return its contents, with tensors in host memory. All ranks in `ranks` must call this.

    For the keys in `in_parts`, each sharded tensor is returned as a `StoredTensor`, from which a rank reads only the
    slices it needs. On every rank, raises a CheckpointError that identifies the file and the problem.
    """
    contents: dict[str, Any] = {}
    # all ranks use rank 0's manifest: on a network disk, another rank may see an older manifest
    content = ranks.from_first(lambda: check_sizes(checkpoint))
    files, folder = content.files, folder_at(checkpoint.parent)

    def fetch(file: str) -> Path:
        return fetch_file(folder, checkpoint.name, content, file)

    shard_files = ShardFiles(fetch, files)

    def read_share() -> None:
        for name in files:
            if SHARD_FILE.fullmatch(name) and _reader(name, ranks.size, in_parts) == ranks.rank:
                check_file(fetch(name), files[name])
        if ranks.rank == 0:
            contents.update(_read_unsharded(checkpoint, fetch, files, shard_files, in_parts))

    # verify everything before anything is used, so that rank 0 can choose another checkpoint for all ranks
    on_all_ranks(ranks, read_share)
    return contents if ranks.size == 1 else broadcast_contents(contents, ranks, shard_files=shard_files)


def _reader(name: str, size: int, in_parts: Collection[str]) -> int:
    """Return the rank that verifies a file with shards."""
    # If the layout has not changed since the save, this rank also needs the file, which is then in its machine's cache.
    kind, _, number = name.partition(".")[0].partition("-")
    return int(number) % size if KEYS[kind] in in_parts else 0


def _read_unsharded(
    checkpoint: Location,
    fetch: Callable[[str], Path],
    files: Mapping[str, FileSum],
    shard_files: ShardFiles,
    in_parts: Collection[str],
) -> dict[str, Any]:
    """Verify the files that rank 0 reads for all ranks, and return their contents; see `read_checkpoint`."""
    model, rest, state = (check_file(fetch(name), files[name]) for name in (MODEL_FILE, TENSORS_FILE, STATE_FILE))
    base = read_tensors(check_file(fetch(BASE_FILE), files[BASE_FILE])) if BASE_FILE in files else {}
    tensors = {MODEL: {**base, **read_tensors(model)}, OTHERS: read_tensors(rest)}
    try:
        tree = parse_json(state.read_bytes(), STATE_FILE)
        contents = unflatten(tree, tensors, shard_files)
        return {key: value if key in in_parts else load_stored(value) for key, value in contents.items()}
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{checkpoint}: {error}") from error


def broadcast_contents(
    contents: Mapping[str, Any], ranks: Ranks, source: int = 0, shard_files: ShardFiles | None = None
) -> dict[str, Any]:
    """Return the contents of rank `source` on every rank. All ranks must call this with their own contents.

    Tensors in `shard_files` are not sent, because each rank reads them from these files.
    """
    # shapes first, so that tensors are sent as bytes, without pickle
    flat = flatten(contents) if ranks.rank == source else FlatState({})
    shapes = {
        file: {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        for file, tensors in flat.tensors.items()
    }
    flat.tree, shapes = ranks.broadcast((flat.tree, shapes), source)
    for file, tensors in shapes.items():
        for name, (shape, dtype) in tensors.items():
            sent = flat.tensors[file].get(name)
            tensor = torch.empty(shape, dtype=dtype) if sent is None else sent.detach().cpu().contiguous()
            ranks.broadcast_tensors([tensor], source)
            flat.tensors[file][name] = tensor
    return unflatten(flat.tree, flat.tensors, shard_files)
