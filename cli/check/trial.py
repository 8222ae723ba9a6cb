"""Trial: a short real run in which a callback on every rank records measurements, for `legato check`."""

import copy
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ... import loggers
from ...base.arguments import ARGUMENT_NAMES
from ...base.torch_private import graph_breaks
from ...callbacks.callback import Callback
from ...callbacks.checkpoint import Checkpoint
from ...callbacks.checkpoint_callback import CheckpointCallback
from ...callbacks.early_stopping import EarlyStopping
from ...callbacks.model_summary import ModelSummary
from ...callbacks.progress_bar import ProgressDisplay
from ...trainer.elastic.membership import Elasticity
from ...trainer.processes.layout_report import entry_of
from ...trainer.strategies.strategy import trainable
from ...trainer.trainer import Trainer

if TYPE_CHECKING:
    from ...tasks.task import Task

SKIPPED = (CheckpointCallback, EarlyStopping, ProgressDisplay, ModelSummary)
"""Callbacks to leave out of a trial: they would end it early, write elsewhere, or print."""


@dataclass
class RankRecord:
    """Measurements of one rank."""

    rank: int = 0
    seconds: list[float] = field(default_factory=list)
    """Seconds of each step, including its data."""
    without_gradient: list[list[str]] = field(default_factory=list)
    """Trainable parameters without a gradient, for each step."""
    logged: list[str] | None = None
    """Names of all metrics at the end of an epoch; None if no epoch has ended."""
    validated: list[str] = field(default_factory=list)
    """Names of the metrics that validation has logged."""
    plateaus: list[str] = field(default_factory=list)
    """Metrics that learning rate schedulers monitor."""
    graph_breaks: list[str] = field(default_factory=list)
    """Places where torch.compile had to end its graph, with the reason."""
    compiled_nothing: bool = False
    """Whether torch.compile was asked for and has made no graph."""
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    host_bytes: int = 0
    """Peak memory of the process."""
    device_bytes: int | None = None
    """Peak memory of tensors on any of its devices; None on the CPU."""
    place: tuple[int, int, str, str] | None = None
    """Rank, node, host and device."""
    origin: str = ""
    """Name of the launcher that started the process."""


MOST_STEPS, SECONDS = 20, 3.0
"""A training trial continues until either limit is reached, because the first steps are slow."""


