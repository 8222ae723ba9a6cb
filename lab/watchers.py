"""Callbacks that report, save or debug a step of a replay, or stop the replay after it."""

import json
import logging
import pdb
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..base.errors import DataError
from ..base.tensors import local_part
from ..callbacks.callback import Callback, MonitoringCallback
from ..callbacks.checkpoint_callback import CheckpointCallback
from ..trainer.optimization.optimizers import optimizer_parameters
from ..trainer.state import State
from ..trainer.switches import environment
from .origin import changed_values

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..tasks.task import Task
    from ..trainer.trainer import Trainer

log = logging.getLogger("legato")

STEPS_FILE = "steps.jsonl"
"""File in a replay's directory with one line per requested step."""


class SameData(Callback):
    """Ends a replay before its first step if the data has changed, and warns if the environment has changed."""

    def __init__(self, content: Mapping[str, Any], environment: Mapping[str, Any] | None) -> None:
        self.content, self.environment = content, environment

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Compare the environment and the data."""
        if trainer.is_global_zero and (changes := changed_values(self.environment, environment())):
            log.warning("The environment differs from the run's: %s. Results may differ.", changes)
        changed = trainer.current_run.training_data.changed_content(self.content) if trainer.is_global_zero else []
        if changed:
            names = " ".join(["", *filter(None, changed)])
            raise DataError(
                f"The replay differs from the run: the samples in the dataset{names} have changed. Replay with the "
                f"original data."
            )


class StepReport(MonitoringCallback):
    """Writes the loss, gradient norms by module and learning rates for steps `first` to `last`.

    Gradient norms are for the complete step, before clipping. The loss is the mean over the step's batches.
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._losses: list[tuple[torch.Tensor, Any]] = []
        self._gradients: dict[str, list[torch.Tensor]] = {}
        self._rates: list[float] = []

    def _is_asked(self, trainer: "Trainer") -> bool:
        return self.first <= trainer.global_step + 1 <= self.last

    def on_before_backward(self, trainer: "Trainer", task: "Task", loss: torch.Tensor) -> None:
        """Record the loss of a batch."""
        if self._is_asked(trainer):
            # if the task weights its batches, for example by tokens, the step's mean uses those weights
            weights = trainer.current_run.optimization.weights
            self._losses.append((loss.detach(), trainer.metrics.samples if weights.used is False else weights.newest))

    def on_before_optimizer_step(self, trainer: "Trainer", task: "Task", optimizer: "Optimizer") -> None:
        """Record the gradient norms and learning rates."""
        if not self._is_asked(trainer):
            return
        for name, gradient in gradients_of(task, optimizer):
            # in float32: a sum of squares in bfloat16 or float16 would overflow or lose digits
            norm = torch.linalg.vector_norm(local_part(gradient).detach().float())
            self._gradients.setdefault(name.rpartition(".")[0], []).append(norm)
        self._rates += [float(group["lr"]) for group in optimizer.param_groups]

    def on_step_end(self, trainer: "Trainer", task: "Task") -> None:
        """Write the record of the step."""
        if not (self._losses or self._gradients):
            return
        step = trainer.global_step
        total = sum(float(weight) for _, weight in self._losses)
        loss = sum(float(loss) * float(weight) for loss, weight in self._losses) / total if total else None
        norms = {name: float(torch.stack(parts).norm()) for name, parts in self._gradients.items()}
        norm = sum(norm * norm for norm in norms.values()) ** 0.5
        record = {"step": step, "loss": loss, "gradient_norm": norm, "learning_rates": self._rates, "modules": norms}
        if trainer.is_global_zero and trainer.run_dir is not None:
            with (trainer.run_dir / STEPS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        self._losses, self._gradients, self._rates = [], {}, []


def gradients_of(task: "Task", optimizer: "Optimizer") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and gradient of each parameter that an optimizer updates."""
    # several optimizers report their own parameters, once each
    stepped = set(map(id, optimizer_parameters(optimizer)))
    for name, parameter in task.named_parameters():
        if id(parameter) in stepped and parameter.grad is not None:
            yield name, parameter.grad


class StopAfterStep(MonitoringCallback):
    """Ends training after a step and, unless `save` is None, saves a checkpoint at that point."""

    def __init__(self, step: int, save: Path | None = None) -> None:
        self.step, self.save = step, save

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop when the step is complete."""
        if trainer.global_step < self.step or trainer.metrics.step == trainer.global_step:
            return
        # only once: batches that run after the stop must not save again
        if self.save is not None and trainer.global_step == self.step and not trainer.should_stop:
            trainer.save_checkpoint(self.save)
        trainer.should_stop = True


class SaveAs(CheckpointCallback):
    """Saves to `path` and ends training when the loop state matches a checkpoint's.

    A run may save after a step, after validation, or at the end of an epoch. The loop state distinguishes those cases.
    """

    CLOCKS = ("elapsed", "logged_at")
    """Fields that depend on when a run started and, because a run always logs its last step, on when it ended."""

    def __init__(self, state: State, path: Path) -> None:
        self.state, self.path = state, path
        self.is_saved = self.is_same = False

    def look(self, trainer: "Trainer", task: "Task | None" = None) -> None:
        """Save and stop at the point in the loop where the checkpoint was saved."""
        # in the middle of the next step, the counts are still this step's
        is_within = trainer.metrics.step == trainer.global_step
        if self.is_same or is_within or trainer.global_step < self.state.global_step:
            return
        clocks = {name: getattr(self.state, name) for name in self.CLOCKS}
        self.is_same = trainer.state.to_dict() | clocks == self.state.to_dict()
        # if no state is equal, the first saved state shows what differs
        if self.is_same or not self.is_saved:
            self.is_saved = True
            trainer.save_checkpoint(self.path)
        # not earlier, since a run that stops ends its epoch differently
        trainer.should_stop |= self.is_same or trainer.global_step > self.state.global_step

    on_validation_start = on_validation_end = on_train_epoch_start = on_train_epoch_end = look
    on_train_end = save_cut_epoch = look

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save and stop at the point in the loop where the checkpoint was saved."""
        self.look(trainer)


class DebugStep(Callback):
    """Opens the debugger at the first line of training_step for all batches of a step, or for only one replica's."""

    def __init__(self, step: int, replica: int | None = None) -> None:
        self.step, self.replica = step, replica

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Run this call to training_step in the debugger."""
        if trainer.global_step + 1 != self.step or self.replica not in (None, trainer.metrics.replica):
            return
        training_step: Callable[..., Any] = task.training_step

        def debugged(*arguments: Any) -> Any:
            # removed first, so that nested calls and errors reach the class's method
            del task.__dict__["training_step"]
            # nosigint: Legato's handler keeps Ctrl-C, which ends the run
            return pdb.Pdb(nosigint=True).runcall(training_step, *arguments)

        task.__dict__["training_step"] = debugged
