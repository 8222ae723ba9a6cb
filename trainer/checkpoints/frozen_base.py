"""Base: weights that are not trained, stored once, by content, beside the checkpoints that refer to them.

checkpoints/
|-- base/
|   `-- 3f5a...safetensors    named by its SHA-256, never changed; its header has the SHA-256 of each tensor
`-- step-00001200/
    |-- model.safetensors     the weights that are not in the base, or have another content there
    `-- manifest.json         names the base as base.safetensors, with its size and its SHA-256

A weight is read from the checkpoint's own file, and from the base of that file if it is not there. Each file with
shards, model-00002.safetensors, has a base of its own, base-00002.safetensors.
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
    """Base of one file of a checkpoint: one that is there, or weights to be written as one."""

    file: str
    """Its name in the manifest."""
    stored: FileSum | None
    new: Mapping[str, Tensor]
    digests: Mapping[str, str]

    def write(self, folder: Folder) -> FileSum:
        """Write the base, unless it is there; return its size and SHA-256."""
        if self.stored is not None:
            return self.stored
        return folder.add_base(lambda file: write_tensors(file, self.new, **{DIGESTS: json.dumps(self.digests)}))


def take_base(folder: Folder, file: str, tensors: dict[str, Tensor], frozen: Collection[str]) -> Base | None:
    """Take the frozen weights out of a checkpoint's file, those that the returned base has or will have.

    A base that has less than half of them gives way to a new one.
    """
    # by content at each save: `_version` does not count what a task writes to `.data`, and no address tells of it. That
    # costs a pass of SHA-256, as the weights' own file would, on all cores.
    digests = digests_of({name: tensors[name] for name in tensors if name in frozen})
    total = sum(tensors[name].nbytes for name in digests)
    stored, names, most = None, set(digests), total / 2
    for entry, known in folder.bases().items() if total else ():
        same = {name for name, digest in digests.items() if known.get(name) == digest}
        size = sum(tensors[name].nbytes for name in same)
        # a base with a weight of another model would leave one that no state mentions
        if size >= most and known.keys() <= tensors.keys():
            stored, names, most = entry, same, size
    taken = {name: tensors.pop(name) for name in digests if total and name in names}
    return Base(base_of(file), stored, taken, digests) if total else None


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the SHA-256 of each tensor, with its type and shape."""
    # threads: hashlib lets go of the interpreter
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return dict(zip(tensors, pool.map(_digest, tensors.values()), strict=True))


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    if tensor.nbytes:
        digest.update(flat_bytes(tensor.cpu()).numpy().data)
    SAVES.record()
    return digest.hexdigest()
