"""The modules that a task marks as remote: made with the same weights wherever they come to live."""

import inspect
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...data.sampling import mix
from ...errors import ConfigError, TaskError

if TYPE_CHECKING:
    from ....tasks.task import Task


def make_module(name: str, make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return the module that a task names, with the weights that it has under every strategy; raises TaskError."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(seed, zlib.crc32(name.encode())))
        module = make() if callable(make) and not isinstance(make, nn.Module) else None
    if not isinstance(module, nn.Module) or not name.isidentifier():
        raise TaskError(
            f"remote_modules must return attribute names, each with a function that makes a module; it returned "
            f"{name!r}: {make!r}."
        )
    return module


def build_here(task: "Task", seed: int) -> None:
    """Give a task the modules that it marks as remote, in this process."""
    for name, make in task.remote_modules().items():
        if not isinstance(getattr(task, name, None), nn.Module):
            setattr(task, name, make_module(name, make, seed))


# --- as strategy ddp_rpc has them -------------------------------------------------------------------------------------
def named_modules(task: "Task") -> dict[str, Callable[[], nn.Module]]:
    """Return the remote modules that a task names; raises ConfigError where there are none to be had by servers."""
    found = dict(task.remote_modules())
    if not found:
        raise ConfigError(
            f"strategy ddp_rpc: {type(task).__name__} names no remote_modules, so the servers would have nothing "
            f"to hold. Define them, or use strategy ddp."
        )
    return found


def dealt(names: Iterable[str], servers: int) -> list[list[str]]:
    """Return the names of the remote modules of each server: they are dealt out in turn."""
    listed = list(names)
    return [listed[server::servers] for server in range(servers)]


def options_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options of an optimizer's only group, with which the servers make theirs."""
    known = inspect.signature(type(optimizer)).parameters.values()
    any_name = any(one.kind is one.VAR_KEYWORD for one in known)
    taken = optimizer.defaults.keys() if any_name else optimizer.defaults.keys() & {one.name for one in known}
    # AdamW has the default decoupled_weight_decay, which it gives to Adam and does not take itself
    return {name: value for name, value in optimizer.param_groups[0].items() if name in taken}


def refuse_remote_optimizers(task: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise ConfigError for optimizers from whose options the servers could not make theirs."""
    if len(optimizers) > 1:
        raise ConfigError(f"strategy ddp_rpc does not go with {len(optimizers)} optimizers: the servers have one.")
    groups = optimizers[0].param_groups
    if len(groups) != 1 or [id(one) for one in groups[0]["params"]] != [id(one) for one in task.parameters()]:
        raise ConfigError(
            "strategy ddp_rpc needs an optimizer of one group with self.parameters(), to which those on the "
            "servers belong as well."
        )
