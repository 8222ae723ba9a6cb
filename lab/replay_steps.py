"""Replays steps of a run: recomputes them from the newest earlier checkpoint and compares the logged values.

A function creates a new trainer, task and data for the replay, so the replay cannot change the caller's objects.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.arguments import read_strategy
from ..base.errors import ConfigError, DataError, LegatoError
from ..base.location import Address, location_of
from ..base.messages import STDOUT
from ..base.quantities import counted
from ..base.run_names import REPLAY
from ..callbacks.callback import Callback
from ..callbacks.checkpoint_callback import CheckpointCallback
from ..callbacks.device_stats_monitor import DeviceStatsMonitor
from ..callbacks.model_summary import ModelSummary
from ..callbacks.progress_bar import ProgressDisplay
from ..callbacks.throughput_monitor import ThroughputMonitor
from ..callbacks.timer import Timer
from ..loggers.json_lines import POINTS_FILE, JSONLinesLogger
from ..loggers.tensorboard import TensorBoardLogger
from ..trainer.runs.directory import ROOT
from .history import CheckpointRecord, RunHistory
from .straggler_monitor import StragglerMonitor
from .watchers import STEPS_FILE, SameData

log = logging.getLogger("legato")

Make = Callable[[], Sequence[Any]]
"""Function that returns a new trainer, followed by a new task and data in the order of `trainer.fit`'s arguments."""
NOT_REPLAYED = (
    *(CheckpointCallback, ProgressDisplay, ModelSummary),
    # these callbacks log times, which differ in each run, so the comparison would fail
    *(ThroughputMonitor, DeviceStatsMonitor, StragglerMonitor, Timer),
)
"""Callbacks that only write files, show progress or measure time, and do not affect the result of a step."""
# float32 has 7 digits; training loses some of them over the steps between checkpoints
SAME_BUT_ROUNDING = 1e-3
"""Largest relative difference at which two values are considered equal up to rounding."""


