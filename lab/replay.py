"""`legato replay`: computes steps of a run again, from the newest checkpoint before them, and proves that it did."""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError, DataError, LegatoError
from ..base.messages import STDOUT
from ..base.quantities import counted, time_taken
from ..base.run_names import REPLAY
from ..callbacks.callback import Callback
from ..callbacks.checkpoint_callback import CheckpointCallback
from ..callbacks.device_stats_monitor import DeviceStatsMonitor
from ..callbacks.progress_bar import ProgressDisplay
from ..callbacks.throughput_monitor import ThroughputMonitor
from ..callbacks.timer import Timer
from ..cli.config.build import build_config
from ..cli.config.read import read_strategy
from ..loggers.json_lines import POINTS_FILE, JSONLinesLogger
from ..loggers.tensorboard import TensorBoardLogger
from ..trainer.runs.directory import is_run
from .history import RunHistory
from .straggler_monitor import StragglerMonitor
from .unstarted import processes_of
from .watchers import STEPS_FILE, ReplayBar, StepReport, StopAfterStep

if TYPE_CHECKING:
    from ..cli.config.check import Config
    from ..tasks.task import Task
    from ..trainer.trainer import Trainer
    from .history import CheckpointRecord

log = logging.getLogger("legato")

NOT_REPLAYED = (CheckpointCallback, ProgressDisplay, ThroughputMonitor, DeviceStatsMonitor, StragglerMonitor, Timer)
"""Callbacks that write files, show progress or measure time: they have no part in what a step comes to."""
REPLACED = (
    *("devices", "num_nodes", "strategy", "cluster", "replicas", "requeue", "max_restarts"),
    *("min_steps", "min_epochs", "max_time"),
)
"""Arguments of Trainer that a replay, on one process and with an end of its own, replaces."""
SAME_BUT_ROUNDING = 1e-3
"""Relative difference up to which two values are called the same but for rounding."""


