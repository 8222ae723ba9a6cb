"""Writes the results of `legato predict` to a file. This module is separate because it imports torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import TaskError


def write_predictions(predictions: Sequence[Any], folder: Path) -> Path:
    """Write the results of all batches in order, as safetensors if they are tensors, otherwise as JSON Lines.

    Args:
        predictions: One result per batch, written as "predictions". With multiple loaders, a list of results per
            loader, written as "predictions.0", "predictions.1" and so on.

    Returns the path of the file. Raises TaskError if a result contains anything other than JSON values and tensors.
    """
    # predict returns a list per loader, or the results of a single loader
    several = all(isinstance(item, list) for item in predictions)
    loaders = list(predictions) if several else [list(predictions)]
    names = [f"predictions.{index}" for index in range(len(loaders))] if several else ["predictions"]
    folder.mkdir(parents=True, exist_ok=True)
    if all(_can_be_joined(batches) for batches in loaders):
        from safetensors.torch import save_file

        path = folder / "predictions.safetensors"
        save_file({name: _join(batches) for name, batches in zip(names, loaders, strict=True)}, path)
        return path
    path = folder / "predictions.jsonl"
    with path.open("w") as file:
        for name, batches in zip(names, loaders, strict=True):
            for index, batch in enumerate(batches):
                file.write(json.dumps({"loader": name, "batch": index, "predictions": batch}, default=_as_json) + "\n")
    return path


def _can_be_joined(batches: Sequence[Any]) -> bool:
    """Return whether all results are tensors whose shapes differ only in the first dimension."""
    if not batches or not all(isinstance(batch, Tensor) for batch in batches):
        return False
    return len({(batch.dtype, batch.dim(), batch.shape[1:]) for batch in batches}) == 1


def _join(batches: Sequence[Tensor]) -> Tensor:
    joined = torch.stack(tuple(batches)) if batches[0].dim() == 0 else torch.cat(tuple(batches))
    return joined.detach().cpu().contiguous()


def _as_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    raise TaskError(
        f"predict_step returned {type(value).__name__}, which cannot be written. Return tensors, numbers, strings, or "
        f"lists and dicts of these."
    )
