"""Wrappers for the private names of torch, torchmetrics and CPython that Legato uses.

No other module uses private names. There are no fallbacks: the tests run with each supported version of torch (`make
matrix`), and if a version changes a name, this module must be updated.
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
    """Set the timeout of all process groups in this process, except MPI groups, which have none."""
    for group in list(_c10d()._world.pg_map):
        if torch.distributed.get_backend(group) != "mpi":
            set_group_timeout(limit, group)


def set_group_timeout(limit: timedelta, group: Any = None) -> None:
    """Set the timeout of a process group, by default the default group."""
    public = getattr(torch.distributed, "set_timeout", None)  # torch 2.15, which deprecates the private function
    (public or _c10d()._set_pg_timeout)(limit, group)


def reset_group_names() -> None:
    """Restart torch's numbering of process groups in this process. Call this only if there is no default group.

    The ranks find each other by their groups' numbers, which a failed attempt increments.
    """
    # A joining rank starts at 0. Ranks that tried before would use a different number, and all would time out.
    _c10d()._world.group_count = 0


def default_store() -> Any:
    """Return the store of the default process group."""
    return _c10d()._get_default_store()


# --- sharded parameters -----------------------------------------------------------------------------------------------
def forget_wrapping(module: nn.Module) -> None:
    """Remove `fully_shard`'s mark from a module, so that `fully_shard` can be applied again."""
    # torch cannot undo `fully_shard`. A task's second run would fail, because the first run's state no longer exists.
    from torch.distributed import _composable_state

    _composable_state._module_state_mapping.pop(module, None)


def forward_of_ddp(ddp: Any, *arguments: Any) -> Any:
    """Call DistributedDataParallel.forward. If no profiler is running, skip the profiler range, which costs 35 us."""
    if is_profiling() or ddp._delay_all_reduce_all_params:
        return ddp.forward(*arguments)
    inputs, options = ddp._pre_forward(*arguments)
    return ddp._post_forward(ddp._run_ddp_forward(*inputs, **options))


def reduction_check(module: Any) -> Callable[[], object]:
    """Return a function that raises RuntimeError if a DDP parameter received no gradient in the last backward pass.

    torch itself doesn't raise that error until the next step.
    """
    # the function of the C++ reducer that DDP's method calls
    check: Callable[[], object] = module.reducer._check_reducer_finalized
    return check


# --- tensors ----------------------------------------------------------------------------------------------------------
# One call for many small tensors. For 150 tensors with 256 elements on a CPU, it takes 141 us to add and 76 us to copy
# them. A loop over public methods takes 242 us and 555 us, and on a GPU it launches one kernel per tensor.
add_to_each: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_add_
"""Add each tensor in the second list to its counterpart in the first, in place."""
multiply_each: Callable[[list[Tensor], float], None] = torch._foreach_mul_
"""Multiply tensors in place."""
divide_each: Callable[[list[Tensor], float | Tensor], None] = torch._foreach_div_
"""Divide tensors in place by a number or by a tensor on their device."""
copy_to_each: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_
"""Copy each tensor in the second list to its counterpart in the first."""


