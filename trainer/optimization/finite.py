"""Checks that tensors are finite, using few host syncs."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ...base.tensors import local_part
from ..metrics.reduce import to_floats


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all values of the tensors are finite, with one host sync per device."""
    # for a DTensor, only this rank's shard
    local = (local_part(tensor).detach() for tensor in tensors)
    values = [tensor for tensor in local if tensor.is_floating_point() and tensor.numel()]
    values = [value.coalesce().values() if value.is_sparse else value for value in values]
    on_host = [value for value in values if value.is_cpu]
    # A finite sum has finite terms, and on a CPU takes a tenth of a norm's time. It may overflow, so check again.
    sums = [value.sum(dtype=torch.float32 if value.dtype.itemsize < 4 else None) for value in on_host]
    suspects = [value for value, total in zip(on_host, to_floats(sums), strict=True) if total - total != 0.0]
    elsewhere = [value for value in values if not value.is_cpu]
    largest = [nn.utils.get_total_norm(group, float("inf")) for group in (suspects, elsewhere) if group]
    return all(bool(norm.isfinite()) for norm in largest)


def bad_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that are not finite."""
    # all at once first: checking tensors one by one takes a host sync for each
    return [] if are_finite(tensors.values()) else [name for name, value in tensors.items() if not are_finite([value])]
