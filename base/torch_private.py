"""Private names of torch, torchmetrics and CPython that Legato uses, each behind a function with a public fallback.

A `Shortcut` tells which names it takes and what the fallback costs. If this torch lacks the names, or has them with
another signature, the fallback is taken: slower or less detailed, never wrong; `legato check` lists those.
LEGATO_PUBLIC_TORCH=1, and `public_only` in a program, take all fallbacks: to find out whether one of these names causes
a problem with an untested torch.
"""

import copy
import inspect
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, cached_property, partial
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from itertools import repeat
from multiprocessing import resource_sharer
from multiprocessing.queues import Queue
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim import optimizer as optimizer_module
from torch.utils.data import DataLoader

from .errors import ConfigError, TaskError

_forced = False
"""Whether all functions take their fallbacks."""


class Shortcut:
    """Private names that are used together, and the cost of their fallback."""

    def __init__(self, names: str, without: str, probe: Callable[[], bool]) -> None:
        """`probe` returns whether the names are as expected; an exception counts as no.

        `without`: the cost of the fallback, for `legato check`.
        """
        self.names, self.without, self.probe = names, without, probe
        SHORTCUTS.append(self)

    @cached_property
    def usable(self) -> bool:
        """Whether the names exist, and fallbacks are not forced. A plain attribute once it was read."""
        return not _forced and self.is_there

    @cached_property
    def is_there(self) -> bool:
        """Whether this torch has the names. May be read in the middle of a run, so the probe draws no random number."""
        try:
            # asked for first within an epoch, after its random numbers were set: opening a loader draws a seed, and the
            # first run of a process would have other random numbers than the second
            with torch.random.fork_rng(devices=()):
                return self.probe()
        except (AttributeError, ImportError, TypeError, ValueError):
            return False


SHORTCUTS: list[Shortcut] = []


def take_public_ways(wanted: bool = True) -> None:
    """Force all fallbacks in this process, or end that."""
    global _forced
    _forced = wanted
    for shortcut in SHORTCUTS:
        shortcut.__dict__.pop("usable", None)


@contextmanager
def public_only() -> Iterator[None]:
    """Force all fallbacks in this process within the context."""
    before = _forced
    take_public_ways()
    try:
        yield
    finally:
        take_public_ways(before)


def remarks() -> list[str]:
    """Return a sentence on the cost of each shortcut that is not usable."""
    why = "is switched off by LEGATO_PUBLIC_TORCH" if _forced else f"is not in torch {torch.__version__} as expected"
    return [f"{one.names} {why}: {one.without}." for one in SHORTCUTS if not one.usable]


def takes(function: Any, *names: str) -> bool:
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
    return hasattr(torch.distributed, "set_timeout") or takes(c10d._set_pg_timeout, "timeout", "group")


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
    """Set the timeout of every process group of this process, except those of MPI, which has none."""
    from torch import distributed

    default = distributed.group.WORLD
    groups = list(_c10d()._world.pg_map) if GROUPS.usable else [] if default is None else [default]
    for group in groups:
        if distributed.get_backend(group) != "mpi":
            set_group_timeout(limit, group)


def set_group_timeout(limit: timedelta, group: Any = None) -> None:
    """Set the timeout of a process group, by default the default group."""
    from torch import distributed

    public = getattr(distributed, "set_timeout", None)  # torch 2.15
    if public is not None:
        public(limit, group)
    elif TIMEOUT.usable:
        _c10d()._set_pg_timeout(limit, group)


COUNTS = Shortcut(
    "torch.distributed's Backend._get_sequence_number_for_group and ProcessGroup._get_backend",
    "a collective in a training_step that replicas run in turn is not refused",
    lambda: (
        hasattr(torch.distributed.ProcessGroup, "_get_backend")
        and hasattr(torch._C._distributed_c10d.Backend, "_get_sequence_number_for_group")
    ),
)


def collectives_called() -> int:
    """Return how many collectives, sends and receives this process has called on the default group; 0 without one."""
    from torch import distributed

    if not COUNTS.usable or not distributed.is_initialized():
        return 0
    group: Any = distributed.group.WORLD
    devices = dict(pair.split(":", 1)[::-1] for pair in distributed.get_backend_config(group).split(",") if ":" in pair)
    count = 0
    for device in (device for backend, device in devices.items() if backend in ("gloo", "nccl")):
        with suppress(RuntimeError):  # one that does not count
            count += group._get_backend(torch.device(device))._get_sequence_number_for_group()
    return count


GROUP_NAMES = Shortcut(
    "torch.distributed's _world.group_count",
    "after an attempt to form a process group that failed, an elastic run spends some milliseconds on a group of one",
    lambda: isinstance(_c10d()._world.group_count, int),
)


def reset_group_names() -> None:
    """Restart torch's numbering of this process's groups: ranks meet by these numbers, and a failed attempt counts.

    Only without a default group. The fallback: torch restarts it after the default group is destroyed.
    """
    from torch import distributed

    if GROUP_NAMES.usable:
        # A rank that joins starts at 0. Others that have tried once more would look for each other under another name,
        # and all would wait for the timeout.
        _c10d()._world.group_count = 0
    else:
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        distributed.destroy_process_group()


