"""Numerics that bitwise runs compare, compilation and activation checkpointing."""

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
    "trainer.compile has compiled nothing: the steps never call the task, or a module that is an attribute of it. Name "
    "the classes that they call, as in compile={'blocks': ['Block']}."
)
# Keyword arguments of torch.compile
COMPILE_OPTIONS = ("fullgraph", "dynamic", "backend", "mode", "options", "disable")


def numerics(
    optimizers: Sequence[Optimizer], precision: str, device: torch.device, options: bool | Mapping[str, Any] = False
) -> dict[str, Any]:
    """Return every setting that affects the last bits of a result, apart from the order of additions.

    Seen to change bits: the number of threads, the instruction set, `fused` instead of `foreach` optimizers.
    `options`: those of trainer.compile.
    """
    return {
        **versions(),
        **environment(),
        "device": name_of(device),
        # a backend may be a function, whose address is another one in each process
        "compile": json.dumps(options, default=lambda value: getattr(value, "__name__", type(value).__name__)),
        "precision": precision,
        "optimizers": [
            [class_of(optimizer), *({flag: group.get(flag) for flag in FLAGS} for group in optimizer.param_groups)]
            for optimizer in optimizers
        ],
    }


def class_of(optimizer: Optimizer) -> str:
    """Return the class name of an optimizer, as returned by the task even if a strategy has wrapped it."""
    return type(getattr(optimizer, "original", optimizer)).__name__


def require_same_ranks(by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError, naming a rank and the differences, if the processes of a bitwise run differ in numerics."""
    first = by_rank[0]
    for rank, own in enumerate(by_rank):
        differing = [f"{name} is {own[name]!r}, on rank 0 {first[name]!r}" for name in own if own[name] != first[name]]
        # a run on unequal machines would end well, and not be the same when it is repeated
        if differing:
            raise ConfigError(
                f"reproducible: bitwise needs the same arithmetic in all processes, but on rank {rank} "
                f"{'; '.join(differing)}. Use machines of one kind, or reproducible: order."
            )


def compile_in_place(task: nn.Module, options: bool | Mapping[str, Any]) -> None:
    """Compile the task's forward and its direct children in place, so that state_dict names stay the same.

    `blocks` (class names) selects modules instead; equal blocks share one compilation. The steps are not compiled,
    since logging breaks the graph. Raises ConfigError for a class that no module has or an option unknown to
    torch.compile.
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
    """Yield the children; in place of a list or dict of modules, which nobody calls, its own."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called_children(child)
        else:
            yield child


def compile_forwards(task: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile the forward of blocks without their hooks."""
    names, chosen = read_compile(options)

    def compiled(kind: type[nn.Module]) -> Callable[..., Any]:
        # torch's compiler passes over a forward of torch.nn by itself
        forward = torch.compile(lambda module, *values, **more: kind.forward(module, *values, **more), **chosen)
        return lambda module, *values, **more: forward(module, *values, **more)

    give_forwards(modules_named(task, names or [], "trainer.compile.blocks"), compiled)


def give_forwards(
    modules: Iterable[nn.Module], forward_of: Callable[[type[nn.Module]], Callable[..., Any]]
) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Give modules a subclass with the forward that `forward_of` makes of their class; return them with that class.

    A subclass and not a wrapper: names in the state dict, hooks, copies and `isinstance` stay.
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
    """Return the block names in trainer.compile, and the options for torch.compile.

    Raises ConfigError for options unknown to torch.compile.
    """
    chosen = dict(options) if isinstance(options, Mapping) else {}
    names = chosen.pop("blocks", None)
    unknown = sorted(chosen.keys() - set(COMPILE_OPTIONS))
    if unknown:
        raise ConfigError(
            f"trainer.compile has no option {unknown[0]!r}.{did_you_mean(unknown[0], ['blocks', *COMPILE_OPTIONS])} "
            f"It takes blocks and torch.compile's {', '.join(COMPILE_OPTIONS)}."
        )
    return names, chosen


def modules_named(task: nn.Module, names: str | Sequence[str], option: str) -> list[nn.Module]:
    """Return the modules whose class or base class has one of these names, outer modules first.

    Raises ConfigError, naming `option` and the nearest classes, for a name that no module has.
    """
    wanted = {names} if isinstance(names, str) else set(names)
    found, missing = [], set(wanted)
    for module in task.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if module is not task and kinds & wanted:
            found.append(module)
            missing -= kinds
    if missing:
        known = sorted({type(module).__name__ for module in task.modules() if module is not task})
        name = sorted(missing)[0]
        shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
        raise ConfigError(
            f"{option}: no module of {type(task).__name__} is a {name!r}.{did_you_mean(name, known)} There are {shown}."
        )
    return found


def recompute(task: nn.Module, names: str | Sequence[str]) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Checkpoint the activations of blocks, of which backward recomputes everything but their input.

    After Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (https://arxiv.org/abs/1604.06174), by
    torch.utils.checkpoint. Random numbers are replayed and buffers (batch norm) are updated only by the first forward,
    so the result is identical to the bit. Returns what `restore_classes` takes to undo it.

    Raises ConfigError for a class that no module has.
    """
    return give_forwards(modules_named(task, names, "activation_checkpointing"), _recomputing)


def _recomputing(kind: type[nn.Module]) -> Callable[..., Any]:
    def forward(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *arguments, **options)
        # the second forward must not update running statistics again
        # (first forward, recomputation)
        contexts = (nullcontext(), _on_copies_of_buffers(self))
        # The reentrant way needs an input that requires a gradient, and gives shared weights theirs twice.
        return checkpoint(kind.forward, self, *arguments, use_reentrant=False, context_fn=lambda: contexts, **options)

    return forward


@contextmanager
def _on_copies_of_buffers(block: nn.Module) -> Iterator[None]:
    """Swap a block's buffers for copies that are dropped on exit."""
    own = [(module, *item) for module in block.modules() for item in module.named_buffers(recurse=False)]
    try:
        for module, name, buffer in own:
            setattr(module, name, buffer.clone())
        yield
    finally:
        for module, name, buffer in own:
            setattr(module, name, buffer)
