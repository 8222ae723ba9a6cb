"""SpikeWatch: steps whose loss or gradient norm leaves its running range."""

import json
import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..trainer.errors import ConfigError, did_you_mean
from .callback import Callback
from .microscope import moments, norm, refuse_parts, summary_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..tasks.task import Task
    from ..trainer.trainer import Trainer

log = logging.getLogger("legato")

SPIKES = "spikes.jsonl"
"""File in the run directory with a line for each spike."""
What = Literal["warn", "skip", "rewind"]
NORMAL = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""
LEAST_SPREAD = 0.01
"""Least spread, relative to the median: a loss that hardly varies spikes only where it leaves it by more."""


class SpikeWatch(Callback):
    """Judges each step by the mean loss over its samples, and by the norm of its gradient before clipping. Where one is
    above median + factor * spread of the last `window` steps, with the spread the median absolute deviation in standard
    deviations of a normal distribution, or is not finite, the step is a spike, on all ranks alike.

    Its samples, the norms of weights and gradients by module, and the moments of activations go to `spikes.jsonl` in
    the run directory. A spike does not count for the range. Each step waits for the device: the loss is read before the
    update.

    Args:
        factor: how many spreads above the median is a spike.
        window: steps of the running range; the first `window` steps are not judged.
        then: "warn"; "skip": drop the update of the step; "rewind": go back to the newest checkpoint before the spike
            and leave out its batches, of `margin` steps on either side too. The order of all other samples, and the
            numbers of steps, stay; the steps left out are part of the run's state. Without such a checkpoint the update
            is dropped.
        most_in_a_row: more spikes than this in a row are a new level, which counts for the range and is only warned of.
    """

    def __init__(
        self, factor: float = 10.0, window: int = 100, then: What = "warn", margin: int = 0, most_in_a_row: int = 10
    ) -> None:
        if then not in get_args(What):
            hint = did_you_mean(str(then), get_args(What))
            raise ConfigError(f"SpikeWatch: then must be one of {', '.join(get_args(What))}, got {then!r}.{hint}")
        for name, value, least in (("window", window, 3), ("margin", margin, 0), ("most_in_a_row", most_in_a_row, 1)):
            if value < least:
                raise ConfigError(f"SpikeWatch: {name} must be at least {least}, got {value}.")
        if factor <= 0:
            raise ConfigError(f"SpikeWatch: factor must be positive, got {factor}.")
        self.factor, self.window, self.then = factor, window, then
        self.margin, self.most_in_a_row = margin, most_in_a_row
        self.drops_steps = then != "warn"
        self.spikes: list[int] = []
        """The steps that were spikes."""
        self._ranges: dict[str, deque[float]] = {}
        self._in_a_row = 0
        self._losses: list[tuple[int, torch.Tensor, int]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the running range and the spikes."""
        ranges = {name: [_strict_json(value) for value in values] for name, values in self._ranges.items()}
        return {"ranges": ranges, "in_a_row": self._in_a_row, "spikes": list(self.spikes)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the running range and the spikes."""
        ranges = state_dict["ranges"].items()
        self._ranges = {name: deque(map(float, values), maxlen=self.window) for name, values in ranges}
        self._in_a_row, self.spikes = state_dict["in_a_row"], list(state_dict["spikes"])

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Forget the last run. Raises ConfigError where steps cannot be judged."""
        refuse_parts(self, trainer, stage)
        if stage != "fit":
            return
        self._ranges, self._in_a_row, self._losses, self.spikes = {}, 0, [], []
        if not task.automatic_optimization:
            raise ConfigError(
                "SpikeWatch judges a step before its update, which manual optimization leaves to training_step: judge "
                "the loss there."
            )
        if self.then == "rewind" and trainer.current_run.members_change:
            raise ConfigError("SpikeWatch(then='rewind') needs processes that stay; here they may leave (elastic).")

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Forget the losses of a step that was not finished."""
        self._losses = []

    def on_processes_changed(self, trainer: "Trainer", task: "Task") -> None:
        """Forget the losses of a step that is done again in other processes (elastic)."""
        self._losses = []

    def on_before_backward(self, trainer: "Trainer", task: "Task", loss: "torch.Tensor") -> None:
        """Keep the loss of a batch."""
        self._losses.append((trainer.metrics.replica, loss.detach(), trainer.metrics.samples))

    def judge_step(self, trainer: "Trainer", task: "Task") -> bool:
        """Judge the step; return whether to drop its update."""
        losses, self._losses = self._losses, []
        values = {"loss": mean_loss(trainer, losses), "gradient_norm": gradient_norm(trainer)}
        # not <=, so that NaN, for which every comparison is false, is above any limit
        above = {name: limit for name, value in values.items() if not value <= (limit := self._limit(name))}
        step, run = trainer.global_step + 1, trainer.current_run
        if not above:
            self._in_a_row = 0
            self._count(values)
            return False
        before = 0
        # after a rewind the count in a row is the checkpoint's; the steps left out are known all the same
        while step - before - 1 in trainer.state.left_out:
            before += 1
        is_level = max(self._in_a_row, before) >= self.most_in_a_row
        then = "warn" if is_level else self.then
        self._report(trainer, task, values, above, then)
        self._in_a_row += 1  # what is counted comes after all that ranks do together: where one dies, it is done again
        if is_level:
            self._count(values)
        if then == "rewind":
            run.rewind(range(max(1, step - self.margin), step + self.margin + 1))
            if trainer.is_global_zero:
                log.warning("There is no checkpoint before step %d to go back to; its update is dropped.", step)
        self.spikes.append(step)
        return then != "warn"

    def _limit(self, name: str) -> float:
        """Return the value above which a step is a spike; infinity before there are enough."""
        values = self._ranges.get(name, ())
        if len(values) < self.window:
            return math.inf
        middle = statistics.median(values)
        spread = NORMAL * statistics.median(abs(value - middle) for value in values)
        return middle + self.factor * max(spread, LEAST_SPREAD * abs(middle))

    def _count(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self._ranges.setdefault(name, deque(maxlen=self.window)).append(value)

    def _report(
        self, trainer: "Trainer", task: "Task", values: dict[str, float], above: dict[str, float], then: str
    ) -> None:
        """Warn, and write the spike with its samples and the view of the modules; every rank calls it."""
        run, step = trainer.current_run, trainer.global_step + 1
        items = [] if run.loop.step is None else run.loop.step.batches
        mine = [(item.replica, item.batch_idx, item.indices_by_loader) for item in items]
        samples = [
            {"replica": replica, "batch": batch, "indices": indices}
            for rank in trainer.strategy.data_ranks.gather_objects(mine)
            for replica, batch, indices in rank
        ]
        view = view_of(trainer, task)
        record = {
            "step": step,
            "epoch": trainer.current_epoch,
            **{name: _strict_json(value) for name, value in values.items()},
            "limits": above,
            "then": then,
            "samples": samples,
            "modules": view,
        }
        if not trainer.is_global_zero:
            return
        told = ", ".join(f"{name} {values[name]:.6g} (limit {limit:.6g})" for name, limit in above.items())
        shown = [str(index) for one in samples for found in (one["indices"] or {}).values() for index in found]
        of = f" Its samples: {', '.join(shown[:16])}{' ...' if len(shown) > 16 else ''}." if shown else ""
        doing = {
            "warn": "It is trained on",
            "skip": "Its update is dropped",
            "rewind": "The run goes back to a checkpoint and leaves it out",
        }
        log.warning("Step %d is a spike: %s. %s.%s", step, told, doing[then], of)
        if trainer.run_dir is not None:
            path = trainer.run_dir / SPIKES
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            kept = [line for line in lines if json.loads(line)["step"] != step]  # a resume may come by here again
            with trainer.saver.writing():
                path.write_text("\n".join([*kept, json.dumps(record, default=str), ""]), encoding="utf-8")


def mean_loss(trainer: "Trainer", losses: "list[tuple[int, torch.Tensor, int]]") -> float:
    """Return the mean loss over all samples of the step; the same bits on any number of processes. Collective."""
    import torch

    sums = torch.zeros(trainer.state.replicas, 2, dtype=torch.float64)
    for replica, loss, samples in losses:
        sums[replica] += torch.tensor([float(loss) * samples, samples], dtype=torch.float64)
    # each row is of one rank, so that adding zeros changes no bit
    rows = trainer.strategy.data_ranks.all_reduce(sums, "sum").tolist()
    weight = math.fsum(row[1] for row in rows)
    totals = [row[0] for row in rows]
    if not all(map(math.isfinite, totals)):
        return math.nan
    return math.fsum(totals) / weight if weight else 0.0


def gradient_norm(trainer: "Trainer") -> float:
    """Return the norm of the step's gradient, which all ranks have, before clipping. Collective for sharded ones."""
    scaler = trainer.strategy.precision.scaler
    norms = [trainer.strategy.clip(optimizer, math.inf, "norm") for optimizer in trainer.optimizers]
    total = math.sqrt(math.fsum(float(one) ** 2 for one in norms if one is not None))
    return total / float(scaler.get_scale()) if scaler is not None else total


def view_of(trainer: "Trainer", task: "Task") -> dict[str, float]:
    """Return what Microscope would log of the step, but for updates; activations where they can be computed again."""
    values: dict[str, float] = {}
    found: dict[str, list[list[float]]] = {}

    def look(name: str, output: Any) -> None:
        if hasattr(output, "is_floating_point") and output.is_floating_point():
            found.setdefault(name, []).append(moments(output.detach()).tolist())

    def hook(name: str) -> Any:
        return lambda module, inputs, output: look(name, output)

    handles = []
    for name, module in task.named_modules():
        own: list[nn.Parameter] = [one for one in module.parameters(recurse=False) if one.requires_grad]
        if own:
            values[f"weights/{name}"] = norm(own)
            values[f"gradients/{name}"] = norm([one.grad for one in own if one.grad is not None])
        if not any(True for _ in module.children()):
            handles.append(module.register_forward_hook(hook(name)))
    try:
        trainer.current_run.repeat_step()
    finally:
        for handle in handles:
            handle.remove()
    ranks = trainer.strategy.data_ranks.gather_objects(found)
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        rows = [row for rank in ranks for row in rank.get(name, ())]
        for what, value in zip(("mean", "std", "largest", "kurtosis"), summary_of(rows), strict=True):
            values[f"activations/{name}.{what}"] = value
    return {name: value if math.isfinite(value) else None for name, value in values.items()}  # type: ignore[misc]


def _strict_json(value: float) -> Any:
    """Return a number as strict JSON has it: as text where it is not finite."""
    return value if math.isfinite(value) else str(value)
