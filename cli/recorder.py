"""Recorder: the callback that `legato check` uses to measure a few steps on every rank."""

import json
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..base.environment import NUMERIC_VARIABLES
from ..base.quantities import counted
from ..callbacks.callback import MonitoringCallback
from ..trainer.accelerators import peak_memory
from ..trainer.processes.layout import describe_layout, entry_of
from ..trainer.resume.fingerprint import NOT_REFUSED
from ..trainer.strategies.strategy import trainable
from ..trainer.switches import versions

if TYPE_CHECKING:
    from ..tasks.task import Task
    from ..trainer.trainer import Trainer

LEAST_STEPS, MOST_STEPS, SECONDS = 2, 20, 3.0
"""Bounds on training: at least `LEAST_STEPS` steps, since the first are slow, and at most `MOST_STEPS` or `SECONDS`."""


@dataclass
class Record:
    """Measurements of one rank."""

    rank: int = 0
    seconds: list[float] = field(default_factory=list)
    """Duration of each step in seconds, including data loading."""
    without_gradient: list[str] | None = None
    """Trainable parameters that received no gradient in any step."""
    logged: list[str] | None = None
    """Names of all metrics at the end of an epoch, or None if no epoch has ended."""
    validated: list[str] = field(default_factory=list)
    """Names of the metrics that validation has logged."""
    plateaus: list[str] = field(default_factory=list)
    """Metrics that learning rate schedulers monitor."""
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    host_bytes: int = 0
    """Peak memory of the process in bytes."""
    device_bytes: int | None = None
    """Peak memory of tensors on the process's fullest device in bytes, or None on the CPU."""
    place: tuple[int, int, str, str] = (0, 0, "", "")
    """Rank, node, host and device."""
    origin: str = ""
    """Name of the launcher that started the process."""
    bits: str = ""
    """Versions and settings that affect the exact bits of the run's results, as text."""


class Recorder(MonitoringCallback):
    """Records the first few steps of fit, then ends the run. The record is saved in the run directory after each step.

    Each rank writes its own file, because a collective fails if any rank has failed.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.record = Record()
        self.hooks: list[Any] = []
        self.missing: set[str] = set()
        self.before: dict[str, Any] = {}
        self.since = self.began = 0.0

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Start the record of this process."""
        place = trainer.strategy.place
        self.record.rank, self.record.place = trainer.global_rank, entry_of(place, trainer.strategy.device)
        self.record.origin = place.origin

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Record which parameters receive gradients, using hooks that run before the reduction over ranks."""
        self.record.bits = bits_of(trainer)
        # hooks on tensors, since after the reduction every parameter has a gradient, possibly zero
        trained = set(map(id, trainable(task)))
        missing = {name: parameter for name, parameter in task.named_parameters() if id(parameter) in trained}
        self.missing = set(missing)
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.missing.discard(name))
            for name, parameter in missing.items()
        ]

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start the clock."""
        self.since = time.monotonic()
        self.began = self.began or self.since

    def on_step_end(self, trainer: "Trainer", task: "Task") -> None:
        """Record a completed step."""
        # kernels run asynchronously: without this, only their launches would be timed
        for device in trainer.strategy.parts or [trainer.strategy.device]:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        now = time.monotonic()
        # includes data loading, which is the bottleneck as often as the model is
        self.record.seconds.append(now - self.since)
        self.record.without_gradient = sorted(self.missing)
        self.since = now
        self._write(trainer)
        steps, is_resume = len(self.record.seconds), self.name == "resume"
        enough = is_resume or steps >= MOST_STEPS or now - self.began >= SECONDS
        # leave one step for the resume, and stop before the end of the epoch, whose work a trial excludes
        enough = enough or trainer.state.epoch_steps + 2 >= trainer.steps_per_epoch
        if enough and (is_resume or steps >= LEAST_STEPS):
            trainer.should_stop = True

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Record which metrics were logged before validation."""
        self.before = dict(trainer.agreed_metrics)

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Record the metrics that validation logged, and exclude the validation time from the step times."""
        metrics = trainer.agreed_metrics.items()
        logged = {name for name, value in metrics if value is not self.before.get(name)}
        self.record.validated = sorted(logged.union(self.record.validated))
        self.since = time.monotonic()

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Record the logged metrics and the length of the full run."""
        record = self.record
        record.logged = sorted(trainer.callback_metrics)
        record.plateaus = [
            str(config.monitor) for config in trainer.lr_scheduler_configs if config.reduce_on_plateau and config.strict
        ]
        record.total_steps = _finite(trainer.estimated_stepping_batches)
        record.steps_per_epoch = _finite(trainer.steps_per_epoch)
        self._write(trainer)

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Remove the gradient hooks and record the peak memory."""
        for handle in self.hooks:
            handle.remove()
        self.hooks = []
        if self.name == "fit":
            self._write(trainer)

    def _write(self, trainer: "Trainer") -> None:
        if self.name != "fit" or trainer.run_dir is None:
            return
        record = self.record
        # ru_maxrss counts bytes on macOS and KiB elsewhere
        unit = 1 if sys.platform == "darwin" else 1024
        record.host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        devices = trainer.strategy.parts or [trainer.strategy.device]
        record.device_bytes = max(filter(None, map(peak_memory, devices)), default=None)
        path = trainer.run_dir / f"check-{record.rank}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(record)))
        # atomic, since this rank may be killed before the file is read
        partial.replace(path)


def read_records(folder: Path) -> list[Record]:
    """Return the records that all ranks wrote during fit, in rank order."""
    records = (Record(**json.loads(path.read_text())) for path in folder.glob("check-*.json"))
    return sorted(records, key=lambda record: record.rank)


def layout_of(records: list[Record]) -> str:
    """Return the layout of the recorded processes as text."""
    return describe_layout([record.place for record in records], records[0].origin, "")


def bits_of(trainer: "Trainer") -> str:
    """Describe versions and settings that affect the exact bits of results, and how changing them affects resuming."""
    numerics, is_bitwise = trainer.current_run.numerics, trainer.reproducible == "bitwise"
    names = [name for name in versions() if name not in NOT_REFUSED and numerics[name]]
    kernels = [str(numerics[name]) for name in ("cpu_capability", "device", "precision")]
    compiled = [f"compile {numerics['compile']}"] * bool(trainer.compile)
    settings = [f"{name}={numerics[name]}" for name in NUMERIC_VARIABLES if numerics[name] is not None]
    listed = [*(f"{name} {numerics[name]}" for name in names), *kernels, counted(numerics["threads"], "thread")]
    effect = "rejects differences" if is_bitwise else "lists differences; the process count affects rounding"
    return f"{', '.join([*listed, *compiled, *settings])}. With reproducible={trainer.reproducible}, resuming {effect}."


def _finite(count: int | float) -> int | None:
    return None if count == float("inf") else int(count)
