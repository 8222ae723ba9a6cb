"""Contents of a checkpoint of a run."""

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
    """Return the contents of a checkpoint of this moment; every rank calls it."""
    run = trainer.current_run
    found: dict[str, Any] = {
        "state_dict": trainer.strategy.state_dicts.model(run.task),
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        **hyperparameters_of(run.task),
        "versions": {"torch": str(torch.__version__)},
        "config": trainer.config_text,
    }
    if run.datamodule is not None:
        found |= hyperparameters_of(run.datamodule, "datamodule_")
    if not weights_only:
        require_step_done(trainer)
        trainer.state.elapsed = trainer.elapsed  # a clock until then, which no checkpoint can hold
        if run.optimization.has_plateau_by_steps and trainer.state.plateau_step < trainer.state.global_step:
            run.optimization.publish_newest()  # its step, which a resume makes, goes by these values
        samples: dict[str, Any] = run.loop.samples_of_epoch or run.data.samples
        settings = run.fingerprint | below("samples", samples) | below("numerics", run.numerics)
        if run.data.training is not None and run.data.training.content:
            settings |= {fingerprint.CONTENT: run.data.training.content}
        # whatever is collective here is called on every rank, in this order
        found |= {
            "state": trainer.state.to_dict(),
            "run_id": trainer.saver.run_id,
            "fingerprint": settings,
            **training_states(trainer),
            **{name: part.state_dict() for name, part in run.parts().items()},
        }
    # last: a hook may look at all of it, and replace some
    run.hooks.call("on_save_checkpoint", found)
    return found


def frozen_weights(task: nn.Module, weights: Mapping[str, Any], share: bool | None) -> set[str]:
    """Return the names of weights that are stored once for all checkpoints; `share`: see `Checkpoint.share_frozen`."""
    trained = {name for name, one in task.named_parameters(remove_duplicate=False) if one.requires_grad}
    sizes = {name: math.prod(weight.shape) for name, weight in weights.items() if hasattr(weight, "shape")}
    frozen = sizes.keys() - trained
    is_most = sum(sizes[name] for name in frozen) > sum(sizes.values()) / 2
    return frozen if share or (share is None and is_most) else set()


def training_states(trainer: "Trainer") -> dict[str, Any]:
    """Return the states of optimizers, by the names of parameters, and of their schedulers; every rank calls it."""
    run, state_dicts = trainer.current_run, trainer.strategy.state_dicts
    return {
        "optimizer_states": [
            named(state_dicts.optimizer(optimizer), state_dicts.parameter_names(run.task, optimizer))
            for optimizer in run.optimization.optimizers
        ],
        "lr_schedulers": [config.scheduler.state_dict() for config in run.optimization.schedulers],
    }


def contents_after_workers(trainer: "Trainer", weights_only: bool) -> dict[str, Any]:
    """Return the contents of a checkpoint of a run that was in workers, whose optimizers ended with them.

    The optimizers' states come from the run's newest checkpoint. Raises TaskError if that is not of the run's end.
    """
    if weights_only:
        return contents(trainer, weights_only)
    newest = places.newest_in(trainer.run_dir) if trainer.run_dir is not None else None
    saved = reading.read_checkpoint(newest) if newest is not None else {}
    # of an earlier step it would be a state that never was: new weights with old moments
    if saved.get("global_step") != trainer.global_step or "optimizer_states" not in saved:
        raise TaskError(
            "The run's optimizers ended with its processes, and it kept no complete checkpoint of its last step "
            f"{trainer.global_step} to copy. Let a Checkpoint callback save when training ends, or save with "
            "weights_only=True."
        )
    return saved


def require_step_done(trainer: "Trainer") -> None:
    """Refuse to save before the run is complete, and in the middle of a step, whose batches do not count yet."""
    if not trainer.current_run.is_complete:
        raise TaskError(
            "save_checkpoint was called while the run is set up, before it has optimizers: call it from on_fit_start "
            "on, or with weights_only=True."
        )
    if trainer.training and trainer.metrics.step == trainer.state.global_step:
        raise TaskError(
            f"save_checkpoint was called in the middle of step {trainer.global_step + 1}, from which no run could go "
            f"on. Call it where trainer.global_step has advanced (in on_train_batch_end after a step's last batch), or "
            f"with weights_only=True."
        )


def hyperparameters_of(owner: "Hyperparameters", prefix: str = "") -> dict[str, Any]:
    """Return an object's hyperparameters for a checkpoint, under Lightning's keys.

    Includes the name of the argument under which they were passed together, if they were, and what is left out.
    """
    values, left = split_hyperparameters(owner)
    found = {"hyper_parameters": values, "hparams_name": owner.__dict__.get("_hparams_name")}
    found[BUILT] = [name for name in built_hyperparameters(owner) if name in values]
    if left:
        found[LEFT_OUT] = left
    return {prefix + key: value for key, value in found.items() if value or key == "hyper_parameters"}


class CallbackStates:
    """States of the callbacks that have one, by their keys."""

    def __init__(self, callbacks: "Sequence[Callback]") -> None:
        self.callbacks = callbacks

    def state_dict(self) -> dict[str, Any]:
        """Return the states. Raises ConfigError for two of one key."""
        states = {}
        for callback in self.callbacks:
            state = callback.state_dict()
            # silently, the second would take the place of the first
            if state and callback.state_key in states:
                raise ConfigError(f"Two callbacks have the state_key {callback.state_key!r}; give one of them its own.")
            if state:
                states[callback.state_key] = state
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each callback its state, if there is one."""
        for callback in self.callbacks:
            if callback.state_key in state:
                callback.load_state_dict(state[callback.state_key])


class PublishedMetrics:
    """The values that all ranks have, of `trainer.agreed_metrics`."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, float]:
        """Return the values."""
        # only what all ranks agree on: a resume may have other ranks
        return {name: float(value) for name, value in self.trainer.agreed_metrics.items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Publish the values again, as of an earlier step."""
        self.trainer.agreed_metrics.update({name: torch.tensor(value) for name, value in state.items()})
        self.trainer.current_run.metrics.measured_at.update(dict.fromkeys(state, -1))
