"""Private names of torch, torchmetrics and CPython: all that Legato uses, each behind a function with a public way.

A `Shortcut` says which names it takes and what the public way costs. Where this torch lacks the names, or has them with
another signature, the function takes the public way: slower or less detailed, never wrong; `legato check` lists those.
The environment variable LEGATO_PUBLIC_TORCH=1, and `public_only` in a program, take the public ways everywhere: to see
whether one of these names is behind a problem with a torch that nobody has tried yet.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

_forced = False
"""Whether all functions take their public ways."""


class Shortcut:
    """Some private names that are used together, and what goes without them."""

    def __init__(self, names: str, without: str, probe: Callable[[], bool]) -> None:
        """`probe` returns whether the names are as expected; what it raises for a missing one counts as no.

        `without` says what the public way costs, for `legato check`.
        """
        self.names, self.without, self.probe = names, without, probe
        SHORTCUTS.append(self)

    @cached_property
    def usable(self) -> bool:
        """Whether the names are there, and no public way is asked for. A plain attribute once it was read."""
        return not _forced and self.is_there

    @cached_property
    def is_there(self) -> bool:
        """Whether this torch has the names."""
        try:
            return self.probe()
        except (AttributeError, ImportError, TypeError, ValueError):
            return False


SHORTCUTS: list[Shortcut] = []


def take_public_ways(wanted: bool = True) -> None:
    """Take the public ways everywhere in this process, or no longer."""
    global _forced
    _forced = wanted
    for shortcut in SHORTCUTS:
        shortcut.__dict__.pop("usable", None)


@contextmanager
def public_only() -> Iterator[None]:
    """Take the public ways everywhere in this process while the context is entered."""
    before = _forced
    take_public_ways()
    try:
        yield
    finally:
        take_public_ways(before)


def remarks() -> list[str]:
    """Return a sentence for each shortcut that is not taken, with what goes without it."""
    why = "is switched off by LEGATO_PUBLIC_TORCH" if _forced else f"is not in torch {torch.__version__} as expected"
    return [f"{one.names} {why}: {one.without}." for one in SHORTCUTS if not one.usable]


def _takes(function: Any, *names: str) -> bool:
    """Return whether a function has exactly these parameters, in this order."""
    return list(inspect.signature(function).parameters) == list(names)


# --- process groups ---------------------------------------------------------------------------------------------------
def _c10d() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d


def _has_group_map() -> bool:
    return isinstance(_c10d()._world.pg_map, dict)


def _can_set_timeout() -> bool:
    c10d = _c10d()
    return hasattr(torch.distributed, "set_timeout") or _takes(c10d._set_pg_timeout, "timeout", "group")


GROUPS = Shortcut(
    "torch.distributed's _world.pg_map",
    "the limits of timeout.step and timeout.checkpoint hold for the default process group only",
    _has_group_map,
)
TIMEOUT = Shortcut(
    "torch.distributed's _set_pg_timeout",
    "the limit of timeout.startup holds for the whole run",
    _can_set_timeout,
)


def set_group_timeouts(limit: timedelta) -> None:
    """Set the limit of every process group of this process, but those of MPI, which has none."""
    from torch import distributed

    default = distributed.group.WORLD
    groups = list(_c10d()._world.pg_map) if GROUPS.usable else [] if default is None else [default]
    for group in groups:
        if distributed.get_backend(group) != "mpi":
            set_group_timeout(limit, group)


def set_group_timeout(limit: timedelta, group: Any = None) -> None:
    """Set the limit of one process group, by default the default one."""
    from torch import distributed

    public = getattr(distributed, "set_timeout", None)  # torch 2.15
    if public is not None:
        public(limit, group)
    elif TIMEOUT.usable:
        _c10d()._set_pg_timeout(limit, group)


GROUP_NAMES = Shortcut(
    "torch.distributed's _world.group_count",
    "after an attempt to form a process group that failed, an elastic run spends some milliseconds on a group of one",
    lambda: isinstance(_c10d()._world.group_count, int),
)


def reset_group_names() -> None:
    """Let torch number this process's groups from zero: groups meet by these numbers, and a failed attempt counts.

    Only while there is no default group. The public way: torch begins anew after the default group is destroyed.
    """
    from torch import distributed

    if GROUP_NAMES.usable:
        _c10d()._world.group_count = 0
    else:
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        distributed.destroy_process_group()


STORE = Shortcut(
    "torch.distributed's _get_default_store",
    "a rank that hangs tells where it is itself, but not where the others are",
    lambda: _takes(_c10d()._get_default_store),
)


def default_store() -> Any:
    """Return the store at which the ranks have met; None where it cannot be had."""
    return _c10d()._get_default_store() if STORE.usable else None


# --- parameters that are sharded --------------------------------------------------------------------------------------
def _reset_drops_gradients() -> bool:
    """Return whether the public `reset_iter_state` drops accumulated gradients, as torch's documentation has it."""
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "reset_iter_state"):
        return False
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) >= (2, 15)  # 2.13 and 2.14 have it, but it forgets them


