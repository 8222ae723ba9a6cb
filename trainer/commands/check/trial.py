"""Trial: a short run of the real thing, on which a callback of every rank takes notes. What `legato check` goes by."""

import copy
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....callbacks.callback import Callback
from ....callbacks.checkpoint import Checkpoint
from ....callbacks.early_stopping import EarlyStopping
from ....callbacks.model_summary import ModelSummary
from ....callbacks.progress_bar import ProgressBar
from ... import loggers
from ...arguments import ARGUMENT_NAMES
from ...elastic.membership import Elasticity
from ...strategies.strategy import trainable
from ...trainer import Trainer

if TYPE_CHECKING:
    from ....tasks.task import Task

LEFT_OUT = (Checkpoint, EarlyStopping, ProgressBar, ModelSummary)
"""Callbacks that a trial does without: they would end it early, write elsewhere, or speak."""


@dataclass
class Notes:
    """What one rank saw."""

    rank: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of each step, its data included."""
    without_gradient: list[list[str]] = field(default_factory=list)
    """For each step the trainable parameters that got no gradient."""
    logged: list[str] | None = None
    """The metrics that there are when an epoch ends; None: none has ended."""
    plateaus: list[str] = field(default_factory=list)
    """The metrics that learning rate schedulers go by."""
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    host_bytes: int = 0
    """The most memory that the process had at once."""
    device_bytes: int | None = None
    """The most that tensors took on one of its devices at once; None on the CPU."""


MOST_STEPS, SECONDS = 20, 3.0
"""A trial of training goes on beyond its least steps until one of the two is reached: the first steps are slow."""


class NoteTaker(Callback):
    """Takes notes, writes them to the run directory after every step, and ends the run.

    That is after so many `steps`, and beyond them where more are wanted: after `most` steps or so many `seconds`.

    Notes are files and not gathered, so that those of a rank are there whatever becomes of the others.
    """

    late = 2

    def __init__(self, name: str, steps: int, most: int, seconds: float) -> None:
        self.name, self.steps, self.most, self.seconds = name, steps, most, seconds
        self.notes = Notes()
        self.names: dict[str, Any] = {}
        self.reached: set[str] = set()
        self.step = -1
        self.since = self.began = 0.0

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Begin anew."""
        self.notes, self.step = Notes(rank=trainer.global_rank), -1

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """See which parameters gradients reach: of all batches, and before any other rank's are added."""
        wanted = {id(parameter) for parameter in trainable(task)}
        for name, parameter in task.named_parameters():
            if id(parameter) in wanted:
                self.names[name] = parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._reach(name))

    def _reach(self, name: str) -> None:
        self.reached.add(name)

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Look at the clock."""
        self.since = time.monotonic()
        self.began = self.began or self.since

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Forget what came before the step, also where this rank had no batch in it."""
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            self.reached.clear()

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note a finished step."""
        if trainer.global_step == self.step:
            return
        for device in trainer.strategy.task_devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        now = time.monotonic()
        self.notes.seconds.append(now - self.since)
        self.notes.without_gradient.append([name for name in self.names if name not in self.reached])
        self.since = now
        self._write(trainer)
        done = len(self.notes.seconds)
        enough = done >= self.most or now - self.began >= self.seconds
        # nor to the end of an epoch, also not by the step of the resume: what belongs there is not due yet
        if done >= self.steps and (enough or trainer.state.epoch_steps + 2 >= trainer.steps_per_epoch):
            trainer.should_stop = True

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Look at the clock."""
        self.since = time.monotonic()

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Note what was logged, and how long the whole run would be."""
        notes = self.notes
        notes.logged = sorted(trainer.callback_metrics)
        notes.plateaus = [
            str(config.monitor) for config in trainer.lr_scheduler_configs if config.reduce_on_plateau and config.strict
        ]
        notes.total_steps = _finite(trainer.estimated_stepping_batches)
        notes.steps_per_epoch = _finite(trainer.steps_per_epoch)
        self._write(trainer)

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Let go of the parameters, and note the memory that all of it took."""
        for handle in self.names.values():
            handle.remove()
        self.names = {}
        if stage == "fit":
            self._write(trainer)

    def _write(self, trainer: "Trainer") -> None:
        notes = self.notes
        notes.host_bytes = peak_memory()
        peaks = [torch.cuda.max_memory_allocated(one) for one in trainer.strategy.task_devices if one.type == "cuda"]
        notes.device_bytes = max(peaks, default=None)
        assert trainer.run_dir is not None
        path = trainer.run_dir / f"{self.name}-{notes.rank}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(notes)))
        partial.replace(path)


def read_notes(room: Path, name: str) -> list[Notes]:
    """Return the notes that ranks took in the trial of this name, by rank."""
    found = (Notes(**json.loads(path.read_text())) for path in room.glob(f"{name}-*.json"))
    return sorted(found, key=lambda notes: notes.rank)


def make_trial(
    original: Trainer,
    name: str,
    steps: int,
    room: Path | None,
    processes: int,
    find_unused: bool = False,
    warm: bool = False,
) -> Trainer:
    """Return a trainer that does what `original` would, for so many steps with a validation after each, in `room`.

    `warm`: for some more steps, from which one can tell how long a step takes.

    `name` is what its notes go by. Of each evaluation loader every replica takes one batch. Learning rate schedules
    see the length of the whole run. With `find_unused` a parameter without gradient ends no run under ddp.
    """
    arguments = {argument: getattr(original, argument) for argument in ARGUMENT_NAMES}
    batches = original.replicas or processes
    for argument in ("limit_val_batches", "limit_test_batches", "limit_predict_batches"):
        limit = arguments[argument]
        arguments[argument] = min(limit, batches) if isinstance(limit, int) else batches if limit else 0
    watching = [callback for callback in original.callbacks if not isinstance(callback, LEFT_OUT)]
    saving = [Checkpoint(every_n_epochs=0)] if original.checkpoint_callback is not None else []
    strategy: Any = copy.copy(original.strategy)
    elastic, strategy.elastic = strategy.elastic, Elasticity()  # no process leaves or joins a trial
    if find_unused or elastic.changes:
        strategy.module_options = {**strategy.module_options, "find_unused_parameters": True}
    arguments |= {
        "strategy": strategy,
        "callbacks": [NoteTaker(name, steps, max(steps, MOST_STEPS if warm else 0), SECONDS), *watching, *saving],
        "logger": own_loggers(original) or False,
        "enable_checkpointing": bool(saving),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "fast_dev_run": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": min(1, abs(original.num_sanity_val_steps)),
        "val_check_interval": 1,
        "check_val_every_n_epoch": None,
        "min_steps": None,
        "min_epochs": None,
        "max_restarts": 0,
    }
    trainer = Trainer(**arguments)
    trainer.given_dir = trainer.run_dir = room
    trainer.config_text = original.config_text
    return trainer


def own_loggers(trainer: Trainer) -> list[Any]:
    """Return the loggers that write to the run directory only, as far as one can know: Legato's."""
    return [logger for logger in trainer.loggers if type(logger).__module__.startswith(f"{loggers.__name__}.")]


def needs_every_gradient(trainer: Trainer) -> bool:
    """Return whether the strategy ends the run where a step gives a parameter no gradient on some rank."""
    options = getattr(trainer.strategy, "module_options", None)
    if options is None or options["find_unused_parameters"] or options["static_graph"]:
        return False
    return trainer.reproducible != "bitwise" and not trainer.strategy.elastic.changes


def peak_memory() -> int:
    """Return the most bytes of memory that this process had at once."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _finite(count: int | float) -> int | None:
    return None if count == float("inf") else int(count)
