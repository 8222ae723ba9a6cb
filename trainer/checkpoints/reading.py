"""Reading of a checkpoint by all ranks: each byte is read and hashed by one of them, once.

Rank 0 reads and broadcasts complete files, and sharded tensors that the ranks need as a whole. Of tensors needed in
shards, each rank reads the file of its own number: on the layout that wrote it, its own shards. After a resize it reads
slices of the other files.
"""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.errors import CheckpointError
from ..processes.ranks import Ranks
from .codec import MODEL, OTHERS, flatten, unflatten
from .find import check_sizes, resolve
from .foreign import read_contents
from .hashed import FileSum, check_file, parse_json
from .manifest import MODEL_FILE, SHARD_FILE, STATE_FILE, TENSORS_FILE
from .shards import ShardFiles, load_stored
from .tensors import read_tensors

SENT_AT_ONCE = 64 << 20
"""Bytes of small tensors that are broadcast together."""
KEYS = {"model": "state_dict", "tensors": "optimizer_states"}
"""Key in the contents whose shards are in files of this name."""


def read_checkpoint(directory: Path, in_parts: Collection[str] = ()) -> dict[str, Any]:
    """Verify a checkpoint and return its contents, tensors on the host.

    Under the keys `in_parts` a sharded tensor is a `StoredTensor`, read when sliced. Raises CheckpointError with the
    file and the problem.
    """
    files = check_sizes(directory)
    parts = [name for name in files if SHARD_FILE.fullmatch(name)]
    return _read_rest(directory, files, _read_parts(directory, files, parts, parts), in_parts)


def read_any(path: Path) -> dict[str, Any]:
    """Read the checkpoint that `resolve` finds at a path, or a foreign file there; see `foreign.read_contents`."""
    return read_contents(path, ()) if path.is_file() else read_checkpoint(resolve(path))


def _read_parts(
    directory: Path, files: Mapping[str, FileSum], names: Collection[str], keep: Collection[str]
) -> dict[str, dict[str, Tensor]]:
    """Verify these files with shards; return the tensors of those to `keep`."""
    for name in names:
        check_file(directory / name, files[name])
    return {name: read_tensors(directory / name) for name in keep}


def _read_rest(
    directory: Path, files: Mapping[str, FileSum], held: dict[str, dict[str, Tensor]], in_parts: Collection[str]
) -> dict[str, Any]:
    """Verify and read the files that one process reads for all; see `read_checkpoint`.

    `held`: tensors of files that are in memory.
    """
    names = {MODEL: MODEL_FILE, OTHERS: TENSORS_FILE}
    tensors = {key: read_tensors(check_file(directory / name, files[name])) for key, name in names.items()}
    try:
        state = (directory / STATE_FILE).read_bytes()
        if hashlib.sha256(state).hexdigest() != files[STATE_FILE].sha256:
            raise CheckpointError(f"{STATE_FILE} is damaged: its SHA-256 is not the one that was written.")
        parts = [name for name in files if SHARD_FILE.fullmatch(name)]
        contents = unflatten(parse_json(state, STATE_FILE), tensors, ShardFiles(directory, held), parts)
        return {key: value if key in in_parts else load_stored(value) for key, value in contents.items()}
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{directory}: {error}") from error


def read_for_all(ranks: Ranks, source: Path, names: Collection[str], in_parts: Collection[str] = ()) -> dict[str, Any]:
    """Read a checkpoint, or a file in a foreign format; every rank calls it.

    `in_parts`: keys of the contents under which each rank reads only what it needs of sharded tensors. Raises
    CheckpointError, on every rank, if something is damaged.
    """
    if source.is_file():
        return read_contents(source, names)
    contents, held = _read_share(ranks, source, in_parts)
    if ranks.size == 1:
        return contents
    return broadcast_contents(contents, 0, ranks.rank, ShardFiles(source, held), ranks.group)


