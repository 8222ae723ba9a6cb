"""Remote modules of a task. The ddp_rpc strategy keeps them on servers; other strategies build them in the task."""

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...base.errors import TaskError
from ..data.sampling import mix

if TYPE_CHECKING:
    from ...tasks.task import Task


def build_remote_modules(task: "Task", seed: int) -> None:
    """Build a task's remote modules in this process."""
    for name, make in task.remote_modules().items():
        if not isinstance(getattr(task, name, None), nn.Module):
            setattr(task, name, make_module(name, make, seed))


def make_module(name: str, make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a remote module, with the same initial weights under every strategy.

    Raises TaskError if `name` is not an identifier, or if `make` does not return a module.
    """
    # a separate generator: the weights depend neither on the process that builds the module nor on earlier draws
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(seed, zlib.crc32(name.encode())))
        module = make() if callable(make) and not isinstance(make, nn.Module) else None
    if not isinstance(module, nn.Module) or not name.isidentifier():
        raise TaskError(
            f"remote_modules must map attribute names to functions that return a module, as in {{'table': lambda: "
            f"nn.Embedding(1000, 64)}}, but it contains {name!r}: {make!r}."
        )
    return module