class Recorder(Callback):
    """Records measurements, writes them to the run directory after every step, and ends the run.

    It ends after `steps` steps, or later if more are wanted: after `most` steps or `seconds` seconds. Records are files
    and not gathered, so that they survive the failure of other ranks.
    """

    late = 2

    def __init__(self, name: str, steps: int, most: int, seconds: float) -> None:
        self.name, self.steps, self.most, self.seconds = name, steps, most, seconds
        self.record = RankRecord()
        self.names: dict[str, Any] = {}
        self.reached: set[str] = set()
        self.before: dict[str, Any] = {}
        self.step = -1
        self.since = self.began = 0.0

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Reset the record."""
        strategy = trainer.strategy
        own = entry_of(strategy.place, strategy.device)
        self.record, self.step = RankRecord(trainer.global_rank, place=own, origin=strategy.place.origin), -1

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Watch which parameters get gradients, by hooks that run before the reduction over ranks."""
        wanted = {id(parameter) for parameter in trainable(task)}
        for name, parameter in task.named_parameters():
            if id(parameter) in wanted:
                hook = parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.reached.add(name))
                self.names[name] = hook

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start the clock."""
        self.since = time.monotonic()
        self.began = self.began or self.since

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Clear the gradients seen at the beginning of a step."""
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            self.reached.clear()

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record a completed step."""
        if trainer.global_step == self.step:
            return
        # kernels are launched ahead of the device: without this a step's time would be that of its launches
        for device in trainer.strategy.task_devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        now = time.monotonic()
        self.record.seconds.append(now - self.since)
        self.record.without_gradient.append([name for name in self.names if name not in self.reached])
        self.since = now
        self._write(trainer)
        done = len(self.record.seconds)
        enough = done >= self.most or now - self.began >= self.seconds
        # stop before the end of an epoch, counting the resume's step: epoch-end work is not part of the trial
        if done >= self.steps and (enough or trainer.state.epoch_steps + 2 >= trainer.steps_per_epoch):
            trainer.should_stop = True

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Remember the metrics before a validation."""
        self.before = dict(trainer.agreed_metrics)

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Record what validation has logged, and exclude its time."""
        found = {name for name, value in trainer.agreed_metrics.items() if value is not self.before.get(name)}
        self.record.validated = sorted(found.union(self.record.validated))
        self.since = time.monotonic()

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Record logged metrics and the length of the whole run."""
        record = self.record
        record.logged = sorted(trainer.callback_metrics)
        record.plateaus = [
            str(config.monitor) for config in trainer.lr_scheduler_configs if config.reduce_on_plateau and config.strict
        ]
        record.total_steps = _finite(trainer.estimated_stepping_batches)
        record.steps_per_epoch = _finite(trainer.steps_per_epoch)
        self._write(trainer)

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Remove the gradient hooks, and record the peak memory."""
        for handle in self.names.values():
            handle.remove()
        self.names = {}
        if stage == "fit":
            self._write(trainer)

    def _write(self, trainer: "Trainer") -> None:
        record = self.record
        record.host_bytes = peak_memory()
        record.graph_breaks = graph_breaks() if trainer.compile else []
        record.compiled_nothing = trainer.current_run.compiled_nothing
        peaks = [torch.cuda.max_memory_allocated(one) for one in trainer.strategy.task_devices if one.type == "cuda"]
        record.device_bytes = max(peaks, default=None)
        assert trainer.run_dir is not None
        path = trainer.run_dir / f"{self.name}-{record.rank}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(record)))
        # whole or not there: the reader may look after this rank was killed
        partial.replace(path)


def read_records(folder: Path, name: str) -> list[RankRecord]:
    """Return the records of all ranks in the trial `name`, by rank."""
    found = (RankRecord(**json.loads(path.read_text())) for path in folder.glob(f"{name}-*.json"))
    return sorted(found, key=lambda record: record.rank)


def make_trial(
    original: Trainer,
    name: str,
    steps: int,
    folder: Path | None,
    processes: int,
    find_unused: bool = False,
    warm: bool = False,
) -> Trainer:
    """Return a trainer for `steps` steps of what `original` would run, with a validation after each, in `folder`.

    name: identifies the trial's records.
    find_unused: do not end a ddp run at a parameter without gradient.
    warm: run some more steps to measure their time.

    Each replica takes one batch of each evaluation loader. Learning rate schedules see the length of the whole run.
    """
    arguments = {argument: getattr(original, argument) for argument in ARGUMENT_NAMES}
    batches = original.replicas or processes
    for argument in ("limit_val_batches", "limit_test_batches", "limit_predict_batches"):
        limit = arguments[argument]
        arguments[argument] = min(limit, batches) if isinstance(limit, int) else batches if limit else 0
    watching = [callback for callback in original.callbacks if not isinstance(callback, SKIPPED)]
    saving = [Checkpoint(every_n_epochs=0)] if original.checkpoint_callback is not None else []
    # shallow, as the trial changes it: the objects beside it are shared, and none points back to a strategy
    strategy: Any = copy.copy(original.strategy)
    elastic, strategy.elastic = strategy.elastic, Elasticity()  # no process leaves or joins a trial
    if find_unused or elastic.changes:
        strategy.finds_unused = True
    arguments |= {
        "strategy": strategy,
        "callbacks": [Recorder(name, steps, max(steps, MOST_STEPS if warm else 0), SECONDS), *watching, *saving],
        "logger": own_loggers(original) or False,
        "enable_checkpointing": bool(saving),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "fast_dev_run": False,
        "save_code": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": min(1, abs(original.num_sanity_val_steps)),
        "val_check_interval": 1,
        "check_val_every_n_epoch": None,
        "min_steps": None,
        "min_epochs": None,
        "max_restarts": 0,
    }
    trainer = Trainer(**arguments)
    trainer.given_dir = trainer.run_dir = folder
    trainer.config_text = original.config_text
    return trainer


def own_loggers(trainer: Trainer) -> list[Any]:
    """Return the loggers known to write to the run directory only: Legato's."""
    return [logger for logger in trainer.loggers if type(logger).__module__.startswith(f"{loggers.__name__}.")]


def needs_every_gradient(trainer: Trainer) -> bool:
    """Return whether the strategy fails when a parameter gets no gradient in a step on some rank."""
    own_reduction = trainer.reproducible == "bitwise" or trainer.strategy.elastic.changes  # takes what there is
    return trainer.strategy.needs_every_gradient and not own_reduction


def peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _finite(count: int | float) -> int | None:
    return None if count == float("inf") else int(count)