def new_directory(run: Path) -> Path:
    """Make and return a directory for a replay beside that of the run: version_3.replay-0.

    Raises ConfigError if that cannot be written to.
    """
    number = 0
    while True:
        path = run.absolute().with_name(f"{run.absolute().name}{REPLAY}{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(f"{path} cannot be made: {error.strerror}.") from error
        else:
            return path


def require_outside(folder: Path) -> None:
    """Raise ConfigError for a folder inside of a run directory, whose files a replay would replace."""
    inside = next((path for path in (folder.resolve(), *folder.resolve().parents) if is_run(path)), None)
    if inside is not None:
        raise ConfigError(
            f"save={folder} is inside of the run directory {inside}, which a replay does not change. Name a folder "
            f"elsewhere, or leave save= out."
        )


@dataclass(frozen=True)
class Replayed:
    """A replay that was done."""

    history: RunHistory
    source: "CheckpointRecord | None"
    """The checkpoint that it began from; None: the start of the run."""
    first: int
    """The first step that was computed, which may be before those asked for."""
    last: int
    """The last step that is what the run did."""
    directory: Path
    to_the_bit: bool
    """Whether it must have the same bits as the run."""
    why: str
    """Why, or why not."""

    def steps(self) -> list[dict[str, Any]]:
        """Return what each step that was asked for came to."""
        path = self.directory / STEPS_FILE
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def comparison(self) -> "Comparison":
        """Compare the points of the replay with those of the run."""
        path = self.directory / POINTS_FILE
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return compare_points(self, {record["step"]: record for record in found})


@dataclass
class Comparison:
    """The values that a replay has logged, beside those of the run."""

    replayed: Replayed
    steps: int = 0
    values: int = 0
    equal: int = 0
    largest: float = 0.0
    """The largest relative difference."""
    first: tuple[int, str, Any, Any] | None = None
    """Step and name of the first difference, with the run's value and the replay's."""

    def describe(self) -> str:
        """Return the comparison as a sentence."""
        what = f"{counted(self.values, 'value')} of {counted(self.steps, 'step')}"
        why = self.replayed.why
        if not self.values:
            return "Proof       none: the run has logged nothing in these steps"
        if self.first is None:
            return f"Proof       {what} in metrics.jsonl are equal to the bit"
        step, name, was, now = self.first
        told = f"the first that differs is {name!r} of step {step}: {was!r} in the run, {now!r} now"
        if self.largest <= SAME_BUT_ROUNDING and not self.replayed.to_the_bit:
            rounding = f"largest relative difference {self.largest:.1e}"
            return f"Proof       {what} in metrics.jsonl are equal but for rounding ({rounding}; {why})"
        return f"{self.values - self.equal} of {what} differ by up to {self.largest:.1e}; {told}"

    @property
    def holds(self) -> bool:
        """Whether the replay is what the run did."""
        return self.first is None or (not self.replayed.to_the_bit and self.largest <= SAME_BUT_ROUNDING)


def conclude(comparison: Comparison) -> None:
    """Print the proof, or raise LegatoError where the replay is not what the run did."""
    if comparison.holds:
        print(comparison.describe(), file=STDOUT, flush=True)
        return
    raise LegatoError(
        f"The replay is not what the run did: {comparison.describe()}. The bits were to be the same "
        f"({comparison.replayed.why}); code, data, versions or hardware have changed since."
        if comparison.replayed.to_the_bit
        else f"The replay is not what the run did: {comparison.describe()}, which is more than rounding."
    )


def compare_points(replayed: Replayed, points: Mapping[int, Mapping[str, Any]]) -> Comparison:
    """Compare points with those of the run, under the names that both have."""
    found = Comparison(replayed)
    for step in sorted(points):
        was = replayed.history.points.get(step, {}) if replayed.first <= step <= replayed.last else {}
        names = [name for name in points[step] if name in was and name not in ("step", "time")]
        found.steps += bool(names)
        for name in names:
            one, other = was[name], points[step][name]
            found.values += 1
            if one == other:
                found.equal += 1
                continue
            found.first = found.first or (step, name, one, other)
            found.largest = max(found.largest, relative_difference(float(one), float(other)))
    return found


def relative_difference(one: float, other: float) -> float:
    """Return |a - b| / max(|a|, |b|); infinity where only one of them is finite."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other), 1e-8)


def replay_steps(
    history: RunHistory,
    first: int,
    last: int,
    directory: Path,
    watchers: Sequence[Callback],
    overrides: Sequence[str] = (),
    every_step: bool = False,
) -> Replayed:
    """Compute the steps up to `last` again, from the newest checkpoint before `first`, and write to `directory` alone.

    every_step: log every step, and not only those that the run has logged.

    Raises ConfigError where the run was resumed with another config between the two.
    """
    source = history.before(first)
    begun = source.step if source else 0
    require_same_config(history, begun, last)
    config = replay_config(history, first, overrides, every_step)
    run = build_config(config)
    tell_length(history, begun, last, source is not None)
    resume: Any = config.values["resume"]
    fit = partial(run.trainer.fit, run.task, datamodule=run.data, resume=None if resume == "auto" else resume)
    fit_again(history, run.trainer, run.task, fit, (first, last), directory, [ReplayBar(begun, last), *watchers])
    return Replayed(history, source, begun + 1, last, directory, *sameness(history, (first, last), config))


def require_same_config(history: RunHistory, begun: int, last: int) -> None:
    """Raise ConfigError where a start within these steps had a config by which they come to something else."""
    ends = {one.step for one in history.checkpoints} | {int(one.get("step", 0)) for one in history.starts}
    changed = next((step for step in sorted(ends) if begun < step < last and differs_after(history, step)), None)
    if changed is None:
        return
    kept = next((one.step for one in history.checkpoints if one.step >= changed), None)
    onwards = "" if kept is None else f", and step={kept + 1}"
    raise ConfigError(
        f"The run was resumed with another config after step {changed}. Replay up to there, and from there on: "
        f"until={changed}{onwards}."
    )


def tell_length(history: RunHistory, begun: int, last: int, has_source: bool) -> None:
    """Log where a replay begins, how many steps it takes, and about how long, as the run has logged them."""
    times = [(step, float(point["time"])) for step, point in sorted(history.points.items()) if "time" in point]
    steps, seconds = last - begun, None
    if len(times) > 1 and times[-1][0] > times[0][0]:
        seconds = (times[-1][1] - times[0][1]) / (times[-1][0] - times[0][0]) * steps
    about = "" if seconds is None else f", for which the run took about {time_taken(seconds)}"
    where = f"the checkpoint of step {begun:,}" if has_source else "the start of the run: no checkpoint before is left"
    log.info("The replay begins at %s; %s%s.", where, counted(steps, "step"), about)


def fit_again(
    history: RunHistory,
    trainer: "Trainer",
    task: "Task",
    fit: Callable[..., None],
    steps: tuple[int, int],
    directory: Path,
    callbacks: Sequence[Callback],
) -> None:
    """Train from the newest checkpoint before the first of some steps, where the callbacks stop it at the last.

    Raises DataError where the run has no such step.
    """
    source = history.before(steps[0])
    trainer.given_dir = directory
    trainer.min_steps = trainer.min_epochs = None
    trainer.max_time = None
    trainer.callbacks = [*without_recorders(trainer.callbacks), *callbacks]
    configure = task.configure_callbacks
    task.__dict__["configure_callbacks"] = lambda: without_recorders(configure())
    fit(**({} if source is None else {"resume": source.path}))
    if trainer.global_step < steps[1]:
        raise DataError(f"The replay ended after step {trainer.global_step}, before step {steps[1]}: the run has none.")


def replay(run: str | Path, make: Callable[[], Sequence[Any]], *, step: int, until: int | None = None) -> Replayed:
    """Compute steps of a run of one's own script again; the run itself stays as it is.

    `make` makes trainer, task and data as the script made them for the run, and returns them as `trainer.fit` takes
    them: `(trainer, task, loader)`, with a validation loader and a data module after it. They are the replay's own; one
    process will do (`devices=1`), whatever the run had. Training begins at the newest checkpoint before `step`, without
    loggers and callbacks that write, and stops after `until`, by default `step`. What is logged is compared with the
    run's metrics.jsonl, and the result printed. Returns the replay, whose `steps()` has loss, gradient norms by module
    and learning rates of each step.

    Raises ConfigError where `make` does not return a new trainer and a task, and LegatoError where the replay is not
    what the run did.
    """
    made = make() if callable(make) else None
    if not isinstance(made, Sequence) or len(made) < 2 or getattr(made[0], "run", made) is not None:
        came = "one that returned other things, or a trainer that has run" if callable(make) else type(make).__name__
        raise ConfigError(
            f"legato.replay takes a function that makes a new trainer, the task and the data; got {came}. Write "
            f"legato.replay(run, make, step=N), where make() returns (trainer, task, loader)."
        )
    trainer, task, *data = made
    last = step if until is None else until
    folders = [Path(one.dirpath) for one in trainer.checkpoint_callbacks if one.dirpath is not None]
    history = RunHistory(Path(run), folders)
    if not 1 <= step <= last <= history.last_step:
        raise ConfigError(
            f"Steps {step} to {last} of {run}: they count from 1, the last one is not before the first, and the newest "
            f"that is known of this run is {history.last_step}."
        )
    source, directory = history.before(step), new_directory(history.directory)
    if source is None and trainer.replicas is None and history.checkpoints:
        trainer.replicas = history.checkpoints[0].state.replicas
    trainer.loggers = [TensorBoardLogger(), JSONLinesLogger()]
    trainer.log_every_n_steps, trainer.num_sanity_val_steps = 1, 0
    trainer.max_restarts, trainer.requeue = 0, False
    watchers: list[Callback] = [StepReport(step, last), StopAfterStep(last)]
    fit = partial(trainer.fit, task, *data)
    fit_again(history, trainer, task, fit, (step, last), directory, watchers)
    bitwise, begun = trainer.reproducible == "bitwise", source.step if source else 0
    why = f"reproducible: {trainer.reproducible}"
    replayed = Replayed(history, source, begun + 1, last, directory, bitwise, why)
    conclude(replayed.comparison())
    return replayed


def differs_after(history: RunHistory, step: int) -> bool:
    """Return whether the step after this one was done with a config by which it comes to something else."""
    before, after = step, step + 1
    if history.config_text(before) == history.config_text(after):
        return False
    return bool(deciding_values(history, before) != deciding_values(history, after))


def deciding_values(history: RunHistory, step: int) -> dict[str, Any]:
    """Return what decides in the config of a step: not where the run is, nor on how many processes."""
    values = history.config_of(step).values
    found = {name: values.get(name) for name in ("seed", "task", "data", "callbacks")}
    names = () if values["trainer"]["sync_batchnorm"] else REPLACED
    return found | {"trainer": {name: one for name, one in values["trainer"].items() if name not in names}}


def without_recorders(callbacks: Any) -> list[Callback]:
    """Return the callbacks that may have a part in what a step comes to."""
    given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    return [one for one in given if not isinstance(one, NOT_REPLAYED)]


def replay_config(history: RunHistory, step: int, overrides: Sequence[str], every_step: bool) -> "Config":
    """Return the config of a step, for one process that writes nothing but points of its own."""
    config = history.config_of(step, overrides)
    values, record = deepcopy(config.values), history.before(step)
    trainer, known = values["trainer"], history.after(step) or record
    settings: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_restarts": 0,
        "requeue": False,
        "replicas": replicas_of(history, step) if record is None else None,
    }
    if not trainer["sync_batchnorm"]:  # takes a process for each replica, as manual optimization does
        settings |= one_process(trainer)
    threads = known.numerics.get("threads") if known is not None else None
    if trainer["threads"] is None and isinstance(threads, int):
        settings["threads"] = threads
    if every_step:
        settings["log_every_n_steps"] = 1
    words = [key for key, origin in config.origins.items() if origin.startswith("override")]
    set_now = {key[1] for key in words if len(key) > 1 and key[0] == "trainer"}
    trainer |= {name: one for name, one in settings.items() if name not in set_now}
    values.pop("loggers", None)
    values.pop("launcher", None)
    return replace(config, values=values)


def one_process(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of Trainer for one process that computes what those of the run have computed."""
    name, options = read_strategy(trainer)
    found = {"devices": 1, "num_nodes": 1, "strategy": "single", "cluster": "off"}
    if name != "ddp_model_parallel" or options.get("micro_batches", 1) == 1:
        return found
    # pieces of a batch have other bits than the batch: one process cuts it as each process of the run did
    count, own = options.get("devices_per_replica"), options.get("part_devices")
    if own:
        options["part_devices"] = own[:count]
    return {**found, "devices": count or 2, "strategy": {"name": name, **options}}


def replicas_of(history: RunHistory, step: int) -> int:
    """Return the replicas of a run, by its checkpoints or, where there is none, by its config."""
    record, config = history.after(step) or history.before(step), history.config_of(step)
    if record is not None:
        return record.state.replicas
    asked: int | None = config.values["trainer"]["replicas"]
    return processes_of(config.values["trainer"])[1].batches if asked is None else asked


def sameness(history: RunHistory, steps: tuple[int, int], config: "Config") -> tuple[bool, str]:
    """Return whether a replay of steps, the first and the last, must have the bits of the run, and why."""
    ran = [history.config_of(step).values["trainer"] for step in steps]
    was, now = max(ran, key=lambda trainer: processes_of(trainer)[0]), config.values["trainer"]
    if was["reproducible"] == "bitwise" == now["reproducible"]:
        return True, "reproducible: bitwise"
    before, after = processes_of(was)[0], processes_of(now)[0]
    if was["reproducible"] == "off":
        return False, "reproducible: off, whose random numbers depend on the processes"
    if before == after == 1:
        return True, "the run had one process, too"
    return False, f"the run had {before} processes, the replay {after}, and reproducible: order"
