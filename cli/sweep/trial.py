"""One trial in a process of its own, started by `trials.py`.

It resumes what it had trained, and writes its result when it is done. It ends, with a checkpoint, when the sweep does:
its standard input is a pipe that nobody writes to, closed when the sweep's process is gone, however that ended.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...base.errors import ConfigError, LegatoError
from ...base.messages import STDERR
from ...callbacks.callback import Callback
from ...callbacks.monitor import Monitor
from ...trainer.processes.environment import set_variable
from ...trainer.processes.signals import exit_at_once, handling_end_signals
from ..config.build import build_config
from ..config.check import load_config
from .folder import CONFIG, LOCK, PLAN, RESULT, hold, write_json

if TYPE_CHECKING:
    from ...tasks.task import Task
    from ...trainer.trainer import Trainer


class Objective(Callback):
    """Keeps the best value of a metric, and shows the trial's values among the loggers' hyperparameters."""

    late = 1

    def __init__(self, monitor: str, mode: Literal["min", "max"], values: Mapping[str, Any]) -> None:
        self.monitor, self.values = monitor, dict(values)
        self._metric = Monitor(monitor, mode, "sweep")
        self.best: float | None = None
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its step."""
        return {"best": self.best, "step": self.step, "metric": self._metric.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore them."""
        self.best, self.step = state_dict["best"], state_dict["step"]
        self._metric.load_state_dict(state_dict["metric"])

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Give the loggers the values that are not among the task's own hyperparameters.

        Raises ConfigError where the run will end before the metric has a value.
        """
        if problem := self._metric.lacks_validation(trainer):
            raise ConfigError(problem)
        own = {f"task.{name}" for name in task.hparams}
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_hyperparams({name: value for name, value in self.values.items() if name not in own})

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Remember the metric's previous value."""
        self._metric.start_validation(trainer)

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Take the metric, if this validation logged it."""
        if self._metric.end_validation(trainer) and trainer.stage == "fit" and not trainer.sanity_checking:
            self._take(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Take the metric, if training logs it. Raises ConfigError if nothing logged it."""
        if self._metric.is_missing(trainer):
            self._metric.refuse(trainer)
        if trainer.state.epoch_ended and self._metric.is_from_training(trainer):
            self._take(trainer)

    def _take(self, trainer: "Trainer") -> None:
        value = self._metric.read(trainer)
        if value is not None and self._metric.is_better(value, self._metric.worst if self.best is None else self.best):
            self.best, self.step = value, trainer.global_step


def run_trial(folder: Path) -> None:
    """Train the trial in `folder` from where it is, and write its result."""
    plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    if "devices" in plan:  # read when CUDA starts
        set_variable("CUDA_VISIBLE_DEVICES", plan["devices"])
    with hold(folder / LOCK, wait=True):  # an earlier process may still be saving
        config = load_config([str(folder / CONFIG)])
        with handling_end_signals(exit_at_once):  # until fit installs its own handlers
            found = build_config(config)
            best = Objective(plan["metric"], plan["mode"], plan["values"])
            found.trainer.callbacks.append(best)
            found.trainer.fit(found.task, datamodule=found.data, resume="auto")
        if best.best is None:
            raise ConfigError(f"{best.monitor!r} was never logged as a finite number.")
        if found.trainer.is_global_zero:
            result = {"value": best.best, "step": best.step, "seconds": round(found.trainer.elapsed, 1)}
            write_json(
                folder / RESULT, {"state": "done", **result, "run": os.path.relpath(str(found.trainer.run_dir), folder)}
            )


def _end_with_parent() -> None:
    """Ask this process to end once its standard input is closed."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def enter_trial() -> int:
    """Run the trial that the command line names; return the exit code."""
    threading.Thread(target=_end_with_parent, name="legato-sweep", daemon=True).start()
    try:
        run_trial(Path(sys.argv[1]))
    except LegatoError as error:
        print("\n".join([f"legato: {error}", *getattr(error, "__notes__", [])]), file=STDERR, flush=True)
        return 1
    return 0