STORE = Shortcut(
    "torch.distributed's _get_default_store",
    "a rank that hangs tells where it is itself, but not where the others are",
    lambda: takes(_c10d()._get_default_store),
)


def default_store() -> Any:
    """Return the store of the default group; None if it is not accessible."""
    return _c10d()._get_default_store() if STORE.usable else None


# --- parameters that are sharded --------------------------------------------------------------------------------------
def _reset_drops_gradients() -> bool:
    """Return whether the public `reset_iter_state` drops accumulated gradients, as documented."""
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "reset_iter_state"):
        return False
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) >= (2, 15)  # 2.13 and 2.14 have it, but it keeps them


def _has_sharded_gradients() -> bool:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return _reset_drops_gradients() or (
        takes(FSDPModule._get_fsdp_state, "self") and "unsharded_accumulated_grad" in FSDPParam.__annotations__
    )


SHARDED_GRADIENTS = Shortcut(
    "FSDPParam.unsharded_accumulated_grad",
    "where an epoch is left in the middle of a step, a sharded run computes one batch more, of which nothing is kept",
    _has_sharded_gradients,
)


def drop_sharded_gradients(root: Any) -> bool:
    """Drop the unsharded gradients that a sharded module has accumulated; return whether that was possible.

    `root`: the module that `fully_shard` was applied to last; between a backward and the next forward. The fallback is
    the caller's: a backward that reduces them, whose result is dropped.
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
            # the newest backward has left its gradient here, earlier ones in the other place, in the type of the
            # reduction
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None
            parameter.unsharded_accumulated_grad = None
    return True


def _groups_of(block: Any) -> list[Any]:
    """Return a block's groups of parameters; until torch 2.11 it had at most one."""
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
    """Remove the mark that `fully_shard` was applied to a module, so that it can be applied again."""
    if WRAPPED.usable:
        _composable()._module_state_mapping.pop(module, None)


# --- tensors ----------------------------------------------------------------------------------------------------------
BASE = Shortcut("Tensor._base", "the output of each sharded block is copied", lambda: hasattr(Tensor, "_base"))


def may_be_view(tensor: Tensor) -> bool:
    """Return whether a tensor is a view; the fallback: True."""
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
    """Raise RuntimeError, which names it, if a DataLoader worker of this process has died."""
    if DEAD_WORKERS.usable:
        from torch import _C

        _C._error_if_any_worker_fails()


def _fetching() -> set[Any]:
    """Return the code objects that fetch samples in this process, and that raise a loader worker's error again."""
    from torch._utils import ExceptionWrapper
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    return {_MapDatasetFetcher.fetch.__code__, ExceptionWrapper.reraise.__code__}


FETCHING = Shortcut(
    "torch.utils.data's _MapDatasetFetcher.fetch, torch's ExceptionWrapper.reraise",
    "a StopIteration in the dataset of a DataLoader subclass passes for the end of its data",
    lambda: len(_fetching()) == 2,
)


def came_from_samples(end: StopIteration) -> bool:
    """Return whether a map-style dataset raised this, here or in a loader worker, other than by its end."""
    if not FETCHING.usable:
        return False
    codes = _fetching()
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(end.__traceback__))


# --- DTensors ---------------------------------------------------------------------------------------------------------
def _has_local_tensor() -> bool:
    from torch.distributed.tensor import DTensor

    return "_local_tensor" in DTensor.__slots__ or "_local_tensor" in DTensor.__annotations__


LOCAL_TENSOR = Shortcut(
    "DTensor._local_tensor",
    "a process of a pipeline with cut layers keeps the memory of the other processes' stages",
    _has_local_tensor,
)


def local_part(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, detached and sharing its memory; a plain tensor as it is."""
    if not hasattr(tensor, "to_local"):
        whole: Tensor = tensor
        return whole
    if LOCAL_TENSOR.usable:
        part: Tensor = tensor._local_tensor
    else:
        with torch.no_grad():
            part = tensor.to_local()
    return part


def set_local_data(tensor: Any, data: Tensor) -> None:
    """Replace the memory of this rank's shard of a tensor; the fallback leaves that of a DTensor."""
    if not hasattr(tensor, "to_local"):
        tensor.data = data
    elif LOCAL_TENSOR.usable:
        tensor._local_tensor.data = data


# --- modules ----------------------------------------------------------------------------------------------------------
def _has_module_dicts() -> bool:
    module = nn.Module()
    return all(isinstance(one, dict) for one in (module._parameters, module._buffers, module._modules))


DICTS = Shortcut(
    "nn.Module's _parameters, _buffers and _modules",
    "a metric in a ModuleDict cannot be shared by the devices of strategy data_parallel",
    _has_module_dicts,
)

Tensors = MutableMapping[str, Any]
"""Parameters or buffers of one module by name, to read and to replace."""


class _Attributes(MutableMapping[str, Any]):
    """A module's own parameters or buffers by name, including None, by public calls only."""

    def __init__(self, module: nn.Module, kind: str) -> None:
        self.module, self.kind = module, kind

    def __iter__(self) -> Iterator[str]:
        found = getattr(self.module, f"named_{self.kind}")(recurse=False, remove_duplicate=False)
        yield from (name for name, _ in found)
        if self.kind == "buffers":
            own = vars(self.module).keys()
            names = (name for name in dir(self.module) if name not in own and not hasattr(type(self.module), name))
            yield from (name for name in names if getattr(self.module, name) is None)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.module, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.module, name)


