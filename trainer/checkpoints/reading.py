"""Reading of a checkpoint by all ranks: each byte is read and hashed by one of them, once.

Rank 0 reads and broadcasts what all ranks need. Of tensors needed in shards, each rank verifies the file of its own
number: on the layout that wrote it, its own shards. After a resize it reads slices of the other files, too.
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
"""Key in the contents whose shards are in files of this name."""


def read(source: Location) -> dict[str, Any]:
    """Read the checkpoint that `resolve` finds at a place, or a file of another program there, with its own names."""
    if not is_file(source):
        return read_checkpoint(resolve(source))
    with local_file(source) as path:
        return read_file(path)


def read_checkpoint(checkpoint: Location, in_parts: Collection[str] = (), ranks: Ranks = SINGLE) -> dict[str, Any]:
    """Verify a checkpoint and return its contents, tensors on the host; every one of `ranks` calls it.

    Under the keys `in_parts` a sharded tensor is a `StoredTensor`, of which a rank reads what it slices. Raises
    CheckpointError, on every rank, with the file and the problem.
    """
    contents: dict[str, Any] = {}
    # the manifest that rank 0 has read: another rank may see an older one on a network disk
    content = ranks.from_first(lambda: check_sizes(checkpoint))
    files, folder = content.files, folder_at(checkpoint.parent)

    def fetch(file: str) -> Path:
        return fetch_file(folder, checkpoint.name, content, file)

    shards = ShardFiles(fetch, files)

    def read_share() -> None:
        for name in files:
            if SHARD_FILE.fullmatch(name) and _reader(name, ranks.size, in_parts) == ranks.rank:
                check_file(fetch(name), files[name])
        if ranks.rank == 0:
            contents.update(_read_rest(checkpoint, fetch, files, shards, in_parts))

    # before any of it is used, so that rank 0 can choose another checkpoint for all
    on_all_ranks(ranks, read_share)
    return contents if ranks.size == 1 else broadcast_contents(contents, ranks, shards=shards)


def _reader(name: str, size: int, in_parts: Collection[str]) -> int:
    """Return the rank that verifies a file with shards."""
    # on the layout that wrote it, the rank that needs it: its pages are then in the cache of that machine
    kind, _, number = name.partition(".")[0].partition("-")
    return int(number) % size if KEYS[kind] in in_parts else 0


def _read_rest(
    checkpoint: Location,
    fetch: Callable[[str], Path],
    files: Mapping[str, FileSum],
    shards: ShardFiles,
    in_parts: Collection[str],
) -> dict[str, Any]:
    """Verify and read the files that rank 0 reads for all; see `read_checkpoint`."""
    model, others, state = (check_file(fetch(name), files[name]) for name in (MODEL_FILE, TENSORS_FILE, STATE_FILE))
    base = read_tensors(check_file(fetch(BASE_FILE), files[BASE_FILE])) if BASE_FILE in files else {}
    tensors = {MODEL: {**base, **read_tensors(model)}, OTHERS: read_tensors(others)}
    try:
        tree = parse_json(state.read_bytes(), STATE_FILE)
        contents = unflatten(tree, tensors, shards)
        return {key: value if key in in_parts else load_stored(value) for key, value in contents.items()}
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{checkpoint}: {error}") from error


def broadcast_contents(
    contents: Mapping[str, Any], ranks: Ranks, source: int = 0, shards: ShardFiles | None = None
) -> dict[str, Any]:
    """Return the contents of the rank `source` on every rank; every rank calls it, with its own contents.

    Tensors in `shards` are not sent: each rank reads them there.
    """
    # shapes first, so that tensors go as bytes and are not pickled
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
    return unflatten(flat.tree, flat.tensors, shards)
