"""Remote modules as strategy ddp_rpc uses them: which there are, on which server, and what their optimizers need."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from ....base.errors import ConfigError

if TYPE_CHECKING:
    from ....tasks.task import Task


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
    # in turn and not in blocks: tables listed side by side are often alike in size
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
