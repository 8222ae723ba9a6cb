"""LearningRateMonitor: logs the learning rate of every optimizer."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from ..base.errors import ConfigError
from .callback import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..base.contracts import Task, Trainer


class LearningRateMonitor(Callback):
    """Logs learning rates under the same names as Lightning, such as `lr-AdamW`.

    With multiple parameter groups, the names are `lr-AdamW/pg1` and so on; a second SGD optimizer is `lr-SGD-1`. A
    scheduler's `name` replaces `lr-AdamW`, and a parameter group's `name` replaces `pg1`. The value logged at a step is
    the learning rate used for that step's update.

    Args:
        logging_interval: "step" (every logging point) or "epoch" (the beginning of each epoch). None: the interval of
            the optimizer's scheduler, or "step" without a scheduler.
        log_momentum: Also log the momentum (for Adam, the first beta) as `lr-SGD-momentum`.
        log_weight_decay: Also log the weight decay as `lr-AdamW-weight_decay`.

    Raises ConfigError if `logging_interval` has any other value.
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ConfigError(
                f"LearningRateMonitor: logging_interval must be 'step', 'epoch' or None, got {logging_interval!r}."
            )
        self.logging_interval = logging_interval
        self.log_momentum, self.log_weight_decay = log_momentum, log_weight_decay
        self._logged_step = -1
        self._rates_of_step: tuple[int, dict[str, float]] | None = None
        """A step and the rates to log once the step completes. Until then, a hook may skip the rest of the epoch."""

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Record the learning rates once per logging point, before a scheduler with interval "step" changes them."""
        step = trainer.state.global_step + 1
        if step % trainer.log_every_n_steps == 0 and step != self._logged_step:
            self._logged_step = step
            self._rates_of_step = (step, self._rates(trainer, "step"))

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the learning rates when the step is complete."""
        # this hook runs for each batch of a step; global_step advances after the last one
        if self._rates_of_step is not None and trainer.state.global_step == self._rates_of_step[0]:
            self._log(trainer, *self._rates_of_step)
            self._rates_of_step = None

    def on_processes_changed(self, trainer: "Trainer", task: "Task") -> None:
        """Log a repeated step again, because another process may have logged it the first time."""
        self._logged_step, self._rates_of_step = -1, None

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Log the epoch's learning rates unless the run resumed mid-epoch."""
        self._logged_step, self._rates_of_step = -1, None
        if trainer.state.epoch_steps == 0:
            self._log(trainer, trainer.global_step, self._rates(trainer, "epoch"))

    def _log(self, trainer: "Trainer", step: int, values: dict[str, float]) -> None:
        if values:
            trainer.current_run.write(step, values)

    def _rates(self, trainer: "Trainer", interval: str) -> dict[str, float]:
        """Return learning rates to log at an interval ("step" or "epoch"), keyed by name. Empty except on rank 0."""
        values: dict[str, float] = {}
        if not trainer.loggers or not trainer.is_global_zero or self.logging_interval not in (None, interval):
            return values
        for name, optimizer, default_interval in self._optimizers(trainer):
            if self.logging_interval is not None or default_interval == interval:
                values.update(self._values(name, optimizer))
        return values

    def _optimizers(self, trainer: "Trainer") -> "Iterator[tuple[str, Optimizer, str]]":
        """Yield (name, optimizer, interval) for each optimizer."""
        # if an optimizer has several schedulers, the last one determines the name and interval
        schedulers = {
            id(getattr(config.scheduler, "optimizer", None)): config for config in trainer.lr_scheduler_configs
        }
        seen: dict[str, int] = {}
        for optimizer in trainer.optimizers:
            original = getattr(optimizer, "original", optimizer)  # the zero1 strategy wraps the task's optimizer
            config = schedulers.get(id(original))
            name = config.name if config is not None and config.name else f"lr-{type(original).__name__}"
            count = seen[name] = seen.get(name, -1) + 1
            yield name if count == 0 else f"{name}-{count}", optimizer, "step" if config is None else config.interval

    def _values(self, name: str, optimizer: "Optimizer") -> Iterator[tuple[str, float]]:
        for number, group in enumerate(optimizer.param_groups, start=1):
            suffix = (
                f"/{group.get('name', f'pg{number}')}" if len(optimizer.param_groups) > 1 or "name" in group else ""
            )
            yield name + suffix, float(group["lr"])
            if self.log_momentum:
                momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
                yield f"{name}-momentum{suffix}", float(momentum)
            if self.log_weight_decay:
                yield f"{name}-weight_decay{suffix}", float(group.get("weight_decay", 0.0))
