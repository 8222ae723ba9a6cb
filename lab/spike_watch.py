"""SpikeWatch: detects steps whose loss or gradient norm is much higher than in the previous steps."""

import json
import logging
import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..base.errors import ConfigError, did_you_mean
from ..callbacks.callback import Callback
from .microscope import refuse_parts, total_norm

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ..tasks.task import Task
    from ..trainer.trainer import Trainer

log = logging.getLogger("legato")

SPIKES = "spikes.jsonl"
"""File in the run directory with one line per spike. If a step has several lines, only the last one is valid."""
LEAST = 10
"""Number of steps before the first check."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""
LEAST_SPREAD = 0.01
"""Minimum spread relative to the median, so that small changes in a nearly constant loss are not spikes."""


class SpikeWatch(Callback):
    """Detects loss spikes: checks the mean loss and the unclipped gradient norm of each step.

    A value is a spike if it is not finite or exceeds median + factor * spread over the last `window` steps. The spread
    is the median absolute deviation, scaled to match the standard deviation of a normal distribution. Spikes are
    excluded from the median and the spread. Until there are ten previous steps (or `window` steps, if fewer), only
    non-finite values are spikes. Steps skipped by nan="skip" or by the loss scaler of 16-mixed are not checked.

    With "warn", the values are read only when the run reads from the device anyway, and warnings are issued at the next
    logging point. With "skip", the values are read in every step, and the update is skipped if the step is a spike.
    Weights and optimizer states are then left unchanged, but the effects of the forward pass (batch norm statistics,
    logged values) remain. Each spike is recorded as a line in `spikes.jsonl` in the run directory. To find the sample
    that caused the spike, use `legato samples RUN step=N --blame`. To exclude that sample, use
    `trainer.leave_out_samples`.

    Args:
        factor: A value is a spike if it is more than this many spreads above the median.
        window: Number of previous steps used to compute the median and the spread.
        then: "warn" or "skip".
        most_in_a_row: Maximum number of consecutive finite spikes. Subsequent high values are treated as a new level:
            they are included in the median and only cause warnings.
    """

    def __init__(
        self, factor: float = 10.0, window: int = 100, then: Literal["warn", "skip"] = "warn", most_in_a_row: int = 10
    ) -> None:
        if then not in ("warn", "skip"):
            hint = did_you_mean(str(then), ("warn", "skip"))
            raise ConfigError(f"SpikeWatch: then must be 'warn' or 'skip', got {then!r}.{hint}")
        if not (factor > 0 and window >= 3 and most_in_a_row >= 1):
            raise ConfigError(
                f"SpikeWatch: factor must be above 0, window at least 3 and most_in_a_row at least 1, got "
                f"factor={factor}, window={window}, most_in_a_row={most_in_a_row}."
            )
        self.factor, self.window, self.then, self.most_in_a_row = factor, window, then, most_in_a_row
        self._forget()

    def _forget(self) -> None:
        self.spikes: list[int] = []
        """Steps that were spikes."""
        self._range: list[list[float]] = []  # step, loss and gradient norm
        self._losses: list[tuple[int, Tensor, int]] = []  # of the batches of a step: replica, loss and samples
        self._norms: list[Tensor] = []  # of the gradients of each optimizer
        self._step = 0  # the step of both
        self._unread: dict[int, Tensor] = {}  # by step: sum of the losses, samples, gradient norm

    def state_dict(self) -> dict[str, Any]:
        """Return the values in the window, the spikes, and the values that have not been checked yet."""
        # as strings, since JSON has no infinity
        unread = {str(step): list(map(str, values.tolist())) for step, values in self._unread.items()}
        return {"range": self._range, "spikes": self.spikes, "unread": unread}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        import torch

        self._range, self.spikes = list(state_dict["range"]), list(state_dict["spikes"])
        unread = state_dict["unread"].items()
        self._unread = {int(step): torch.tensor(list(map(float, values))) for step, values in unread}

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Reset the state of the previous run. Raises ConfigError if optimization is manual."""
        refuse_parts(self, trainer, stage)
        if stage == "fit":
            self._forget()
            if not task.automatic_optimization:
                raise ConfigError(
                    "SpikeWatch checks each step before its update, but with manual optimization, training_step "
                    "updates the weights itself. Check the loss in training_step."
                )

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Raise ConfigError for optimizers whose updates cannot be checked or skipped."""
        optimizers, runs_step = trainer.optimizers, trainer.current_run.optimization.needs_closure
        if runs_step or (self.then == "skip" and len(optimizers) > 1):
            came = f"{type(optimizers[0]).__name__}, which evaluates the loss itself" if runs_step else "several"
            raise ConfigError(f"SpikeWatch(then={self.then!r}) needs 1 optimizer with 1 update per step, got {came}.")

    def on_processes_changed(self, trainer: "Trainer", task: "Task") -> None:
        """Discard the losses of a step that an elastic run repeats because its processes changed."""
        self._step = 0

    def on_before_backward(self, trainer: "Trainer", task: "Task", loss: "Tensor") -> None:
        """Record the loss of a batch."""
        self._begin_step(trainer.global_step + 1)
        self._losses.append((trainer.metrics.replica, loss.detach(), trainer.metrics.samples))

    def on_before_optimizer_step(self, trainer: "Trainer", task: "Task", optimizer: "Optimizer") -> None:
        """Record the loss and gradient norm on the device. If `then` is "skip", check them immediately."""
        import torch

        self._begin_step(trainer.global_step + 1)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._norms.append(total_norm(gradients).to(parameters[0].device))
        if len(self._norms) < len(trainer.optimizers):
            return
        rows = torch.zeros(trainer.state.replicas, 2, device=self._norms[0].device)
        for replica, loss, samples in self._losses:
            rows[replica, 0] += loss * samples
            rows[replica, 1] += samples
        # one rank fills each row and adding zeros changes no bit, so the sums do not depend on the number of ranks
        sums = trainer.strategy.data_ranks.all_reduce(rows, "sum").sum(0)
        self._unread[self._step] = torch.stack([*sums, torch.linalg.vector_norm(torch.stack(self._norms))])
        if self.then == "skip" and self._judge(trainer):
            trainer.leave_out_update()

    def _begin_step(self, step: int) -> None:
        # not at the end of a step: a step skipped by nan="skip" never gets there
        if self._step != step:
            self._step, self._losses, self._norms = step, [], []

    def on_step_end(self, trainer: "Trainer", task: "Task") -> None:
        """At logging points, when values are read from the device anyway, check the steps since the previous point."""
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._judge(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Check the last steps of the epoch."""
        self._judge(trainer)

    def _judge(self, trainer: "Trainer") -> bool:
        """Check the steps that have not been checked yet, and return whether to skip the latest step's update."""
        import torch

        unread, self._unread, is_left_out = self._unread, {}, False
        # read the values of all steps from the device at once
        rows = torch.stack(list(unread.values())).tolist() if unread else []
        for step, (total, samples, norm) in zip(unread, rows, strict=True):
            # a scaled gradient may overflow, and the scaler then skips the update
            overflows = trainer.strategy.precision.scaler is not None and not math.isfinite(norm)
            is_judged = bool(samples) and not overflows
            is_left_out = is_judged and self._is_spike(trainer, step, {"loss": total / samples, "gradient_norm": norm})
        return is_left_out

    def _is_spike(self, trainer: "Trainer", step: int, values: dict[str, float]) -> bool:
        """Record a step and return whether it is a spike rather than a new level."""
        is_told = step in self.spikes
        # the step may be repeated after a resume, or after processes change
        self._range = [row for row in self._range if row[0] < step][-self.window :]
        self.spikes = [spike for spike in self.spikes if spike < step]
        limits = {name: self._limit([row[column] for row in self._range]) for column, name in enumerate(values, 1)}
        above = {
            name: limits[name] for name, value in values.items() if not (math.isfinite(value) and value <= limits[name])
        }
        # the loss may stay at a new level, for example when the data changes; training must not stall then
        is_level = all(step - back in self.spikes for back in range(1, self.most_in_a_row + 1)) and all(
            map(math.isfinite, values.values())
        )
        if not above or is_level:
            self._range.append([step, *values.values()])
        if above:
            self.spikes.append(step)
            if not is_told and trainer.is_global_zero:
                self._tell(trainer, {"step": step, **values}, above, "warn" if is_level else self.then)
        return bool(above) and not is_level

    def _limit(self, values: list[float]) -> float:
        """Return the value above which a step is a spike, or infinity if there are too few values."""
        if len(values) < min(LEAST, self.window):
            return math.inf
        # medians, since a single spike would move a mean and a standard deviation
        middle = statistics.median(values)
        spread = NORMAL * statistics.median(abs(value - middle) for value in values)
        return middle + self.factor * max(spread, LEAST_SPREAD * abs(middle))

    def _tell(self, trainer: "Trainer", record: dict[str, float], limits: dict[str, float], then: str) -> None:
        values = ", ".join(f"{name} {record[name]:.6g} (limit {limit:.6g})" for name, limit in limits.items())
        doing = "The update is skipped" if then == "skip" else "The update is applied"
        step = record["step"]
        log.warning(
            "Step %d is a spike: %s. %s. Find the sample: legato samples RUN step=%d --blame", step, values, doing, step
        )
        if trainer.run_dir is not None:
            # writing() names the path in errors such as a full disk or a deleted folder
            with trainer.saver.writing(), (trainer.run_dir / SPIKES).open("a", encoding="utf-8") as file:
                file.write(json.dumps({**record, "limits": limits, "then": then}) + "\n")