def own_parameters(module: nn.Module) -> Tensors:
    """Return a module's own parameters by name."""
    return module._parameters if DICTS.usable else _Attributes(module, "parameters")


VERSIONS = Shortcut(
    "a tensor's _version",
    "a write to a weight that leaves its values as they are is not noticed in the first steps",
    lambda: torch.empty(0)._version == 0,
)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to; 0 where that is not counted."""
    return tensor._version if VERSIONS.usable and not tensor.is_inference() else 0


def own_buffers(module: nn.Module) -> Tensors:
    """Return a module's own buffers by name, including None."""
    return module._buffers if DICTS.usable else _Attributes(module, "buffers")


def put_child(module: nn.Module, name: str, value: Any) -> None:
    """Set a child, which need not be a module, on a copy of a module."""
    if DICTS.usable:
        module._modules[name] = value
    elif isinstance(module, (nn.ModuleDict, nn.ModuleList)):
        raise ConfigError(
            f"With torch {torch.__version__} strategy data_parallel cannot share {name!r} of a "
            f"{type(module).__name__} among devices. Make it an attribute of the task, or use strategy ddp."
        )
    else:
        delattr(module, name)
        setattr(module, name, value)


ModuleParts = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Parameters, buffers and children of a module by name."""


def module_parts(module: nn.Module) -> ModuleParts:
    """Return the parameters, buffers and children of a module."""
    if DICTS.usable:
        return module._parameters, module._buffers, module._modules
    named = module.named_modules(remove_duplicate=False)  # named_children skips a child's second name
    children: dict[str, Any] = {name: child for name, child in named if name and "." not in name}
    return dict(own_parameters(module)), dict(own_buffers(module)), children


def set_module_parts(module: nn.Module, parts: ModuleParts) -> None:
    """Replace a module's parameters, buffers and children."""
    if DICTS.usable:
        module._parameters, module._buffers, module._modules = parts
        return
    kept = {name for one in parts for name in one}
    for name in [name for one in module_parts(module) for name in one if name not in kept]:
        delattr(module, name)
    parameters, buffers, children = parts
    for name, value in {**parameters, **children}.items():
        setattr(module, name, value)
    for name, value in buffers.items():
        if name in own_buffers(module):
            setattr(module, name, value)
        else:
            module.register_buffer(name, value)


COPIES = Shortcut(
    "nn.Module._replicate_for_data_parallel",
    "copies of a task for the devices of strategy data_parallel take longer",
    lambda: takes(nn.Module._replicate_for_data_parallel, "self"),
)


def copy_modules(module: nn.Module, tensors: dict[int, Tensor]) -> Any:
    """Return a shallow copy of a tree of modules with `tensors`, by id of the original, as parameters and buffers.

    torch.func.functional_call would swap them on the one module that all threads share, and lose gradients.
    """
    if not (COPIES.usable and DICTS.usable):
        return copy.deepcopy(module, {**tensors, **_shared_by_copies(module)})
    copies: dict[nn.Module, Any] = {original: original._replicate_for_data_parallel() for original in module.modules()}
    for original, twin in copies.items():
        for name, child in original._modules.items():
            twin._modules[name] = None if child is None else copies[child]
        for name, parameter in original._parameters.items():
            if parameter is None:
                twin._parameters[name] = None
            else:
                setattr(twin, name, tensors[id(parameter)])  # not in __dict__: nn.LSTM keeps a list of its weights
        for name, buffer in original._buffers.items():
            twin._buffers[name] = None if buffer is None else tensors[id(buffer)]
    return copies[module]


def _shared_by_copies(module: nn.Module) -> dict[int, Any]:
    """Return, by id, the attributes of modules that a shallow copy shares with the original."""
    values = [value for one in module.modules() for name, value in vars(one).items() if not name.startswith("_")]
    return {id(value): value for value in values if not _holds_tensors(value)}


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(one, Tensor) for one in value)


CALLS = Shortcut(
    "nn.Module's _call_impl and _compiled_call_impl",
    "a pipeline gives blocks a class of their own; strategy data_parallel cannot tell compiled modules",
    lambda: callable(nn.Module._call_impl) and nn.Module._compiled_call_impl is None,
)


