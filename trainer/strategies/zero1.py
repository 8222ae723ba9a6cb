"""ZeRO, stage 1: ddp whose processes each keep and update their part of the optimizer's state.

After Rajbhandari et al. 2020, "ZeRO" (https://arxiv.org/abs/1910.02054), by torch's ZeroRedundancyOptimizer.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...base.errors import ConfigError
from ...base.place import Place
from ...base.torch_private import mark_stepped
from ..checkpoints.shards import load_stored, with_own_data, without_data
from ..data.randomness import generator_states, same_states
from ..optimization.optimizers import has_modes, may_draw, needs_closure
from ..processes.ranks import SINGLE
from .ddp import DDPStrategy
from .state_dicts import ShardedStateDicts, StateParts

if TYPE_CHECKING:
    from ...tasks.task import Task

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's optimizers still use its own torch.jit.script
    from torch.distributed.optim import ZeroRedundancyOptimizer


class Zero1Strategy(DDPStrategy):
    """Distributed data parallel with the optimizer's state dealt out, whole tensors to each process."""

    name = "zero1"

    def __init__(self, **options: Any) -> None:
        """The arguments are those of strategy ddp, without `elastic`."""
        super().__init__(**options)
        self.state_dicts: Zero1StateDicts = Zero1StateDicts()

    def _require_elastic(self) -> None:
        raise ConfigError("zero1 cannot be elastic: a process that dies takes its part of the state along. Use ddp.")

    def prepare(self, task: "Task", optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Prepare the placed task; return optimizers that update this process's part, and take the rest from others."""
        prepared = super().prepare(task, optimizers)
        return prepared if self.place.world_size == 1 else [self._dealt_out(optimizer) for optimizer in prepared]

    def _dealt_out(self, optimizer: Optimizer) -> Optimizer:
        """Return what updates this process's part.

        It has the parameter groups of `optimizer`, so that learning rate schedulers made for that one reach it.
        """
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            raise ConfigError(
                "configure_optimizers returned a ZeroRedundancyOptimizer, which strategy zero1 makes of a plain one: "
                "return that, or use strategy ddp."
            )
        if needs_closure(optimizer):
            kind = type(optimizer).__name__
            raise ConfigError(
                f"{kind} evaluates the loss several times a step and compares all parameters, of which each process "
                f"has a part under zero1. Use one process; or strategy ddp with automatic_optimization = False, and "
                f"call optimizer.step(closure) in training_step."
            )
        if "param_groups" not in vars(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} wraps another optimizer, which zero1 cannot deal out. Use strategy ddp."
            )
        if has_modes(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} changes all weights over for an evaluation, of whose state each process "
                f"has a part under zero1. Use strategy ddp or fsdp."
            )
        # torch takes a class and its arguments; `optimizer.defaults` are not those (AdamW's has a key that it refuses)
        parts: Any = _Parts(optimizer)
        wrapped = ZeroRedundancyOptimizer(optimizer.param_groups, parts, self.collectives.group)
        wrapped.original = optimizer  # type: ignore[attr-defined]
        mark_stepped(optimizer)  # else its schedulers warn that it never steps
        return wrapped

    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Open the process group, and one for saving."""
        super().join(place, devices, precision)
        self.shard = place.rank
        self.state_dicts.collectives = self.collectives
        self.state_dicts.open_writers(place.rank, place.world_size)

    def optimizer_step(self, optimizer: Optimizer, closure: Any = None, **options: Any) -> Any:
        """Update this process's part and take the rest from the others.

        Raises ConfigError for an update that draws random numbers where every bit must be that of one process.
        """
        assert self.task is not None
        original = getattr(optimizer, "original", None)  # None: this process updates all weights
        compared = self.task.trainer.reproducible == "bitwise" and original is not None and may_draw(original)
        before = generator_states() if compared else None
        returned = super().optimizer_step(optimizer, closure, **options)
        if before is not None and not same_states(before, generator_states()):
            raise ConfigError(
                f"{type(original).__name__} draws random numbers, under zero1 each process for its part of the "
                f"weights, so reproducible=bitwise cannot hold. Use strategy ddp, or reproducible=order."
            )
        return returned


class Zero1StateDicts(ShardedStateDicts):
    """State dicts of optimizers; each rank has the states of its own parameters, and empty shards of the others."""

    read_in_parts = ("optimizer_states",)

    def parts(self, world_size: int) -> StateParts:
        """Return a part of the optimizer's state for each process."""
        return StateParts(world_size, optimizer=world_size)

    def __init__(self) -> None:
        super().__init__()
        self.collectives = SINGLE

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of `optimizer`, with empty shards for those of other ranks; every rank calls it."""
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            return super().optimizer(optimizer)
        indices = dict(_numbered(optimizer))
        groups = [{**group, "params": [indices[one] for one in group["params"]]} for group in optimizer.param_groups]
        own = {index: optimizer.optim.state[one] for one, index in indices.items() if one in optimizer.optim.state}
        numbers = {index: without_data(values) for index, values in own.items()}
        # only descriptions are gathered (shapes and dtypes), never the states themselves
        known = {index: values for each in self.collectives.gather_objects(numbers) for index, values in each.items()}
        return {
            "state": {index: with_own_data(known[index], own.get(index, {})) for index in sorted(known)},
            "param_groups": groups,
        }

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's part of an optimizer's state."""
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            super().load_optimizer(optimizer, state)
            return
        kept = {id(one) for group in optimizer.optim.param_groups for one in group["params"]}
        own = {index for one, index in _numbered(optimizer) if id(one) in kept}
        # other ranks' values are not even read from the files
        found = {index: load_stored(values) if index in own else {} for index, values in state["state"].items()}
        optimizer.load_state_dict({**state, "state": found})
        optimizer.state.clear()  # a second copy; the one that steps use is that of the inner optimizer
        optimizer.original.param_groups = optimizer.param_groups  # type: ignore[attr-defined]


def _numbered(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, int]]:
    return zip((one for group in optimizer.param_groups for one in group["params"]), count(), strict=False)


class _Parts:
    """Makes optimizers like a given one for a part of its parameters, whatever its class and its arguments were."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, groups: Sequence[dict[str, Any]]) -> Optimizer:
        made: Optimizer = object.__new__(type(self.optimizer))
        made.__dict__.update(self.optimizer.__dict__)
        made.__dict__.pop("step", None)  # a scheduler has tied it to the given one
        made.state = defaultdict(dict)
        made.param_groups = [dict(group) for group in groups]
        return made