def new_directory(run: Path, mark: str = REPLAY) -> Path:
    """Create and return a directory for a replay next to the run directory, such as version_3.replay-0.

    Raises ConfigError if it cannot be created.
    """
    # next to the run directory, which stays unchanged, so that TensorBoard shows both
    place, number = location_of(run), 0
    # a run in an object store has only copies on this machine
    run = (Path(ROOT, place.parent.name, place.name) if isinstance(place, Address) else run).absolute()
    while True:
        path = run.with_name(f"{run.name}{mark}{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(f"{path} cannot be created: {error.strerror}.") from error
        else:
            return path


@dataclass
class Replayed:
    """A finished replay. Its `proof` compares the values logged by the replay with those logged by the original run."""

    history: RunHistory
    source: CheckpointRecord | None
    """The checkpoint that the replay started from, or None if it started from the beginning of the run."""
    last: int
    """The last step to compare."""
    directory: Path
    to_the_bit: bool
    """True if the replay must be bitwise identical to the run."""
    why: str
    """Why `to_the_bit` is true or false."""

    def __post_init__(self) -> None:
        self.compared_steps = self.values = self.differing = 0
        self.largest = 0.0
        """Largest relative difference."""
        self.first_difference = ""
        for point in sorted(read_lines(self.directory / POINTS_FILE), key=lambda point: point["step"]):
            step = point["step"]
            # the replay may log steps after `last`, from which the run may have been resumed
            was = self.history.points.get(step, {}) if self.first <= step <= self.last else {}
            names = [name for name in point if name in was and name not in ("step", "time")]
            self.compared_steps += bool(names)
            self.values += len(names)
            for name in (name for name in names if was[name] != point[name]):
                self.differing += 1
                self.largest = max(self.largest, relative_difference(float(was[name]), float(point[name])))
                values = f"{was[name]!r} in the run, {point[name]!r} now"
                self.first_difference = self.first_difference or f"{name!r} of step {step}: {values}"

    @property
    def first(self) -> int:
        """The first recomputed step, which may precede the requested steps."""
        return 1 if self.source is None else self.source.step + 1

    @property
    def holds(self) -> bool:
        """True if the replay matches the run: bitwise, or up to rounding if `to_the_bit` is False."""
        return not self.differing or (not self.to_the_bit and self.largest <= SAME_BUT_ROUNDING)

    def steps(self) -> list[dict[str, Any]]:
        """Return one record per requested step: loss, gradient norms and learning rates."""
        return read_lines(self.directory / STEPS_FILE)

    def describe(self) -> str:
        """Return the comparison as a sentence."""
        compared = f"{counted(self.values, 'value')} of {counted(self.compared_steps, 'step')}"
        if not self.values:
            return "Proof       none: the run logged no values in these steps"
        if not self.differing:
            return f"Proof       {compared} in metrics.jsonl are bitwise identical"
        if self.holds:
            rounding = f"largest relative difference {self.largest:.1e}; {self.why}"
            return f"Proof       {compared} in metrics.jsonl are equal up to rounding ({rounding})"
        difference = f"the first that differs is {self.first_difference}"
        return f"{self.differing} of {compared} differ by up to {self.largest:.1e}; {difference}"

    def conclude(self) -> None:
        """Print the proof. Raises LegatoError if the replay does not match the run."""
        if self.holds:
            print(self.describe(), file=STDOUT, flush=True)
            return
        expected = f"must be bitwise identical ({self.why})" if self.to_the_bit else "may differ only by rounding"
        raise LegatoError(
            f"The replay differs from the run: {self.describe()}. These values {expected}, so the code, data, versions "
            f"or hardware have changed since the run."
        )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records in a file with one JSON object per line, or an empty list if the file does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def relative_difference(first: float, second: float) -> float:
    """Return |one - other| / max(|one|, |other|), or infinity if either is not finite."""
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.inf
    # differences below 1e-8 are rounding, and two zeros must not cause a division by zero
    return abs(first - second) / max(abs(first), abs(second), 1e-8)


def check_steps(first: int, last: int) -> None:
    """Raise ConfigError unless 1 <= first <= last."""
    if not (isinstance(first, int) and isinstance(last, int) and 1 <= first <= last):
        raise ConfigError(f"Expected 1 <= first step <= last step, got {first!r} to {last!r}.")


def replay_steps(
    history: RunHistory,
    made: Sequence[Any],
    steps: tuple[int, int],
    directory: Path,
    watchers: Sequence[Callback],
    every_step: bool = True,
) -> Replayed:
    """Train from the newest checkpoint before the first step. A watcher must stop training after the last step.

    Args:
        made: New trainer, task and data.
        directory: The only folder that the replay writes to.
        every_step: Log every step, rather than only the steps that the run logged.

    Raises DataError if the run ends before the last step.
    """
    trainer, task, *data = made
    first, last = steps
    source, near = history.before(first), history.near(first)
    # the low-order bits of some sums depend on the number of threads, and this machine may have fewer or more cores
    if trainer.threads is None and near is not None:
        trainer.threads = near.threads
    # the default is the number of processes, which may differ here
    if source is None and trainer.replicas is None:
        trainer.replicas = int(history.start_of(first)[1]["replicas"])
    begin = f"checkpoint of step {source.step:,}" if source else "start of the run, as there is no earlier checkpoint,"
    log.info(
        "The replay starts from the %s and computes %s.", begin, counted(last - (source.step if source else 0), "step")
    )
    trainer.assigned_dir = directory
    # the run's own loggers would write to the run's files or to a server
    trainer.loggers = [TensorBoardLogger(), JSONLinesLogger()]
    # each logged step gives more values to compare; the sanity check affects none of them
    trainer.log_every_n_steps, trainer.num_sanity_val_steps = 1 if every_step else trainer.log_every_n_steps, 0
    # a failed replay must not be restarted
    trainer.max_restarts, trainer.requeue = 0, False
    # only a watcher may end the replay
    trainer.min_steps = trainer.min_epochs = trainer.max_time = None
    content = next((record.content for record in history.checkpoints if record.content), {})
    # resuming compares the environment with the checkpoint's; starting from step 0 does not
    environment = {} if source else history.start_of(first)[1].get("environment")
    trainer.callbacks = [*without_recorders(trainer.callbacks), *watchers, SameData(content, environment)]
    # the task adds its callbacks when training starts, after the list was filtered
    configure = task.configure_callbacks
    task.__dict__["configure_callbacks"] = lambda: without_recorders(configure())
    if source is None:
        trainer.fit(task, *data)
    else:
        trainer.fit(task, *data[:3], resume=source.path)  # a fourth item is the checkpoint of a first launch
    if trainer.global_step < last:
        raise DataError(f"The replay ended after step {trainer.global_step}, because the run has no step {last}.")
    return Replayed(history, source, last, directory, *sameness(history, steps, trainer))


def on_processes(processes: int, trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return Trainer arguments for repeating the run's computation on `processes` local processes.

    Multiple processes use the run's strategy or, if it supports only one process, ddp.
    """
    name, options = read_strategy(trainer)
    devices = options.get("devices_per_replica", 2) if name == "ddp_model_parallel" else 1
    settings = {"devices": processes * devices, "num_nodes": 1, "cluster": "off"}
    if processes > 1:
        alone = name in ("single", "auto", "data_parallel")
        return {**settings, **({"strategy": "ddp"} if alone else {})}
    # splitting a batch or a layer changes bits, so one process splits them as the run's processes did
    if name == "data_parallel":
        return {**settings, "devices": trainer["devices"]}
    if options.get("tensor_shards"):
        axes = dict.fromkeys({"data", "shard", "tensor"} & options.keys(), 1)
        return {**settings, "strategy": {"name": name, **options, **axes}}
    if options.get("micro_batches", 1) != 1:
        return {**settings, "strategy": {"name": name, **options}}
    return {**settings, "devices": 1, "strategy": "single"}


def processes_of(trainer: Any) -> int:
    """Return the number of processes that train, excluding ddp_rpc's servers."""
    devices = trainer.device_list
    return int(min(trainer.strategy.local_processes(devices), len(devices)) * trainer.num_nodes)


def without_recorders(callbacks: Any) -> list[Callback]:
    """Return the callbacks that may affect the result of a step."""
    # configure_callbacks may return a single callback
    callbacks = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    return [callback for callback in callbacks if not isinstance(callback, NOT_REPLAYED)]


def sameness(history: RunHistory, steps: tuple[int, int], trainer: Any) -> tuple[bool, str]:
    """Return whether a replay of the steps must be bitwise identical to the run, and why."""
    starts: list[Mapping[str, Any]] = [history.start_of(step)[1] for step in steps]
    reproducible = {start.get("reproducible") for start in starts}
    before = {start.get("processes") or 0 for start in starts}
    after = processes_of(trainer)
    # bitwise promises the same bits on any number of processes, order the same samples
    if reproducible == {"bitwise"} == {trainer.reproducible}:
        return True, "reproducible=bitwise"
    if "off" in reproducible:
        return False, "reproducible=off, so random numbers depend on the processes"
    if trainer.strategy.elastic:
        return False, "reproducible=order in an elastic run, whose processes may have changed"
    if before == {after} and (after == 1 or {start.get("strategy") for start in starts} == {trainer.strategy.name}):
        return True, "the run also had one process" if after == 1 else f"the run also had {after} processes"
    counts = " and ".join(map(str, sorted(before)))
    return False, f"reproducible=order, with {counts} processes in the run and {after} in the replay"
