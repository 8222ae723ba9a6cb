"""The private names of torch, torchmetrics and CPython that Legato uses, each behind a function of this file.

No other file uses one. They are called as they are, without a way around them: the tests run with each version of torch
that is supported (`make matrix`), and a version that has changed one needs a change here.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from importlib.abc import MetaPathFinder
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim import optimizer as optimizer_module
from torch.utils import _python_dispatch


# --- process groups ---------------------------------------------------------------------------------------------------
def _c10d() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d


def set_group_timeouts(limit: timedelta) -> None:
    """Set the timeout of every process group of this process, except those of MPI, which has none."""
    for group in list(_c10d()._world.pg_map):
        if torch.distributed.get_backend(group) != "mpi":
            set_group_timeout(limit, group)


def set_group_timeout(limit: timedelta, group: Any = None) -> None:
    """Set the timeout of a process group, by default the default group."""
    public = getattr(torch.distributed, "set_timeout", None)  # torch 2.15, which deprecates the private one
    (public or _c10d()._set_pg_timeout)(limit, group)


def reset_group_names() -> None:
    """Restart torch's numbering of this process's groups: ranks meet by these numbers, and a failed attempt counts.

    Only without a default group.
    """
    # A rank that joins starts at 0. Others that have tried once more would look for each other under another name, and
    # all would wait for the timeout.
    _c10d()._world.group_count = 0


def default_store() -> Any:
    """Return the store of the default process group."""
    return _c10d()._get_default_store()


# --- parameters that are sharded --------------------------------------------------------------------------------------
def forget_wrapping(module: nn.Module) -> None:
    """Remove the mark that `fully_shard` was applied to a module, so that it can be applied again."""
    # torch has no way back: without this, a second run of a task fails, as its state has been garbage collected
    from torch.distributed import _composable_state

    _composable_state._module_state_mapping.pop(module, None)


def forward_of_ddp(ddp: Any, *arguments: Any) -> Any:
    """Call the forward of a DistributedDataParallel; without its range of torch's profiler (35 us) while none runs."""
    if is_profiling() or ddp._delay_all_reduce_all_params:
        return ddp.forward(*arguments)
    inputs, options = ddp._pre_forward(*arguments)
    return ddp._post_forward(ddp._run_ddp_forward(*inputs, **options))


def reduction_check(module: Any) -> Callable[[], object]:
    """Return a function that raises RuntimeError if DDP misses gradients after a backward, a step before torch does."""
    # its C++ object's own function, which the method of DDP's would call
    check: Callable[[], object] = module.reducer._check_reducer_finalized
    return check


# --- tensors ----------------------------------------------------------------------------------------------------------
# One call for many small tensors. A loop over torch's public methods takes 242 instead of 141 us to add up 150 tensors
# of 256 numbers on a CPU, 555 instead of 76 us to copy them, and a kernel for each of them on a GPU.
add_to_each: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_add_
"""Add each of the second list to its partner in the first, in place: one kernel for many small tensors."""
multiply_each: Callable[[list[Tensor], float], None] = torch._foreach_mul_
"""Multiply tensors in place."""
divide_each: Callable[[list[Tensor], float | Tensor], None] = torch._foreach_div_
"""Divide tensors in place by one number, which may be on their device."""
copy_to_each: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_
"""Copy each of the second list to its partner in the first."""


