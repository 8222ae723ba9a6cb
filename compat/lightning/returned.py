"""Attributes that a run in workers has set on a program's objects, and its optimizers, brought back to the script.

Under Lightning the script itself is rank 0, so that a program reads after `fit` what hooks have kept: losses in a list,
the data sets that `setup` has made. Here the script starts all ranks, and its own objects have not seen the run.
"""

import inspect
import io
import logging
import pickle
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ...tasks.optimizers import SchedulerConfig
from ...trainer.data.transfer import to_host
from ...trainer.trainer import Trainer
from .module import LightningModule

log = logging.getLogger("legato")

LIMIT = 2**26
"""Bytes of an attribute at most: larger ones stay in the worker."""
ROOM = __name__.partition(".")[0]


class _TooLarge(Exception):
    """An attribute has more bytes than the limit."""


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > LIMIT:
            raise _TooLarge
        return super().write(data)


class _Pickler(pickle.Pickler):
    """Pickles what is a program's own; of the parts of the run, such as the trainer, it writes which one it is."""

    def __init__(self, file: Any, parts: Sequence[Any]) -> None:
        super().__init__(file)
        self.parts = {id(part): number for number, part in enumerate(parts) if part is not None}

    def persistent_id(self, value: Any) -> int | None:
        number = self.parts.get(id(value))
        if number is None and isinstance(value, (Trainer, LightningModule)):
            raise pickle.PicklingError("a part of another run")
        return number


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` has written, with the parts of the run that this process has."""

    def __init__(self, file: Any, parts: Sequence[Any]) -> None:
        super().__init__(file)
        self.parts = parts

    def persistent_load(self, number: int) -> Any:
        return self.parts[number]


def packed(value: Any, parts: Sequence[Any] = ()) -> bytes | None:
    """Return a value as bytes; None if it cannot be pickled or is too large."""
    file = _Limited()
    try:
        _Pickler(file, parts).dump(value)
    except Exception:  # whatever a class of the program's own raises: its attribute stays where it is
        return None
    return file.getvalue()


def names_used_by(kind: type) -> set[str]:
    """Return the names that methods of a program's own classes use, of attributes and of all else."""
    found: set[str] = set()
    for own in kind.__mro__:
        if own.__module__.partition(".")[0] not in (ROOM, "torch", "builtins"):
            for method in vars(own).values():
                function = getattr(method, "fget", None) or getattr(method, "__func__", method)
                if isinstance(function, FunctionType):  # and nothing else, whose attributes may be anything
                    found.update(inspect.unwrap(function).__code__.co_names)
    return found - vars(Module()).keys()


def attributes_of(parts: Sequence[Any]) -> list[tuple[str, dict[str, bytes]]]:
    """Return the class of each part of a run and the attributes of a program's own, as far as they can be sent.

    Those are the public ones, and private ones that its classes name; of a trainer none.
    """
    found = []
    for one in parts:
        legatos = isinstance(one, Trainer) or type(one).__module__.partition(".")[0] == ROOM
        own, used = ({}, set[str]()) if legatos or one is None else (vars(one), names_used_by(type(one)))
        chosen = {name: value for name, value in own.items() if not name.startswith("_") or name in used}
        values = {name: packed(value, parts) for name, value in chosen.items()}
        found.append((type(one).__qualname__, {name: value for name, value in values.items() if value is not None}))
    return found


def take_attributes(parts: Sequence[Any], sent: Sequence[tuple[str, dict[str, bytes]]]) -> None:
    """Give the parts of a run the attributes that a worker has sent; lists, dicts and sets are changed in place."""
    for one, (kind, values) in zip(parts, sent, strict=False):
        for name, value in values.items() if type(one).__qualname__ == kind else ():
            try:
                found = _Unpickler(io.BytesIO(value), parts).load()
            except Exception as error:  # of a class that this process cannot import
                log.debug("%s.%s stays as it was: %s", kind, name, error)
                continue
            before = vars(one).get(name)
            if isinstance(before, list) and isinstance(found, list):
                before[:] = found
            elif type(before) is type(found) and isinstance(before, (dict, set)):
                before.clear()
                before.update(found)
            else:
                vars(one)[name] = found


def pack_optimizers(optimizers: Sequence[Optimizer], configs: Sequence[SchedulerConfig]) -> bytes | None:
    """Return the states of optimizers and schedulers as bytes; without tensors, where these are large or sharded.

    None where a state cannot be had in one process, as that of ZeroRedundancyOptimizer.
    """
    try:
        states = [to_host(one.state_dict()) for one in optimizers]
        schedulers = [config.scheduler.state_dict() for config in configs]
    except Exception as error:  # of the program's own class, or torch's
        log.debug("The optimizers' states stay in the workers: %s", error)
        return None
    tensors = [one for state in states for own in state["state"].values() for one in own.values()]
    sharded = any(isinstance(one, Tensor) and type(one) is not Tensor for one in tensors)
    whole = None if sharded else packed((states, schedulers))
    return whole or packed(([{**state, "state": {}} for state in states], schedulers))


def rebuild_optimizers(module: Any, states: bytes) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and schedulers of a module, with states from `pack_optimizers`."""
    optimizers, configs = module.make_optimizers()
    of_optimizers, of_schedulers = pickle.loads(states)
    for optimizer, state in zip(optimizers, of_optimizers, strict=True):
        optimizer.load_state_dict(state)
    for config, state in zip(configs, of_schedulers, strict=True):
        config.scheduler.load_state_dict(state)
    return optimizers, configs
