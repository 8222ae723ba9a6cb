"""Bases: files of frozen weights. Each is stored once, alongside the checkpoints that refer to it.

checkpoints/
|-- base/
|   `-- 3f5a...safetensors    named after its SHA-256 and never changed; its header has the SHA-256 of each tensor
`-- step-00001200/
    |-- model.safetensors     the weights that are missing from the base or differ from it
    `-- manifest.json         lists the base as base.safetensors, with its size and its SHA-256

A weight is read from the checkpoint's file or, if that file does not contain the weight, from the file's base.
Each file with shards has its own base: the base of model-00002.safetensors is base-00002.safetensors.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from ..processes.save_progress import SAVES
from .hashed import FileSum
from .manifest import DIGESTS, base_of
from .storage import Folder
from .tensors import flat_bytes, write_tensors


class Base(NamedTuple):
    """The base of one checkpoint file: either an existing base or the weights for a new one."""

    file: str
    """Name in the manifest."""
    stored: FileSum | None
    new: Mapping[str, Tensor]
    digests: Mapping[str, str]

    def write(self, folder: Folder) -> FileSum:
        """Write the base unless it already exists. Return the base's size and SHA-256."""
        if self.stored is not None:
            return self.stored
        return folder.add_base(lambda file: write_tensors(file, self.new, **{DIGESTS: json.dumps(self.digests)}))


def take_base(folder: Folder, file: str, tensors: dict[str, Tensor], frozen: Collection[str]) -> Base | None:
    """Return the base for one of a checkpoint's files, and remove the base's weights from `tensors`.

    An existing base is used if it contains at least half of the frozen bytes. Otherwise, a new base is returned.
    """
    # Compared by content at each save, because writes to `.data` change neither `_version` nor the address. This costs
    # one SHA-256 pass on all cores, which takes as long as writing the weights would.
    digests = digests_of({name: tensors[name] for name in tensors if name in frozen})
    total = sum(tensors[name].nbytes for name in digests)
    stored, names, most = None, set(digests), total / 2
    for entry, base_digests in folder.bases().items() if total else ():
        same = {name for name, digest in digests.items() if base_digests.get(name) == digest}
        size = sum(tensors[name].nbytes for name in same)
        # a base with a weight from another model would add a tensor that state.json does not mention
        if size >= most and base_digests.keys() <= tensors.keys():
            stored, names, most = entry, same, size
    taken = {name: tensors.pop(name) for name in digests if total and name in names}
    return Base(base_of(file), stored, taken, digests) if total else None


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the SHA-256 of each tensor's dtype, shape and bytes."""
    # threads, because hashlib releases the GIL
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return dict(zip(tensors, pool.map(_digest, tensors.values()), strict=True))


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    if tensor.nbytes:
        digest.update(flat_bytes(tensor.cpu()).numpy().data)
    SAVES.record()
    return digest.hexdigest()