def _read_share(
    ranks: Ranks, source: Path, in_parts: Collection[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Read this rank's files; return the contents, on rank 0, and its files with shards.

    Raises CheckpointError, on every rank, if something is damaged.
    """
    rank, size = ranks.rank, ranks.size
    if size == 1:
        return read_checkpoint(source, in_parts), {}
    error, files = None, {}
    if rank == 0:
        try:
            files = check_sizes(source)
        except CheckpointError as caught:
            error = caught
    error, files = ranks.broadcast((error, files))
    if error is not None:
        raise error
    held: dict[str, dict[str, Tensor]] = {}
    contents: dict[str, Any] = {}
    try:
        # one reader for each file, so that no byte is read or hashed twice in the job
        readers = {name: _reader(name, size, in_parts) for name in files if SHARD_FILE.fullmatch(name)}
        own = [name for name, reader in readers.items() if reader == rank]
        # a file whose tensors belong to other ranks now is read for its hash alone
        keep = [name for name in own if not _is_shared(name, in_parts) or _file_rank(name) == rank]
        held = _read_parts(source, files, own, keep)
        if rank == 0:
            contents = _read_rest(source, files, held, in_parts)
    except CheckpointError as caught:
        error = caught
    # before any of it is used, so that rank 0 can choose another checkpoint for all
    problems = [problem for problem in ranks.gather_objects(error) if problem is not None]
    if problems:
        raise error or problems[0]
    return contents, held


def _file_rank(name: str) -> int:
    return int(name.partition(".")[0].rpartition("-")[2])


def _is_shared(name: str, in_parts: Collection[str]) -> bool:
    """Return whether each rank reads its own slices of a file's tensors."""
    return KEYS[name.partition("-")[0]] in in_parts


def _reader(name: str, size: int, in_parts: Collection[str]) -> int:
    return _file_rank(name) % size if _is_shared(name, in_parts) else 0


def broadcast_contents(
    contents: Mapping[str, Any], source: int, rank: int, files: ShardFiles | None = None, group: Any = None
) -> dict[str, Any]:
    """Return rank `source`'s contents on every rank of a group; every rank calls it, with its own contents.

    Tensors in `files` are not sent: each rank reads them there.
    """
    flat = flatten(contents) if rank == source else None
    plan: list[Any] = [None]
    if flat is not None:
        shapes = {
            file: {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
            for file, tensors in flat.tensors.items()
        }
        plan = [(flat.tree, shapes)]
    dist.broadcast_object_list(plan, src=source, group=group, device=torch.device("cpu"))
    tree, shapes = plan[0]
    received: dict[str, dict[str, Tensor]] = {}
    for file, tensors in shapes.items():
        own = flat.tensors[file] if flat is not None else {}
        received[file] = {
            name: own[name].detach().cpu().contiguous() if flat is not None else torch.empty(shape, dtype=dtype)
            for name, (shape, dtype) in tensors.items()
        }
    for together in _messages([tensor for tensors in received.values() for tensor in tensors.values()]):
        parts = [tensor.view(-1).view(torch.uint8) for tensor in together]
        message = parts[0] if len(parts) == 1 else torch.cat(parts)
        dist.broadcast(message, src=source, group=group)
        if rank != source and len(parts) > 1:
            for part, sent in zip(parts, message.split([part.numel() for part in parts]), strict=True):
                part.copy_(sent)
    # the reader keeps its own, with what it has in shards
    if flat is not None and files is not None:
        return dict(contents)
    return unflatten(tree, received, files, None if files is not None else ())


def _messages(tensors: list[Tensor]) -> list[list[Tensor]]:
    # small ones together, as each broadcast costs a round trip; large ones alone, without a copy
    small = [tensor for tensor in tensors if 0 < tensor.nbytes < SENT_AT_ONCE]
    messages, waiting = [[tensor] for tensor in tensors if tensor.nbytes >= SENT_AT_ONCE], 0
    for tensor in small:
        if not waiting or waiting + tensor.nbytes > SENT_AT_ONCE:
            messages.append([])
            waiting = 0
        messages[-1].append(tensor)
        waiting += tensor.nbytes
    return messages
