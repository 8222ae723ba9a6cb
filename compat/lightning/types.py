"""Type names that programs written for Lightning use in annotations."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType as ModuleType
from typing import Any, Literal, Protocol, TypedDict, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed import ReduceOp as ReduceOp
from torch.nn.parallel import DistributedDataParallel as DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .optimizers import LRSchedulerConfig as LRSchedulerConfig

TBroadcast = TypeVar("TBroadcast")
TReduce = TypeVar("TReduce")
UntypedStorage = torch.UntypedStorage
RedOpType: Any = ReduceOp.RedOpType
PATH = str | Path
DEVICE = torch.device | str | int
MAP_LOCATION = DEVICE | Callable[[UntypedStorage, str], UntypedStorage | None] | dict[DEVICE, DEVICE] | None
PARAMETERS = Iterator[torch.nn.Parameter]
NUMBER = int | float
METRIC = Any
"""A torchmetrics object, a tensor or a number."""
STEP_OUTPUT = Tensor | Mapping[str, Any] | None
EVALUATE_OUTPUT = list[Mapping[str, float]]
PREDICT_OUTPUT = list[Any] | list[list[Any]]
TRAIN_DATALOADERS = Any
EVAL_DATALOADERS = Any
PLUGIN_INPUT = Any
LITERAL_WARN = Literal["warn"]
PRECISION_INPUT = int | str
BType = Tensor | str | Mapping[Any, "BType"] | Iterable["BType"]

LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]
LRSchedulerPLType = LRScheduler | ReduceLROnPlateau


class LRSchedulerConfigType(TypedDict, total=False):
    """A scheduler with its settings, as returned by `configure_optimizers`."""

    scheduler: LRSchedulerTypeUnion
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class OptimizerConfig(TypedDict):
    """An optimizer, as returned by `configure_optimizers`."""

    optimizer: Optimizer


class OptimizerLRSchedulerConfig(TypedDict, total=False):
    """An optimizer and its scheduler, as returned by `configure_optimizers`."""

    optimizer: Optimizer
    lr_scheduler: LRSchedulerTypeUnion | LRSchedulerConfigType
    monitor: str


OptimizerLRScheduler = (
    Optimizer
    | Sequence[Optimizer]
    | tuple[Sequence[Optimizer], Sequence[LRSchedulerTypeUnion | LRSchedulerConfig]]
    | OptimizerConfig
    | OptimizerLRSchedulerConfig
    | Sequence[OptimizerConfig]
    | Sequence[OptimizerLRSchedulerConfig]
    | None
)
MODULE_OPTIMIZERS = Any
"""The result of `LightningModule.optimizers`: an optimizer or a list of optimizers."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and loaded."""

    def state_dict(self) -> dict[Any, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        """Load the state."""
        ...


@runtime_checkable
class CollectibleGroup(Protocol):
    """An object with a process group's interface."""

    def size(self) -> int:
        """Return the number of processes."""
        ...

    def rank(self) -> int:
        """Return this process's rank."""
        ...


@runtime_checkable
class Steppable(Protocol):
    """An object with a `step` method."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform a step."""
        ...


@runtime_checkable
class Optimizable(Steppable, Protocol):
    """An object with an optimizer's interface."""

    param_groups: list[dict[Any, Any]]
    defaults: dict[Any, Any]
    state: defaultdict[Tensor, Any]

    def state_dict(self) -> dict[str, dict[Any, Any]]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, dict[Any, Any]]) -> None:
        """Load the state."""
        ...