class _Intercepted:
    """Mixin that intercepts calls of a module by public means."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        return module.__dict__["intercepting call"](*args, **kwargs)


def intercept_calls(module: nn.Module, call: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[], None]]:
    """Replace a module's call, hooks included, by `call`; return the original call, and an undo function."""
    if CALLS.usable:
        # nn.Module.__call__ takes _compiled_call_impl first, before any hook of the module runs
        compiled: Any = module._compiled_call_impl

        def undo() -> None:
            module._compiled_call_impl = compiled

        own = compiled or module._call_impl
        module._compiled_call_impl = call
        return own, undo
    kind, before = type(module), type(module).__call__.__get__(module)
    module.__dict__["intercepting call"] = call
    module.__class__ = type(kind.__name__, (_Intercepted, kind), {"__module__": kind.__module__})

    def put_back() -> None:
        module.__class__ = kind
        del module.__dict__["intercepting call"]

    return before, put_back


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called; the fallback: False."""
    return CALLS.usable and module._compiled_call_impl is not None


def compile_call(module: nn.Module, **options: Any) -> None:
    """Compile a module in place, also of a class of torch's own; the fallback: nn.Module.compile.

    torch's compiler passes over frames of torch.nn, so that nn.Module.compile gives no graph for a Sequential or a
    Linear by itself; a frame of this file around the call it takes.
    """
    if CALLS.usable and type(module).forward.__module__.startswith("torch."):
        module._compiled_call_impl = partial(torch.compile(_call_module, **options), module)
    else:
        module.compile(**options)


def _call_module(module: Any, *arguments: Any, **options: Any) -> Any:
    return module._call_impl(*arguments, **options)


_DYNAMO = "torch._dynamo.utils"
GRAPHS = Shortcut(
    "torch._dynamo.utils's counters",
    "that trainer.compile compiles nothing is not told",
    lambda: _DYNAMO not in sys.modules or isinstance(sys.modules[_DYNAMO].counters, dict),
)


def count_graphs() -> int | None:
    """Return how many graphs torch's compiler has made in this process; the fallback: None, nobody knows."""
    if not GRAPHS.usable:
        return None
    return int(sys.modules[_DYNAMO].counters["stats"]["unique_graphs"]) if _DYNAMO in sys.modules else 0


GRAPH_BREAKS = Shortcut(
    "torch._dynamo.utils's graph_break_reasons",
    "where torch.compile breaks graphs is not named",
    lambda: _DYNAMO not in sys.modules or isinstance(sys.modules[_DYNAMO].graph_break_reasons, list),
)


def graph_breaks() -> list[str]:
    """Return where torch.compile has broken graphs in this process, and why, each place once; the fallback: none."""
    if _DYNAMO not in sys.modules or not GRAPH_BREAKS.usable:
        return []
    reasons = [one for one in sys.modules[_DYNAMO].graph_break_reasons if one.user_stack]
    places = [(one.user_stack[-1], str(one.reason).strip().partition("\n")[0]) for one in reasons]
    return list(dict.fromkeys(f"{at.filename}:{at.lineno} in {at.name} ({why})" for at, why in places))


def _has_base_classes() -> bool:
    norm, dropout = nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd
    return issubclass(nn.BatchNorm2d, norm) and issubclass(nn.Dropout, dropout)


BASES = Shortcut(
    "torch.nn's _BatchNorm and _DropoutNd",
    "sync_batchnorm and ddp_rpc do not see classes that derive from these, but only from torch's public ones",
    _has_base_classes,
)


def batch_norms() -> tuple[type[nn.Module], ...]:
    """Return the classes of batch norms."""
    public = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
    return (nn.modules.batchnorm._BatchNorm,) if BASES.usable else public


def dropouts() -> tuple[type[nn.Module], ...]:
    """Return the classes of dropouts."""
    public = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
    return (nn.modules.dropout._DropoutNd,) if BASES.usable else public


INPUTS = Shortcut(
    "_BatchNorm._check_input_dim",
    "a synchronised batch norm runs on an empty batch first, to have the input's dimensions checked",
    lambda: takes(nn.BatchNorm2d._check_input_dim, "self", "input"),
)


def check_input(module: Any, forward: Callable[[Tensor], Tensor], input: Tensor) -> None:
    """Make a batch norm check the dimensions of its input; `forward` is its own."""
    if INPUTS.usable:
        module._check_input_dim(input)
        return
    training = module.training
    module.training = False
    try:
        with torch.no_grad():
            # an empty batch, in evaluation: the check is made, and running statistics stay
            forward(input[:0].float())
    finally:
        module.training = training


# --- lists of tensors -------------------------------------------------------------------------------------------------
FOREACH = Shortcut(
    "torch._foreach_add_, _foreach_mul_, _foreach_copy_ and _foreach_norm",
    "gradients are added one by one",
    lambda: all(
        callable(getattr(torch, f"_foreach_{name}", None)) for name in ("add_", "mul_", "div_", "copy_", "norm")
    ),
)


def add_to_each(tensors: list[Tensor], others: list[Tensor]) -> None:
    """Add each of `others` to its partner in place."""
    _for_each("add_", tensors, others)


def multiply_each(tensors: list[Tensor], factor: float) -> None:
    """Multiply tensors in place."""
    _for_each("mul_", tensors, factor)


def divide_each(tensors: list[Tensor], divisor: float | Tensor) -> None:
    """Divide tensors in place by one number, which may be on their device."""
    _for_each("div_", tensors, divisor)