def _has_sharded_gradients() -> bool:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return _reset_drops_gradients() or (
        _takes(FSDPModule._get_fsdp_state, "self") and "unsharded_accumulated_grad" in FSDPParam.__annotations__
    )


SHARDED_GRADIENTS = Shortcut(
    "FSDPParam.unsharded_accumulated_grad",
    "where an epoch is left in the middle of a step, a sharded run computes one batch more, of which nothing is kept",
    _has_sharded_gradients,
)


def drop_sharded_gradients(root: Any) -> bool:
    """Drop the gradients that a sharded module has accumulated whole; return whether it could be done.

    `root` is the module that `fully_shard` was applied to last, between a backward and the next forward. The public way
    is the caller's: a backward that reduces them, whose result is dropped.
    """
    from torch.distributed.fsdp import FSDPModule

    if _reset_drops_gradients():
        root.reset_iter_state()
        return True
    if not SHARDED_GRADIENTS.usable:
        return False
    blocks = [module for module in root.modules() if isinstance(module, FSDPModule)]
    for group in [group for block in blocks for group in _groups_of(block)]:
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None
            parameter.unsharded_accumulated_grad = None
    return True


def _groups_of(block: Any) -> list[Any]:
    """Return a block's groups of parameters; until torch 2.11 it had one or none."""
    state = block._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


WRAPPED = Shortcut(
    "torch.distributed's _module_state_mapping",
    "a task that has been trained sharded cannot be trained sharded again in the same process",
    lambda: hasattr(_composable()._module_state_mapping, "pop"),
)


def _composable() -> Any:
    from torch.distributed import _composable_state

    return _composable_state


def forget_wrapping(module: nn.Module) -> None:
    """Let torch forget that `fully_shard` was applied to a module, so that it can be again."""
    if WRAPPED.usable:
        _composable()._module_state_mapping.pop(module, None)


# --- tensors ----------------------------------------------------------------------------------------------------------
BASE = Shortcut("Tensor._base", "the output of each sharded block is copied", lambda: hasattr(Tensor, "_base"))


def may_be_view(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of another one; the public way: yes, it may be."""
    return tensor._base is not None if BASE.usable else True


# --- loaders ----------------------------------------------------------------------------------------------------------
def _names_dead_workers() -> bool:
    from torch import _C

    return callable(_C._error_if_any_worker_fails)


DEAD_WORKERS = Shortcut(
    "torch._C._error_if_any_worker_fails",
    "where a DataLoader worker dies, its broken connection may be named as the cause",
    _names_dead_workers,
)


def raise_for_dead_loader_workers() -> None:
    """Raise RuntimeError, which names it, where a DataLoader worker of this process has died."""
    if DEAD_WORKERS.usable:
        from torch import _C

        _C._error_if_any_worker_fails()


def _fetching() -> set[Any]:
    """Return the code of what fetches samples in this process, and of what raises a loader worker's error again."""
    from torch._utils import ExceptionWrapper
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    return {_MapDatasetFetcher.fetch.__code__, ExceptionWrapper.reraise.__code__}


FETCHING = Shortcut(
    "torch.utils.data's _MapDatasetFetcher.fetch, torch's ExceptionWrapper.reraise",
    "a StopIteration in the dataset of a DataLoader subclass passes for the end of its data",
    lambda: len(_fetching()) == 2,
)


def came_from_samples(end: StopIteration) -> bool:
    """Return whether a map-style dataset raised this, in this process or in a loader's worker; the end does not."""
    if not FETCHING.usable:
        return False
    codes = _fetching()
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(end.__traceback__))
