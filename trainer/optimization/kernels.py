"""Compilation, activation checkpointing, and the numeric settings that bitwise runs compare."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from ...base.errors import ConfigError, did_you_mean
from ...base.torch_private import compile_call
from ..accelerators import name_of
from ..switches import environment, versions

KEPT = ("__module__", "__doc__")
FLAGS = ("fused", "foreach", "capturable", "differentiable")
NOTHING_COMPILED = (
    "trainer.compile compiled nothing because the steps call neither the task nor any of its direct submodules. "
    "List the classes of the modules the steps call, as in compile={'blocks': ['Block']}."
)
# Keyword arguments of torch.compile
COMPILE_OPTIONS = ("fullgraph", "dynamic", "backend", "mode", "options", "disable")


def numerics(
    optimizers: Sequence[Optimizer], precision: str, device: torch.device, options: bool | Mapping[str, Any] = False
) -> dict[str, Any]:
    """Return every setting that affects the low-order bits of a result, except the order of additions.

    Results have been observed to change bitwise with the number of threads, the instruction set, and whether `fused` or
    `foreach` optimizers are used.

    Args:
        options: the value of trainer.compile.
    """
    return {
        **versions(),
        **environment(),
        "device": name_of(device),
        # by name, as a backend may be a function, whose address differs between processes
        "compile": json.dumps(options, default=lambda value: getattr(value, "__name__", type(value).__name__)),
        "precision": precision,
        "optimizers": [
            [class_of(optimizer), *({flag: group.get(flag) for flag in FLAGS} for group in optimizer.param_groups)]
            for optimizer in optimizers
        ],
    }


def class_of(optimizer: Optimizer) -> str:
    """Return the class name of the task's optimizer, even if a strategy has wrapped it."""
    return type(getattr(optimizer, "original", optimizer)).__name__