def norm_of(tensor: Tensor) -> Tensor:
    """Return the 2-norm, with the bits that torch.nn.utils.clip_grad_norm_ computes for one of its gradients."""
    one_by_one = tensor.device.type == "cpu" or not FOREACH.usable
    norm: Tensor = torch.linalg.vector_norm(tensor) if one_by_one else torch._foreach_norm([tensor])[0]
    return norm


def copy_to_each(tensors: list[Tensor], others: list[Tensor]) -> None:
    """Copy each of `others` to its partner."""
    _for_each("copy_", tensors, others)


def _for_each(name: str, tensors: list[Tensor], others: list[Tensor] | Tensor | float) -> None:
    if FOREACH.usable:
        getattr(torch, f"_foreach_{name}")(tensors, others)  # one kernel for many small tensors
        return
    partners = others if isinstance(others, list) else repeat(others, len(tensors))
    for tensor, other in zip(tensors, partners, strict=True):
        getattr(tensor, name)(other)


UNSCALE = Shortcut(
    "torch._amp_foreach_non_finite_check_and_unscale_",
    "gradients of a mesh are unscaled one by one",
    lambda: callable(torch._amp_foreach_non_finite_check_and_unscale_),
)


def unscale_each(gradients: list[Tensor], found: Tensor, inverse: Tensor) -> None:
    """Multiply gradients of one device and dtype in place; set `found` to 1.0 if one is not finite."""
    if UNSCALE.usable:
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        return
    for gradient in gradients:
        if not bool(gradient.isfinite().all()):
            found.fill_(1.0)
        gradient.mul_(inverse.to(gradient.dtype))


# --- optimizers -------------------------------------------------------------------------------------------------------
def _has_optimizer_marks() -> bool:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))])
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        optimizer_module._global_optimizer_pre_hooks,
        optimizer_module._global_optimizer_post_hooks,
    )
    step = torch.optim.SGD.step
    return (
        all(isinstance(one, dict) for one in hooks)
        and hasattr(step, "hooked")
        and hasattr(step, "__wrapped__")
        and step.__code__.co_filename == optimizer_module.__file__
        and torch.autograd._profiler_enabled() in (True, False)  # type: ignore[attr-defined]
    )


OPTIMIZER_STEP_HOOKS = Shortcut(
    "torch.optim.Optimizer's hooks of a step", "an optimizer's step takes 25 us longer", _has_optimizer_marks
)
STEPPED = Shortcut(
    "Optimizer._opt_called",
    "no warning tells of a learning rate scheduler that steps before its optimizer",
    lambda: "_opt_called" in lr_scheduler.LRScheduler.step.__code__.co_consts,
)


def step_of(optimizer: Any) -> Callable[..., Any]:
    """Return the function that steps an optimizer.

    Torch spends 25 us a step on profiler ranges; they are skipped while no profiler runs, no hook is on the step, and
    only a learning rate scheduler has replaced it.
    """
    if not OPTIMIZER_STEP_HOOKS.usable or ("torch._dynamo" in sys.modules and torch.compiler.is_compiling()):
        return optimizer.step  # type: ignore[no-any-return]
    own = optimizer.__dict__.get("step")
    function = type(optimizer).step if own is None else _behind_scheduler(own)
    if (
        not hasattr(function, "hooked")  # mark of torch's wrapper, which functools.wraps copies to other wrappers
        or function.__code__.co_filename != optimizer_module.__file__
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizer_module._global_optimizer_pre_hooks
        or optimizer_module._global_optimizer_post_hooks
    ):
        return optimizer.step  # type: ignore[no-any-return]
    optimizer._opt_called = True  # schedulers replace `step` to warn if they are stepped before it
    step = function.__wrapped__
    # without a call of a function of ours
    spared = "torch._dynamo" not in sys.modules and COMPILER.usable
    if spared and step.__code__ is _sets_grad_mode() and not optimizer.defaults["differentiable"]:
        step = _without_grad(step.__wrapped__)
    return step.__get__(optimizer)  # type: ignore[no-any-return]


def _behind_scheduler(step: Any) -> Any:
    """Return the `step` that a learning rate scheduler has replaced; None if other code did."""
    code = getattr(step, "__code__", None)
    return step.__wrapped__ if code is not None and code.co_filename == lr_scheduler.__file__ else None


def mark_stepped(optimizer: Any, stepped: bool = True) -> None:
    """Mark an optimizer as stepped, or its learning rate schedulers warn."""
    if STEPPED.usable:
        optimizer._opt_called = stepped
    elif stepped:
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before")


def _has_schedulers() -> bool:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))])
    return bool(lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(optimizer)])._schedulers)


SCHEDULERS = Shortcut(
    "ChainedScheduler._schedulers and SequentialLR._schedulers",
    "a resume with other settings does not see a ReduceLROnPlateau within another scheduler",
    _has_schedulers,
)


def schedulers_within(scheduler: Any) -> Sequence[Any]:
    """Return the learning rate schedulers that another one calls."""
    return getattr(scheduler, "_schedulers", ()) if SCHEDULERS.usable else ()


