"""ZeRO stage 1: DDP with optimizer states sharded across processes.

See Rajbhandari et al. 2020, "ZeRO" (https://arxiv.org/abs/1910.02054). Legato uses torch's ZeroRedundancyOptimizer.
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
    warnings.simplefilter("ignore", DeprecationWarning)  # torch.distributed.optim uses the deprecated torch.jit.script
    from torch.distributed.optim import ZeroRedundancyOptimizer


class Zero1Strategy(DDPStrategy):
    """DDP with sharded optimizer states. Each process stores the states of some of the parameters."""

    name = "zero1"

    def __init__(self, **options: Any) -> None:
        """Accept the ddp strategy's arguments, except `elastic`."""
        super().__init__(**options)
        self.state_dicts: Zero1StateDicts = Zero1StateDicts()

    def _require_elastic(self) -> None:
        raise ConfigError("strategy=zero1 does not support elastic=true: a dead process's shard is lost. Use ddp.")

    def prepare(self, task: "Task", optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Prepare the task. The returned optimizers update this process's shard and fetch the other weights."""
        prepared = super().prepare(task, optimizers)
        return prepared if self.place.world_size == 1 else [self._sharded(optimizer) for optimizer in prepared]

    def _sharded(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer that updates this process's shard of the weights.

        The returned optimizer shares the parameter groups of `optimizer`, so learning rate schedulers for `optimizer`
        also affect the returned optimizer.
        """
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            raise ConfigError(
                "configure_optimizers returned a ZeroRedundancyOptimizer, but strategy=zero1 creates one from a plain "
                "optimizer. Return the plain optimizer, or use strategy=ddp."
            )
        if needs_closure(optimizer):
            kind = type(optimizer).__name__
            raise ConfigError(
                f"{kind} evaluates the loss several times per step and compares all parameters, but under zero1 each "
                f"process updates only a shard. Use one process, or use strategy=ddp with automatic_optimization = "
                f"False and call optimizer.step(closure) in training_step."
            )
        if "param_groups" not in vars(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} wraps another optimizer, which zero1 cannot shard. Use strategy=ddp."
            )
        if has_modes(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} swaps all weights during evaluation, but under zero1 each process has "
                f"only a shard of the optimizer's state. Use strategy=ddp or fsdp."
            )
        # torch needs a class and its arguments; `optimizer.defaults` has keys that AdamW rejects as arguments
        factory: Any = _ShardFactory(optimizer)
        wrapped = ZeroRedundancyOptimizer(optimizer.param_groups, factory, self.collectives.group)
        wrapped.original = optimizer  # type: ignore[attr-defined]
        mark_stepped(optimizer)  # otherwise its schedulers warn that the optimizer never steps
        return wrapped

    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Join the process group and create another group for saving checkpoints."""
        super().join(place, devices, precision)
        self.shard = place.rank
        self.state_dicts.collectives = self.collectives
        self.state_dicts.open_writers(place.rank, place.world_size)

    def optimizer_step(self, optimizer: Optimizer, closure: Any = None, **options: Any) -> Any:
        """Update this process's shard of the weights and fetch the other weights.

        Raises ConfigError if the update draws random numbers under reproducible=bitwise.
        """
        assert self.task is not None
        original = getattr(optimizer, "original", None)  # None: this process updates all weights
        checked = self.task.trainer.reproducible == "bitwise" and original is not None and may_draw(original)
        before = generator_states() if checked else None
        returned = super().optimizer_step(optimizer, closure, **options)
        if before is not None and not same_states(before, generator_states()):
            raise ConfigError(
                f"{type(original).__name__} draws random numbers, which under zero1 depend on the number of processes, "
                f"so reproducible=bitwise cannot be used. Use strategy=ddp, or reproducible=order."
            )
        return returned


class Zero1StateDicts(ShardedStateDicts):
    """Optimizer state dicts with states for this rank's parameters and empty shards for all other parameters."""

    read_in_parts = ("optimizer_states",)

    def parts(self, world_size: int) -> StateParts:
        """Return how a run is divided among processes. The optimizer's state is sharded across all processes."""
        return StateParts(world_size, optimizer=world_size)

    def __init__(self) -> None:
        super().__init__()
        self.collectives = SINGLE

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of `optimizer`, with empty shards in place of other ranks' states.

        All ranks must call this.
        """
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            return super().optimizer(optimizer)
        indices = dict(_numbered(optimizer))
        groups = [{**group, "params": [indices[p] for p in group["params"]]} for group in optimizer.param_groups]
        states = {index: optimizer.optim.state[p] for p, index in indices.items() if p in optimizer.optim.state}
        shapes = {index: without_data(values) for index, values in states.items()}
        # gathers only descriptions (shapes and dtypes), not the states
        layouts = {index: values for each in self.collectives.gather_objects(shapes) for index, values in each.items()}
        return {
            "state": {index: with_own_data(layouts[index], states.get(index, {})) for index in sorted(layouts)},
            "param_groups": groups,
        }

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's shard of an optimizer's state."""
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            super().load_optimizer(optimizer, state)
            return
        kept = {id(parameter) for group in optimizer.optim.param_groups for parameter in group["params"]}
        local = {index for parameter, index in _numbered(optimizer) if id(parameter) in kept}
        # other ranks' values are not read from the files
        states = {index: load_stored(values) if index in local else {} for index, values in state["state"].items()}
        optimizer.load_state_dict({**state, "state": states})
        optimizer.state.clear()  # this state is a copy; steps use the inner optimizer's state
        # loading has created new groups, but schedulers change those of the original optimizer
        optimizer.original.param_groups = optimizer.param_groups  # type: ignore[attr-defined]


def _numbered(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield each parameter of an optimizer with its index."""
    return zip((parameter for group in optimizer.param_groups for parameter in group["params"]), count(), strict=False)


class _ShardFactory:
    """Creates copies of `optimizer` with a subset of its parameters. This works for any optimizer class."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, groups: Sequence[dict[str, Any]]) -> Optimizer:
        copy: Optimizer = object.__new__(type(self.optimizer))
        copy.__dict__.update(self.optimizer.__dict__)
        copy.__dict__.pop("step", None)  # a scheduler may have bound it to the original
        copy.state = defaultdict(dict)
        copy.param_groups = [dict(group) for group in groups]
        return copy