def require_same_ranks(by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError if a bitwise run's numeric settings differ between ranks.

    The error lists the differences between rank 0 and another rank.
    """
    first = by_rank[0]
    for rank, here in enumerate(by_rank):
        unequal = [f"{name} is {here[name]!r} (rank 0: {first[name]!r})" for name in here if here[name] != first[name]]
        # a run on different machines would succeed, but a repeat could not reproduce it
        if unequal:
            raise ConfigError(
                f"reproducible=bitwise requires the same arithmetic in all processes, but on rank {rank}, "
                f"{'; '.join(unequal)}. Use machines of the same kind or set reproducible=order."
            )


def compile_in_place(task: nn.Module, options: bool | Mapping[str, Any]) -> None:
    """Compile the task's forward method and direct children in place, so that state_dict names don't change.

    If class names are given as `blocks`, compile the modules of these classes instead. Identical blocks share one
    compilation. The steps are not compiled, because logging breaks the graph. Raises ConfigError for a class name that
    matches no module, or an option that torch.compile does not recognize.
    """
    if options is False:
        return
    names, chosen = read_compile(options)
    if names is None:
        modules: Sequence[nn.Module] = (task, *_called_children(task))
    else:
        modules = modules_named(task, names, "trainer.compile.blocks")
    for module in modules:
        # in place: torch.compile(module) returns a wrapper whose state_dict has `_orig_mod.` in every name
        compile_call(module, **chosen)


def _called_children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module's children. A ModuleList or ModuleDict is never called, so its children are yielded instead."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called_children(child)
        else:
            yield child


def compile_forwards(task: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile the forward methods of blocks, but not their hooks."""
    names, chosen = read_compile(options)

    def compiled(kind: type[nn.Module]) -> Callable[..., Any]:
        # in a lambda, as torch's compiler skips a forward that is defined in torch.nn
        forward = torch.compile(lambda module, *values, **more: kind.forward(module, *values, **more), **chosen)
        return lambda module, *values, **more: forward(module, *values, **more)

    give_forwards(modules_named(task, names or [], "trainer.compile.blocks"), compiled)


def give_forwards(
    modules: Iterable[nn.Module], forward_of: Callable[[type[nn.Module]], Callable[..., Any]]
) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Change the class of each module to a subclass whose forward is `forward_of(class)`.

    Returns the modules and their original classes. Unlike a wrapper, a subclass preserves the names in the state dict
    and the module's hooks, and does not affect copying or `isinstance` checks.
    """
    before = [(module, type(module)) for module in modules]
    kinds = {
        kind: type(kind.__name__, (kind,), {"forward": forward_of(kind), **{key: getattr(kind, key) for key in KEPT}})
        for kind in dict(before).values()
    }
    for module, kind in before:
        module.__class__ = kinds[kind]
    return before


def restore_classes(before: Iterable[tuple[nn.Module, type[nn.Module]]]) -> None:
    """Undo `give_forwards`."""
    for module, kind in before:
        module.__class__ = kind


def read_compile(options: bool | Mapping[str, Any]) -> tuple[list[str] | None, dict[str, Any]]:
    """Return the block names in trainer.compile, and the options of torch.compile.

    Raises ConfigError for options unknown to torch.compile.
    """
    chosen = dict(options) if isinstance(options, Mapping) else {}
    names = chosen.pop("blocks", None)
    unknown = sorted(chosen.keys() - set(COMPILE_OPTIONS))
    if unknown:
        raise ConfigError(
            f"trainer.compile has no option {unknown[0]!r}.{did_you_mean(unknown[0], ['blocks', *COMPILE_OPTIONS])} "
            f"The options are blocks and torch.compile's {', '.join(COMPILE_OPTIONS)}."
        )
    return names, chosen


def modules_named(task: nn.Module, names: str | Sequence[str], option: str) -> list[nn.Module]:
    """Return the modules whose class or base class has one of the given names, outer modules first.

    Raises ConfigError if a name matches no module. The error shows `option` and suggests the most similar class names.
    """
    wanted = {names} if isinstance(names, str) else set(names)
    modules, missing = [], set(wanted)
    for module in task.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if module is not task and kinds & wanted:
            modules.append(module)
            missing -= kinds
    if missing:
        classes = sorted({type(module).__name__ for module in task.modules() if module is not task})
        name = sorted(missing)[0]
        shown = ", ".join(classes[:12]) + (", ..." if len(classes) > 12 else "")
        raise ConfigError(
            f"{option}: {type(task).__name__} has no module of class {name!r}.{did_you_mean(name, classes)} "
            f"It has {shown}."
        )
    return modules


def recompute(task: nn.Module, names: str | Sequence[str]) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Checkpoint the activations of blocks: the backward pass recomputes everything except their inputs.

    The method follows Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"
    (https://arxiv.org/abs/1604.06174), and uses torch.utils.checkpoint. Random numbers are replayed, and only the first
    forward pass updates buffers (batch norm), so the result is bitwise identical. Returns the argument to pass to
    `restore_classes`, which undoes this.

    Raises ConfigError for a class name that matches no module.
    """
    return give_forwards(modules_named(task, names, "activation_checkpointing"), _recomputing)


def _recomputing(kind: type[nn.Module]) -> Callable[..., Any]:
    def forward(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *arguments, **options)
        # the recomputation must not update running statistics again
        contexts = (nullcontext(), _on_copies_of_buffers(self))
        # use_reentrant=True would need an input that requires a gradient, and add shared weights' gradients twice
        return checkpoint(kind.forward, self, *arguments, use_reentrant=False, context_fn=lambda: contexts, **options)

    return forward


@contextmanager
def _on_copies_of_buffers(block: nn.Module) -> Iterator[None]:
    """Replace a block's buffers with copies within this context."""
    buffers = [(module, *item) for module in block.modules() for item in module.named_buffers(recurse=False)]
    try:
        for module, name, buffer in buffers:
            setattr(module, name, buffer.clone())
        yield
    finally:
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