# --- backward ---------------------------------------------------------------------------------------------------------
def _has_engine() -> bool:
    from torch.autograd import graph

    own = graph._engine_run_backward.__code__.co_names
    tells_hooks = {"log", "getEffectiveLevel", "logging", "DEBUG", "_register_logging_hooks_on_whole_graph"}
    tells_compiler = {"torch", "_C", "_stash_obj_in_tls", "_remove_obj_from_tls", "contextvars", "copy_context"}
    with torch.inference_mode(False), torch.enable_grad():
        loss = torch.ones((), requires_grad=True) * 2
        run = torch.autograd.Variable._execution_engine.run_backward
        run((loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    return set(own) <= tells_hooks | tells_compiler | {"Variable", "_execution_engine", "run_backward"}


ENGINE = Shortcut("torch.autograd's _execution_engine", "a backward takes 10 us longer", _has_engine)


def backward_engine() -> Callable[..., Any] | None:
    """Return the function behind torch.autograd.backward, which compares shapes and keeps its context first, for 10 us.

    None where it does more: log each node of a graph. For subclasses of Tensor, and for what was compiled on another
    device than the CPU, whose threads take the context over, torch.autograd.backward must be called.
    """
    if not ENGINE.usable or logging.getLogger("torch.autograd.graph").isEnabledFor(logging.DEBUG):
        return None
    run: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward
    return run


# --- torch's compiler -------------------------------------------------------------------------------------------------
def _asks_compiler() -> bool:
    constructor = nn.parallel.DistributedDataParallel.__init__.__code__
    return (
        all("__dynamo_disable" in one.__code__.co_consts and callable(one.__wrapped__) for one in _tell_compiler())
        and {"_dynamo", "utils", "get_optimize_ddp_mode"} <= set(constructor.co_names)
        and {"_dynamo", "graph_break", "set_grad_enabled"} <= set(_sets_grad_mode().co_names)
    )


@cache
def _sets_grad_mode() -> Any:
    """Return the code that torch wraps around a step: it sets the gradient mode, and breaks the compiler's graph."""
    return optimizer_module._use_grad_for_differentiable(lambda optimizer: None).__code__


_without_grad = cache(torch.no_grad())


def _tell_compiler() -> list[Any]:
    """Return the methods that exclude themselves from compilation when they are first called."""
    optimizer, ddp = torch.optim.Optimizer, vars(nn.parallel.DistributedDataParallel)
    methods = [optimizer.add_param_group, optimizer.zero_grad, optimizer.state_dict, optimizer.load_state_dict]
    return [*methods, ddp["_inside_ddp_forward"].__wrapped__]


COMPILER = Shortcut(
    "__dynamo_disable, and what optimizers and DDP ask torch._dynamo",
    "each process that trains imports torch's compiler, which takes 1.5 s",
    _asks_compiler,
)


def _needs_compiler() -> bool:
    return "torch._dynamo" in sys.modules or not COMPILER.usable


def spare_compiler() -> None:
    """Have optimizers and DDP not import torch's compiler, which takes as long as torch itself, only to tell it what
    not to compile; they do that once something else imports it."""
    if _needs_compiler() or any(isinstance(finder, _CompilerImport) for finder in sys.meta_path):
        return
    for method in _tell_compiler():
        method.__wrapped__.__dynamo_disable = method.__wrapped__  # what torch calls, in place of one that is excluded
    sys.meta_path.insert(0, _CompilerImport())


class _CompilerImport(MetaPathFinder):
    """Finds no module, and takes `spare_compiler` back when the compiler is looked for."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "torch._dynamo":
            sys.meta_path.remove(self)
            for method in _tell_compiler():
                vars(method.__wrapped__).pop("__dynamo_disable", None)


@contextmanager
def no_compiler_for_ddp() -> Iterator[None]:
    """Answer DDP's constructor, which asks for the compiler's option optimize_ddp, without importing the compiler."""
    if _needs_compiler():
        yield
        return
    # nobody can have changed the option without importing it
    answer = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    vars(torch)["_dynamo"] = answer
    try:
        yield
    finally:
        if vars(torch).get("_dynamo") is answer:
            del vars(torch)["_dynamo"]


REDUCED = Shortcut(
    "torch.distributed.Reducer._check_reducer_finalized",
    "ddp names parameters without a gradient at the step after",
    lambda: callable(torch.distributed.Reducer._check_reducer_finalized),  # type: ignore[attr-defined]
)


def reduction_check(module: Any) -> Callable[[], object]:
    """Return a function that raises RuntimeError if DDP misses gradients after a backward, a step before torch does."""
    # its C++ object's own function, which the method of DDP's would call
    return module.reducer._check_reducer_finalized if REDUCED.usable else int


def _has_parts_of_forward() -> bool:
    from torch.nn.parallel import DistributedDataParallel

    parts = {"_pre_forward", "_delay_all_reduce_all_params", "_run_ddp_forward", "_post_forward"}
    around = {"torch", "autograd", "profiler", "record_function", "module", "forward"}
    used = set(DistributedDataParallel.forward.__code__.co_names)
    return used == parts | around and torch.autograd._profiler_enabled() in (True, False)  # type: ignore[attr-defined]


PARTS_OF_FORWARD = Shortcut(
    "DistributedDataParallel's _pre_forward, _run_ddp_forward and _post_forward",
    "a step under ddp takes 15 us longer",
    _has_parts_of_forward,
)


def forward_of(module: Any) -> Callable[..., Any]:
    """Return the forward of a DistributedDataParallel, without its profiler range (15 us) while no profiler runs."""
    plain: Callable[..., Any] = module.forward
    if not PARTS_OF_FORWARD.usable or module._delay_all_reduce_all_params:
        return plain
    profiling, steps = torch.autograd._profiler_enabled, module.module  # type: ignore[attr-defined]

    def forward(*arguments: Any) -> Any:
        if profiling():
            return plain(*arguments)
        inputs, options = module._pre_forward(*arguments)
        if "torch._dynamo" in sys.modules:  # which is told whose forward this is
            return module._post_forward(module._run_ddp_forward(*inputs, **options))
        return module._post_forward(steps(*inputs, **options))

    return forward


# --- loaders ----------------------------------------------------------------------------------------------------------
def _has_reader() -> bool:
    data: Any = [0]
    batches: Any = iter(DataLoader(data))
    return (
        type(batches).__next__ is _loaders()._BaseDataLoaderIter.__next__
        and takes(batches._next_data)
        and batches._num_yielded == 0
        and batches._IterableDataset_len_called is None
        and torch.autograd._profiler_enabled() in (True, False)  # type: ignore[attr-defined]
    )


def _loaders() -> Any:
    from torch.utils.data import dataloader

    return dataloader


READS = Shortcut("a DataLoader iterator's _next_data", "reading a batch takes 20 us longer", _has_reader)
WORKERS = Shortcut(
    "a DataLoader iterator's _workers and _shutdown_workers",
    "a batch that breaks off with its DataLoader worker is reported as a broken connection",
    lambda: takes(_loaders()._MultiProcessingDataLoaderIter._shutdown_workers, "self"),
)


def batches_of(
    iterator: Iterator[Any],
    ended: Callable[[Iterator[Any], StopIteration], object],
    failed: Callable[[Iterator[Any], Exception], object],
) -> Iterator[Any]:
    """Yield the batches of a loader's iterator.

    `ended` is called with the iterator's end, and `failed` with an exception of it or of `ended`; either may raise
    another one. Torch spends 20 us a batch on profiler ranges; they are skipped while no profiler runs.
    """
    torchs: Any = iterator
    try:
        if READS.usable and type(iterator).__next__ is _loaders()._BaseDataLoaderIter.__next__:
            profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
            # Beyond the length that an iterable dataset declares torch's own iterator continues, with a warning.
            while torchs._num_yielded != torchs._IterableDataset_len_called and not profiling():
                try:
                    batch = torchs._next_data()
                except StopIteration as end:
                    ended(iterator, end)
                    return
                torchs._num_yielded += 1
                yield batch
        # not `yield from`, which closes the iterator with this generator: a user's own iterator may serve another epoch
        while True:
            try:
                batch = next(iterator)
            except StopIteration as end:
                ended(iterator, end)
                return
            yield batch
    except Exception as error:
        failed(iterator, error)
        raise


def loader_workers(iterator: Any) -> list[tuple[Any, bool]]:
    """Return the worker processes of a loader's iterator, each with whether batches are still expected of it."""
    if not WORKERS.usable or not hasattr(iterator, "_workers"):
        return []
    return list(zip(iterator._workers, iterator._workers_status, strict=True))


def read_so_far(iterator: Any) -> tuple[Any, int]:
    """Return the dataset of torch's iterator over a loader, and how many batches it has yielded."""
    return getattr(iterator, "_dataset", None), getattr(iterator, "_num_yielded", 0)


def end_loader_workers(iterator: Any, loader: Any = None) -> None:
    """End the workers of a loader's iterator; else torch does with the last reference to it.

    Those that persist only with their `loader`, which starts others where it is iterated over again.
    """
    if not WORKERS.usable or not hasattr(iterator, "_shutdown_workers"):
        return
    if iterator._persistent_workers:
        if loader is None:
            return
        if getattr(loader, "_iterator", None) is iterator:
            loader._iterator = None
    iterator._shutdown_workers()


# --- multiprocessing, in a loader's worker ----------------------------------------------------------------------------
def _can_replace_feeder_error() -> bool:
    from torch._utils import ExceptionWrapper

    return takes(Queue._on_queue_feeder_error, "e", "obj") and callable(ExceptionWrapper)  # type: ignore[attr-defined]


def _has_memory_server() -> bool:
    return resource_sharer._ResourceSharer._serve.__code__ is not None  # type: ignore[attr-defined]


FEEDER = Shortcut(
    "multiprocessing's Queue._on_queue_feeder_error and torch._utils.ExceptionWrapper",
    "a batch that a DataLoader worker cannot pickle is waited for, until the loader's timeout",
    _can_replace_feeder_error,
)
MEMORY = Shortcut(
    "multiprocessing's _ResourceSharer._serve",
    "where a trainer ends while a DataLoader worker hands memory to it, the worker prints a traceback",
    _has_memory_server,
)
SendError = Callable[[Any, Callable[[], None], Exception, Any], None]
"""Called with a queue, a function that drops the item as Python does, the error, and the item."""


def replace_feeder_error(send: SendError) -> None:
    """Call `send` in this process if a queue cannot pickle an item."""
    if not FEEDER.usable:
        return
    drop = Queue._on_queue_feeder_error  # type: ignore[attr-defined]

    def on_error(queue: Any, error: Exception, sent: Any) -> None:
        send(queue, partial(drop, error, sent), error, sent)

    Queue._on_queue_feeder_error = on_error  # type: ignore[attr-defined]


def wrapped_error(batch: Any, error: Exception, where: str) -> Any:
    """Return an error wrapped as a DataLoader worker sends it instead of a batch; a wrapped error as it is."""
    from torch._utils import ExceptionWrapper

    if isinstance(batch, ExceptionWrapper):
        return batch
    return ExceptionWrapper((type(error), error, error.__traceback__), where)


def serves_memory(trace: TracebackType | None) -> bool:
    """Return whether a traceback is of the thread by which multiprocessing sends memory to other processes."""
    if not MEMORY.usable or trace is None:
        return False
    return trace.tb_frame.f_code is resource_sharer._ResourceSharer._serve.__code__  # type: ignore[attr-defined]


# --- torchmetrics -----------------------------------------------------------------------------------------------------
def _has_metric_states() -> bool:
    module = sys.modules.get("torchmetrics")
    if module is None:  # no metric is in use
        return True
    metric = module.MeanMetric()
    names = ("_reductions", "_update_count", "_computed", "_to_sync", "_forward_cache")
    return isinstance(metric._reductions, dict) and all(hasattr(metric, name) for name in names)


METRICS = Shortcut(
    "torchmetrics' Metric._reductions, _update_count, _computed, _to_sync and _forward_cache",
    "torchmetrics objects cannot be logged; log the numbers that they compute",
    _has_metric_states,
)


def reductions_of(metric: Any) -> dict[str, Any]:
    """Return the states of a metric by name, each with its reduction over ranks.

    No public call has it. Raises TaskError if the private name is missing, rather than guess.
    """
    if METRICS.usable:
        found: dict[str, Any] = metric._reductions
        return found
    raise TaskError(
        f"Legato cannot tell how the states of a {type(metric).__name__} are merged over ranks: this torchmetrics has "
        f"no Metric._reductions, or LEGATO_PUBLIC_TORCH is set. Log the number that it computes, or install "
        f"torchmetrics 1.9."
    )


def updates_of(metric: Any) -> int:
    """Return how often a metric was updated since its reset."""
    count: int = metric._update_count if METRICS.usable else metric.update_count
    return count


def set_updates(metric: Any, count: int) -> None:
    """Set a metric's number of updates after its states were set, and drop its computed value."""
    if METRICS.usable:
        metric._update_count, metric._computed = count, None


def is_computed(metric: Any) -> bool:
    """Return whether a metric was computed after its last update; True if that is not accessible."""
    return not METRICS.usable or metric._computed is not None


def newest_value_of(metric: Any) -> Any:
    """Return a metric's value of the newest batch; None if it is not accessible."""
    return metric._forward_cache if METRICS.usable else None


def set_newest_value(metric: Any, value: Any) -> None:
    """Set a metric's value of the newest batch."""
    if METRICS.usable:
        metric._forward_cache = value


def set_synced(metric: Any, wanted: bool) -> bool:
    """Choose whether a metric's `compute` merges the states of all ranks first; return the former choice."""
    before = bool(metric.sync_on_compute)
    if METRICS.usable:
        before, metric._to_sync = metric._to_sync, wanted
    return before


# --- fake tensors -----------------------------------------------------------------------------------------------------
FAKE = Shortcut(
    "torch._subclasses.FakeTensorMode",
    "the activations that `legato plan` tells are those of torch's plain kernels and of float32",
    lambda: find_spec("torch._subclasses.fake_tensor") is not None,
)


@contextmanager
def faking_tensors() -> Iterator[str]:
    """Make tensors without memory within this context, on the device that it yields."""
    if not FAKE.usable:
        yield "meta"
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield "cpu"


# --- tensorboard ------------------------------------------------------------------------------------------------------
def _has_event_writer() -> bool:
    from tensorboard.summary.writer.event_file_writer import _AsyncWriter, _AsyncWriterThread

    names = (*_AsyncWriter.__init__.__code__.co_names, *_AsyncWriterThread.__init__.__code__.co_names)
    return "_record_writer" in names and "_worker" in names


EVENTS = Shortcut(
    "tensorboard's EventFileWriter._async_writer",
    "where the folder of a TensorBoardLogger was deleted, tensorboard prints a traceback",
    _has_event_writer,
)


def drop_events(writer: Any, instead: Any) -> bool:
    """Send what a SummaryWriter has not written yet to `instead`; return whether that is possible."""
    inner = getattr(writer.file_writer.event_writer, "_async_writer", None) if EVENTS.usable else None
    if inner is None:
        return False
    inner._writer = inner._worker._record_writer = instead
    return True