def is_view(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of another tensor."""
    # torch has no public test; copying every block's output instead would double activation memory
    return tensor._base is not None


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor has been modified in place; 0 for an inference tensor, which has no version counter."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def faking_tensors() -> Iterator[str]:
    """Within this context, create fake tensors, which use no memory. Yields the device to create them on."""
    # not the device "meta", on which autocast has no effect and all activations would have full precision
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield "cpu"


DispatchMode = _python_dispatch.TorchDispatchMode
"""Mode that intercepts each operation below autograd, including in the backward pass."""


def node_numbers() -> tuple[int, int | None]:
    """Return the sequence numbers of the newest autograd node and of the node that backward is running, if any."""
    running: Any = torch._C._current_autograd_node()
    newest: int = torch._C._autograd._get_sequence_nr() - 1
    return newest, None if running is None else running._sequence_nr()


# --- modules ----------------------------------------------------------------------------------------------------------
Tensors = MutableMapping[str, Any]
"""A module's parameters or buffers, keyed by name, to read and replace."""
ModuleParts = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""A module's parameters, buffers and children, keyed by name."""


def own_buffers(module: nn.Module) -> Tensors:
    """Return a module's own buffers, keyed by name, including those that are None but not those of its children."""
    return module._buffers


def put_child(module: nn.Module, name: str, value: Any) -> None:
    """Set a child in a copy of a module. The child does not have to be a module."""
    module._modules[name] = value


def replace_values(tensor: Any, values: Tensor) -> None:
    """Replace the values of a tensor or, for a DTensor, of this rank's shard."""
    # not through to_local(), which returns a view for a parameter
    (tensor._local_tensor if hasattr(tensor, "to_local") else tensor).data = values


def module_parts(module: nn.Module) -> ModuleParts:
    """Return a module's own parameters, buffers and children, excluding those of its children."""
    return module._parameters, module._buffers, module._modules


def set_module_parts(module: nn.Module, parts: ModuleParts) -> None:
    """Replace a module's parameters, buffers and children."""
    module._parameters, module._buffers, module._modules = parts


def copy_modules(module: nn.Module, tensors: dict[int, Tensor]) -> Any:
    """Return a shallow copy of a module tree that uses the parameters and buffers in `tensors`.

    `tensors` is keyed by the ids of the original tensors. torch.func.functional_call cannot replace this function,
    because it only calls forward, not a task's step.
    """
    copies: dict[nn.Module, Any] = {original: original._replicate_for_data_parallel() for original in module.modules()}
    for original, twin in copies.items():
        for name, child in original._modules.items():
            twin._modules[name] = None if child is None else copies[child]
        for name, parameter in original._parameters.items():
            if parameter is None:
                twin._parameters[name] = None
            else:
                # not through __dict__: nn.LSTM's __setattr__ updates a list of weights
                setattr(twin, name, tensors[id(parameter)])
        for name, buffer in original._buffers.items():
            twin._buffers[name] = None if buffer is None else tensors[id(buffer)]
    return copies[module]


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module.compile()` has been called."""
    return module._compiled_call_impl is not None


def compile_call(module: nn.Module, **options: Any) -> None:
    """Compile a module in place, even an instance of a torch.nn class.

    torch's compiler skips frames in torch.nn, so nn.Module.compile creates no graph for a Sequential or Linear. This
    function adds a frame around the call.
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

    torch spends 25 us per step on profiler ranges. The returned function skips those ranges if no profiler is running,
    the optimizer has no step hooks, and no code other than a learning rate scheduler has replaced the optimizer's
    `step`.
    """
    has_compiler = "torch._dynamo" in sys.modules
    if has_compiler and torch.compiler.is_compiling():
        return optimizer.step  # type: ignore[no-any-return]
    replaced = optimizer.__dict__.get("step")
    function = type(optimizer).step if replaced is None else _behind_scheduler(replaced)
    if (
        not hasattr(function, "hooked")  # marks torch's wrapper, but functools.wraps copies it to other wrappers
        or function.__code__.co_filename != optimizer_module.__file__
        or is_profiling()
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizer_module._global_optimizer_pre_hooks
        or optimizer_module._global_optimizer_post_hooks
    ):
        return optimizer.step  # type: ignore[no-any-return]
    optimizer._opt_called = True  # otherwise schedulers warn that they were stepped before the optimizer
    step = function.__wrapped__
    # torch wraps most steps in code that sets the grad mode and imports the compiler for a graph break
    if not has_compiler and step.__code__ is _sets_grad_mode() and not optimizer.defaults["differentiable"]:
        step = _without_grad(step.__wrapped__)
    return step.__get__(optimizer)  # type: ignore[no-any-return]


def _behind_scheduler(step: Any) -> Any:
    """Return the original `step` if a learning rate scheduler has replaced it; None if other code has replaced it."""
    code = getattr(step, "__code__", None)
    return step.__wrapped__ if code is not None and code.co_filename == lr_scheduler.__file__ else None


@cache
def _sets_grad_mode() -> Any:
    """Return the code object of the wrapper that sets the grad mode around a step."""
    return optimizer_module._use_grad_for_differentiable(lambda optimizer: None).__code__


_without_grad = cache(torch.no_grad())


def mark_stepped(optimizer: Any, stepped: bool = True) -> None:
    """Mark an optimizer as stepped, so that its schedulers do not warn about the order of calls."""
    optimizer._opt_called = stepped


def schedulers_within(scheduler: Any) -> Sequence[Any]:
    """Return the learning rate schedulers that a ChainedScheduler or SequentialLR calls."""
    return getattr(scheduler, "_schedulers", ())


def backward_engine() -> Callable[..., Any] | None:
    """Return the function that torch.autograd.backward calls. A direct call saves 10 us of checks and setup.

    Returns None if autograd is logging each node of a graph. For Tensor subclasses, and for graphs compiled for a
    device other than the CPU, use torch.autograd.backward instead, because autograd's threads need the context that it
    copies.
    """
    if logging.getLogger("torch.autograd.graph").isEnabledFor(logging.DEBUG):
        return None
    run: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward
    return run


# --- torch's compiler -------------------------------------------------------------------------------------------------
_DYNAMO = "torch._dynamo.utils"


def count_graphs() -> int:
    """Return the number of graphs that torch's compiler has created in this process."""
    return int(sys.modules[_DYNAMO].counters["stats"]["unique_graphs"]) if _DYNAMO in sys.modules else 0


def _tell_compiler() -> list[Any]:
    """Return the methods that exclude themselves from compilation on their first call."""
    optimizer, ddp = torch.optim.Optimizer, vars(nn.parallel.DistributedDataParallel)
    methods: list[Any] = [optimizer.add_param_group, optimizer.zero_grad, optimizer.state_dict]
    return [*methods, optimizer.load_state_dict, ddp["_inside_ddp_forward"].__wrapped__]


def spare_compiler() -> None:
    """Prevent optimizers and DDP from importing torch's compiler until something else imports it.

    They import the compiler only to exclude methods from compilation, and the import takes as long as importing torch.
    """
    if "torch._dynamo" in sys.modules or any(isinstance(finder, _CompilerImport) for finder in sys.meta_path):
        return
    for method in _tell_compiler():
        # torch calls the method stored in the attribute
        method.__wrapped__.__dynamo_disable = method.__wrapped__
    sys.meta_path.insert(0, _CompilerImport())


class _CompilerImport(MetaPathFinder):
    """Import hook that never finds a module but reverts `spare_compiler` when the compiler is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "torch._dynamo":
            sys.meta_path.remove(self)
            for method in _tell_compiler():
                vars(method.__wrapped__).pop("__dynamo_disable", None)


@contextmanager
def no_compiler_for_ddp() -> Iterator[None]:
    """Let DDP's constructor read the compiler option `optimize_ddp` without importing the compiler."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    # the default: no program can have changed the option without importing the compiler
    stand_in = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    vars(torch)["_dynamo"] = stand_in
    try:
        yield
    finally:
        if vars(torch).get("_dynamo") is stand_in:
            del vars(torch)["_dynamo"]


# --- loaders ----------------------------------------------------------------------------------------------------------
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Return whether a torch profiler is running."""


def iterates_plainly(loader: Any) -> bool:
    """Return whether a DataLoader (or an instance of a subclass) yields the results of its collate_fn unchanged."""
    plain, kind = torch.utils.data.DataLoader, type(loader)
    return kind.__iter__ is plain.__iter__ and kind._get_iterator is plain._get_iterator


def reader_of(batches: Any) -> tuple[Callable[[], Any], float]:
    """Return a function that reads the next batch from a loader's iterator, and the number of batches it can read.

    The function skips torch's profiler range, which costs 35 us per batch, or 9 % of a small step.
    """
    base = torch.utils.data.dataloader._BaseDataLoaderIter
    # other iterator classes, such as that of a DataLoader subclass, may do additional work in __next__
    if type(batches).__next__ is not base.__next__:
        return batches.__next__, math.inf
    # beyond the declared length of an iterable dataset, torch's iterator continues with a warning
    length = batches._IterableDataset_len_called
    return batches._next_data, math.inf if length is None else length


def read_on(batches: Any, count: int) -> Callable[[], Any]:
    """Return the function that reads more batches once the function from `reader_of` has read `count` batches."""
    # torch needs the count to warn about batches beyond the declared length
    batches._num_yielded = count
    return batches.__next__  # type: ignore[no-any-return]


def end_loader_workers(iterator: Any, loader: Any = None) -> None:
    """Stop the workers of a loader's iterator immediately. torch itself stops them only when the iterator is deleted.

    To stop persistent workers, also pass `loader`. The loader starts new workers the next time it is iterated over.
    """
    if not hasattr(iterator, "_shutdown_workers"):
        return
    if iterator._persistent_workers:
        if loader is None:
            return
        if getattr(loader, "_iterator", None) is iterator:
            loader._iterator = None  # otherwise the loader would reuse an iterator without workers
    iterator._shutdown_workers()


# --- torchmetrics -----------------------------------------------------------------------------------------------------
def reductions_of(metric: Any) -> dict[str, Any]:
    """Return how each state of a metric is reduced across ranks, keyed by state name."""
    reductions: dict[str, Any] = metric._reductions
    return reductions


def set_updates(metric: Any, count: int) -> None:
    """Set a metric's number of updates and clear its computed value. Call this after setting its states."""
    metric._update_count, metric._computed = count, None


def is_computed(metric: Any) -> bool:
    """Return whether a metric has been computed since its last update."""
    return metric._computed is not None


def newest_value_of(metric: Any) -> Any:
    """Return a metric's value for the latest batch."""
    return metric._forward_cache


def set_synced(metric: Any, synced: bool) -> bool:
    """Set whether a metric's `compute` merges the states of all ranks, and return the previous setting."""
    # the public sync_on_compute is read only in the constructor and after each forward
    before: bool = metric._to_sync
    metric._to_sync = synced
    return before
