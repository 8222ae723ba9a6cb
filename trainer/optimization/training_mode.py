"""Training mode for what is trained: `from_pretrained` returns its models in evaluation mode, where dropout is off."""

from collections.abc import Iterator

from torch import nn


def set_training_mode(task: nn.Module) -> list[str]:
    """Put modules with trained parameters into training mode, and the modules without parameters that they hold.

    A module whose parameters are all frozen keeps its mode, with all below it. Returns the names of the outermost
    modules that came in evaluation mode.
    """
    # a frozen backbone with batch norm must keep its running statistics: nobody trains it
    frozen = [(module, module.training) for top in _frozen(task) for module in top.modules()]
    names = []
    for name, module in task.named_modules():
        if not module.training and is_trained(module):
            names.append(name or type(task).__name__)
            module.train()  # by its own method, which may leave some in evaluation mode
            for kept, mode in frozen:
                kept.training = mode
    return names


def is_trained(module: nn.Module) -> bool:
    """Return whether a module has a trained parameter, itself or below it."""
    return any(parameter.requires_grad for parameter in module.parameters())


def _frozen(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that have parameters, all of them frozen."""
    for child in module.children():
        if is_trained(child):
            yield from _frozen(child)
        elif any(True for _ in child.parameters()):
            yield child