def is_view(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of another one."""
    # no public way to know; to copy every block's output instead would cost its activations once more
    return tensor._base is not None


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to; 0 where that is not counted."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def faking_tensors() -> Iterator[str]:
    """Make tensors without memory within this context, on the device that it yields."""
    # on torch's device "meta" autocast would cast nothing, and all activations would count in full precision
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield "cpu"


DispatchMode = _python_dispatch.TorchDispatchMode
"""A mode that sees each operation below autograd, also those of a backward; torch documents it by this name."""


def node_numbers() -> tuple[int, int | None]:
    """Return the number of the newest node of the autograd graph, and that of the node whose backward runs, if any."""
    running: Any = torch._C._current_autograd_node()
    newest: int = torch._C._autograd._get_sequence_nr() - 1
    return newest, None if running is None else running._sequence_nr()


# --- modules ----------------------------------------------------------------------------------------------------------
Tensors = MutableMapping[str, Any]
"""Parameters or buffers of one module by name, to read and to replace."""
ModuleParts = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Parameters, buffers and children of a module by name."""


def own_buffers(module: nn.Module) -> Tensors:
    """Return a module's own buffers by name, including None."""
    return module._buffers


def put_child(module: nn.Module, name: str, value: Any) -> None:
    """Set a child, which need not be a module, on a copy of a module."""
    module._modules[name] = value


def replace_values(tensor: Any, values: Tensor) -> None:
    """Replace the values of a tensor, of a DTensor those of this rank's shard: `to_local` of a parameter is a view."""
    (tensor._local_tensor if hasattr(tensor, "to_local") else tensor).data = values


def module_parts(module: nn.Module) -> ModuleParts:
    """Return the parameters, buffers and children of a module."""
    return module._parameters, module._buffers, module._modules


def set_module_parts(module: nn.Module, parts: ModuleParts) -> None:
    """Replace a module's parameters, buffers and children."""
    module._parameters, module._buffers, module._modules = parts


def copy_modules(module: nn.Module, tensors: dict[int, Tensor]) -> Any:
    """Return a shallow copy of a tree of modules with `tensors`, by id of the original, as parameters and buffers.

    torch.func.functional_call calls a module's forward alone, and a step of a task is another method.
    """
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


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def compile_call(module: nn.Module, **options: Any) -> None:
    """Compile a module in place, also of a class of torch's own.

    torch's compiler passes over frames of torch.nn, so that nn.Module.compile gives no graph for a Sequential or a
    Linear by itself; a frame of this file around the call it takes.
    """
    if type(module).forward.__module__.startswith("torch."):
        module._compiled_call_impl = partial(torch.compile(_call_module, **options), module)
    else:
        module.compile(**options)


def _call_module(module: Any, *arguments: Any, **options: Any) -> Any:
    return module._call_impl(*arguments, **options)


# --- optimizers and backward ------------------------------------------------------------------------------------------
def step_of(optimizer: Any) -> Callable[..., Any]:
    """Return the function that steps an optimizer.

    Torch spends 25 us a step on profiler ranges; they are skipped while no profiler runs, no hook is on the step, and
    only a learning rate scheduler has replaced it.
    """
    has_compiler = "torch._dynamo" in sys.modules
    if has_compiler and torch.compiler.is_compiling():
        return optimizer.step  # type: ignore[no-any-return]
    replaced = optimizer.__dict__.get("step")
    function = type(optimizer).step if replaced is None else _behind_scheduler(replaced)
    if (
        not hasattr(function, "hooked")  # mark of torch's wrapper, which functools.wraps copies to other wrappers
        or function.__code__.co_filename != optimizer_module.__file__
        or is_profiling()
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizer_module._global_optimizer_pre_hooks
        or optimizer_module._global_optimizer_post_hooks
    ):
        return optimizer.step  # type: ignore[no-any-return]
    optimizer._opt_called = True  # schedulers replace `step` to warn if they are stepped before it
    step = function.__wrapped__
    # torch's code around most steps sets the gradient mode, and asks the compiler, which it imports, for a graph break
    if not has_compiler and step.__code__ is _sets_grad_mode() and not optimizer.defaults["differentiable"]:
        step = _without_grad(step.__wrapped__)
    return step.__get__(optimizer)  # type: ignore[no-any-return]


def _behind_scheduler(step: Any) -> Any:
    """Return the `step` that a learning rate scheduler has replaced; None if other code did."""
    code = getattr(step, "__code__", None)
    return step.__wrapped__ if code is not None and code.co_filename == lr_scheduler.__file__ else None


@cache
def _sets_grad_mode() -> Any:
    """Return the code that torch wraps around a step."""
    return optimizer_module._use_grad_for_differentiable(lambda optimizer: None).__code__


_without_grad = cache(torch.no_grad())


def mark_stepped(optimizer: Any, stepped: bool = True) -> None:
    """Mark an optimizer as stepped, or its learning rate schedulers warn."""
    optimizer._opt_called = stepped


def schedulers_within(scheduler: Any) -> Sequence[Any]:
    """Return the learning rate schedulers that a ChainedScheduler or SequentialLR calls."""
    return getattr(scheduler, "_schedulers", ())


def backward_engine() -> Callable[..., Any] | None:
    """Return the function behind torch.autograd.backward, which compares shapes and keeps its context first, for 10 us.

    None where it does more: log each node of a graph. For subclasses of Tensor, and for what was compiled on another
    device than the CPU, whose threads take the context over, torch.autograd.backward must be called.
    """
    if logging.getLogger("torch.autograd.graph").isEnabledFor(logging.DEBUG):
        return None
    run: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward
    return run


# --- torch's compiler -------------------------------------------------------------------------------------------------
_DYNAMO = "torch._dynamo.utils"


def count_graphs() -> int:
    """Return how many graphs torch's compiler has made in this process."""
    return int(sys.modules[_DYNAMO].counters["stats"]["unique_graphs"]) if _DYNAMO in sys.modules else 0


def _tell_compiler() -> list[Any]:
    """Return the methods that exclude themselves from compilation when they are first called."""
    optimizer, ddp = torch.optim.Optimizer, vars(nn.parallel.DistributedDataParallel)
    methods: list[Any] = [optimizer.add_param_group, optimizer.zero_grad, optimizer.state_dict]
    return [*methods, optimizer.load_state_dict, ddp["_inside_ddp_forward"].__wrapped__]


def spare_compiler() -> None:
    """Have optimizers and DDP not import torch's compiler, which takes as long as torch itself, only to tell it what
    not to compile; they do that once something else imports it."""
    if "torch._dynamo" in sys.modules or any(isinstance(finder, _CompilerImport) for finder in sys.meta_path):
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
    if "torch._dynamo" in sys.modules:
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


# --- loaders ----------------------------------------------------------------------------------------------------------
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Return whether a profiler of torch runs."""


def iterates_plainly(loader: Any) -> bool:
    """Return whether a DataLoader of any class yields what its collate_fn returns."""
    plain, kind = torch.utils.data.DataLoader, type(loader)
    return kind.__iter__ is plain.__iter__ and kind._get_iterator is plain._get_iterator


def reader_of(batches: Any) -> tuple[Callable[[], Any], float]:
    """Return the function that reads the next batch of a loader's iterator, and for how many batches it is right.

    While no profiler runs it leaves out the range of torch's profiler, which takes 35 us a batch, 9 % of a small step.
    """
    base = torch.utils.data.dataloader._BaseDataLoaderIter
    # an iterator of another class, such as one of a subclass of DataLoader, may do work of its own there
    if type(batches).__next__ is not base.__next__:
        return batches.__next__, math.inf
    # beyond the length that an iterable dataset declares torch's own iterator continues, with a warning
    length = batches._IterableDataset_len_called
    return batches._next_data, math.inf if length is None else length


def read_on(batches: Any, count: int) -> Callable[[], Any]:
    """Return the function that reads the next batch after `count` ones that were read by `reader_of`."""
    # torch counts on from there for its warning beyond the declared length
    batches._num_yielded = count
    return batches.__next__  # type: ignore[no-any-return]


def end_loader_workers(iterator: Any, loader: Any = None) -> None:
    """End the workers of a loader's iterator; else torch does with the last reference to it.

    Those that persist only with their `loader`, which starts others where it is iterated over again.
    """
    if not hasattr(iterator, "_shutdown_workers"):
        return
    if iterator._persistent_workers:
        if loader is None:
            return
        if getattr(loader, "_iterator", None) is iterator:
            loader._iterator = None  # else the loader would reuse an iterator without workers
    iterator._shutdown_workers()


# --- torchmetrics -----------------------------------------------------------------------------------------------------
def reductions_of(metric: Any) -> dict[str, Any]:
    """Return the states of a metric by name, each with its reduction over ranks."""
    reductions: dict[str, Any] = metric._reductions
    return reductions


def set_updates(metric: Any, count: int) -> None:
    """Set a metric's number of updates after its states were set, and drop its computed value."""
    metric._update_count, metric._computed = count, None


def is_computed(metric: Any) -> bool:
    """Return whether a metric was computed after its last update."""
    return metric._computed is not None


def newest_value_of(metric: Any) -> Any:
    """Return a metric's value of the newest batch."""
    return metric._forward_cache


def set_synced(metric: Any, wanted: bool) -> bool:
    """Choose whether a metric's `compute` merges the states of all ranks first; return the former choice."""
    # its public sync_on_compute is read when it is made, and after each forward
    before: bool = metric._to_sync
    metric._to_sync = wanted
    return before
