"""What goes with no mesh, said before the run."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ...errors import ConfigError
from .sizes import Sizes

if TYPE_CHECKING:
    from ....tasks.task import Task


def refuse_optimizers(name: str, task: "Task", optimizers: Sequence[Optimizer], gathers: bool) -> None:
    """Refuse what a strategy that `gathers` parameters around whole steps cannot do; raises ConfigError."""
    if optimizers and not task.automatic_optimization:
        raise ConfigError(
            f"strategy {name!r} needs automatic optimization: parameters are gathered around the forward and the "
            f"backward of whole steps, which training_step would cut. Use strategy ddp."
        )
    if len(optimizers) > 1 and gathers:
        raise ConfigError(
            f"strategy {name!r} takes one optimizer, got {len(optimizers)}: each of several reaches its own parameters "
            f"only, which torch cannot tell apart while they are gathered. Use parameter groups of one optimizer, or "
            f"strategy ddp."
        )


def refuse_compile(name: str, options: bool | Mapping[str, Any], sizes: Sizes) -> None:
    """Refuse to compile what cannot be; raises ConfigError."""
    if not isinstance(options, Mapping) or not options.get("blocks"):
        raise ConfigError(
            f"trainer.compile: the hooks by which strategy {name!r} gathers parameters cannot be compiled. The blocks "
            f"between them can: name their classes, as in compile={{'blocks': ['Block']}}."
        )
    if sizes.tensor * sizes.pipeline > 1:
        raise ConfigError(
            f"trainer.compile: torch's compiler fails on layers that are cut over processes; with tensor="
            f"{sizes.tensor} and pipeline={sizes.pipeline} leave it out."
        )


def refuse_empty(task: "Task", rank: int) -> None:
    """Refuse a task whose weights have no values on rank 0, from where they come; raises ConfigError."""
    empty = [name for name, parameter in task.named_parameters() if parameter.is_meta]
    if empty and rank == 0:
        raise ConfigError(
            f"{type(task).__name__} has no values in {empty[0]}: it is on the device meta, where whole_at_end=false "
            f"leaves a task. Take a new one; a checkpoint has its weights."
        )
