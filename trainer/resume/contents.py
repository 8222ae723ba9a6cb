"""Collects the contents of a run's checkpoint."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...base.errors import ConfigError, TaskError
from ...tasks.hyperparameters import built_hyperparameters
from ..checkpoints import reading
from ..runs import places
from . import fingerprint
from .fingerprint import below
from .left_out import BUILT, LEFT_OUT, split_hyperparameters
from .parameter_names import named

if TYPE_CHECKING:
    from ...base.contracts import Callback, Trainer
    from ...tasks.hyperparameters import Hyperparameters


def contents(trainer: "Trainer", weights_only: bool) -> dict[str, Any]:
    """Return the contents for a checkpoint of the current state. All ranks must call this."""
    run = trainer.current_run
    saved: dict[str, Any] = {
        "state_dict": trainer.strategy.state_dicts.model(run.task),
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        **hyperparameters_of(run.task),
        "versions": {"torch": str(torch.__version__)},
        "config": trainer.config_text,
    }
    if run.datamodule is not None:
        saved |= hyperparameters_of(run.datamodule, "datamodule_")
    if not weights_only:
        require_step_done(trainer)
        trainer.state.elapsed = trainer.elapsed  # a plain number; the trainer measures it with a clock
        if run.optimization.has_plateau_by_steps and trainer.state.plateau_step < trainer.state.global_step:
            run.optimization.publish_newest()  # the pending plateau step uses the values after a resume
        samples: dict[str, Any] = run.loop.samples_of_epoch or run.data.samples
        settings = run.fingerprint | below("samples", samples) | below("numerics", run.numerics)
        if run.data.training is not None and run.data.training.content:
            settings |= {fingerprint.CONTENT: run.data.training.content}
        # collective calls, which every rank makes in this order
        saved |= {
            "state": trainer.state.to_dict(),
            "run_id": trainer.saver.run_id,
            "fingerprint": settings,
            **training_states(trainer),
            **{name: component.state_dict() for name, component in run.parts().items()},
        }
    # last, so that a hook sees all contents and may replace them
    run.hooks.call("on_save_checkpoint", saved)
    return saved


def frozen_weights(task: nn.Module, weights: Mapping[str, Any], share: bool | None) -> set[str]:
    """Return the names of the weights that are stored only once for all checkpoints.

    For `share`, see `Checkpoint.share_frozen`.
    """
    trained = {name for name, weight in task.named_parameters(remove_duplicate=False) if weight.requires_grad}
    sizes = {name: math.prod(weight.shape) for name, weight in weights.items() if hasattr(weight, "shape")}
    frozen = sizes.keys() - trained
    is_most = sum(sizes[name] for name in frozen) > sum(sizes.values()) / 2
    return frozen if share or (share is None and is_most) else set()


def training_states(trainer: "Trainer") -> dict[str, Any]:
    """Return the states of the optimizers (keyed by parameter name) and schedulers. All ranks must call this."""
    run, state_dicts = trainer.current_run, trainer.strategy.state_dicts
    return {
        "optimizer_states": [
            named(state_dicts.optimizer(optimizer), state_dicts.parameter_names(run.task, optimizer))
            for optimizer in run.optimization.optimizers
        ],
        "lr_schedulers": [config.scheduler.state_dict() for config in run.optimization.schedulers],
    }


def contents_after_workers(trainer: "Trainer", weights_only: bool) -> dict[str, Any]:
    """Return the contents of a checkpoint after the run's worker processes, which owned its optimizers, have exited.

    The contents are copied from the run's newest checkpoint. Raises TaskError if that checkpoint is not from the last
    step.
    """
    if weights_only:
        return contents(trainer, weights_only)
    newest = places.newest_in(trainer.run_dir) if trainer.run_dir is not None else None
    saved = reading.read_checkpoint(newest) if newest is not None else {}
    # an earlier checkpoint would combine new weights with old optimizer moments
    if saved.get("global_step") != trainer.global_step or "optimizer_states" not in saved:
        raise TaskError(
            "The run's worker processes have exited, so its optimizers are gone. There is no complete checkpoint from "
            f"the last step ({trainer.global_step}) to copy. Add a Checkpoint callback that saves when training ends, "
            "or save with weights_only=True."
        )
    return saved


def require_step_done(trainer: "Trainer") -> None:
    """Raise TaskError during setup or in the middle of a step, because a step's batches are counted only at its end."""
    if not trainer.current_run.is_complete:
        raise TaskError(
            "save_checkpoint was called during setup, before the run had optimizers. Call it in on_fit_start or "
            "later, or with weights_only=True."
        )
    if trainer.training and trainer.metrics.step == trainer.state.global_step:
        raise TaskError(
            f"save_checkpoint was called in the middle of step {trainer.global_step + 1}, from which no run can resume."
            f" Call it after trainer.global_step has advanced (in on_train_batch_end after a step's last batch), or "
            f"with weights_only=True."
        )


def hyperparameters_of(owner: "Hyperparameters", prefix: str = "") -> dict[str, Any]:
    """Return an object's hyperparameters for a checkpoint, using Lightning's keys.

    The result includes the names of omitted hyperparameters. If a single argument contained all hyperparameters, the
    result also includes that argument's name.
    """
    values, left_out = split_hyperparameters(owner)
    entries = {"hyper_parameters": values, "hparams_name": owner.__dict__.get("_hparams_name")}
    entries[BUILT] = [name for name in built_hyperparameters(owner) if name in values]
    if left_out:
        entries[LEFT_OUT] = left_out
    return {prefix + key: value for key, value in entries.items() if value or key == "hyper_parameters"}


class CallbackStates:
    """Saves and loads the states of callbacks, keyed by `state_key`."""

    def __init__(self, callbacks: "Sequence[Callback]") -> None:
        self.callbacks = callbacks

    def state_dict(self) -> dict[str, Any]:
        """Return the callbacks' states, keyed by `state_key`. Raises ConfigError if two callbacks have the same key."""
        states = {}
        for callback in self.callbacks:
            state = callback.state_dict()
            # otherwise the second state would silently replace the first
            if state and callback.state_key in states:
                raise ConfigError(
                    f"Two callbacks have the state_key {callback.state_key!r}. Override state_key in one of them."
                )
            if state:
                states[callback.state_key] = state
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load each callback's state if `state` contains it."""
        for callback in self.callbacks:
            if callback.state_key in state:
                callback.load_state_dict(state[callback.state_key])


class PublishedMetrics:
    """Saves and loads the values in `trainer.agreed_metrics`, which are the same on all ranks."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, float]:
        """Return the values."""
        # only values that all ranks agree on: the number of ranks may differ after a resume
        return {name: float(value) for name, value in self.trainer.agreed_metrics.items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Publish the values again, marked as measured at an earlier step."""
        self.trainer.agreed_metrics.update({name: torch.tensor(value) for name, value in state.items()})
        self.trainer.current_run.metrics.measured_at.update(dict.fromkeys(state, -1))
