"""Training mode for trainable modules. `from_pretrained` returns models in evaluation mode, which disables dropout."""

from collections.abc import Iterator

from torch import nn


def set_training_mode(task: nn.Module) -> list[str]:
    """Put modules with trainable parameters into training mode, including their submodules without parameters.

    A module whose parameters are all frozen stays in its current mode, as do its submodules. Returns the names of the
    outermost modules that were in evaluation mode.
    """
    # a frozen backbone with batch norm must keep its running statistics
    frozen = [(module, module.training) for top in _frozen(task) for module in top.modules()]
    names = []
    for name, module in task.named_modules():
        if not module.training and is_trained(module):
            names.append(name or type(task).__name__)
            module.train()  # the module may override `train`, to keep some submodules in evaluation mode
            for kept, mode in frozen:
                kept.training = mode
    return names


def is_trained(module: nn.Module) -> bool:
    """Return whether a module or one of its submodules has a trainable parameter."""
    return any(parameter.requires_grad for parameter in module.parameters())


def _frozen(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules whose parameters are all frozen."""
    for child in module.children():
        if is_trained(child):
            yield from _frozen(child)
        elif any(True for _ in child.parameters()):
            yield child
