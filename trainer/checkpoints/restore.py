"""How a run takes over what a checkpoint holds."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import kernels
from ..errors import CheckpointError, ConfigError, did_you_mean
from ..state import State
from ..torch_private import mark_stepped
from .contents import numerics_of

if TYPE_CHECKING:
    from ..trainer import Trainer


log = logging.getLogger("legato")

WRAPPER = "ZeroRedundancyOptimizer"
"""What checkpoints of strategy zero1 once said instead of the class of the optimizer in it."""


def start_state(trainer: "Trainer", saved: Mapping[str, Any] | None) -> None:
    """Set the trainer's state to the beginning of a run, or to where a checkpoint leaves off.

    Raises ConfigError where the trainer asks for other replicas or another seed than the run began with.
    """
    state = trainer.state
    asked = trainer.replicas
    if saved is not None and "state" in saved:
        restored = State.from_dict(saved["state"])
        if asked is not None and asked != restored.replicas:
            raise ConfigError(
                f"trainer.replicas={asked}, but the run began with {restored.replicas} replicas, which are fixed for a "
                f"run. Leave trainer.replicas out to go on with it; up to {restored.replicas} processes will do."
            )
        if trainer.seed != restored.seed:
            raise ConfigError(
                f"seed={trainer.seed}, but the run began with seed={restored.seed}; a run keeps its seed."
            )
        for name, value in restored.to_dict().items():
            setattr(state, name, value)
        run_id = saved.get("run_id")
        trainer.saver.run_id = run_id if isinstance(run_id, str) and run_id else trainer.saver.run_id
    elif state.global_step == 0:
        state.replicas = asked if asked is not None else trainer.strategy.default_replicas()
        state.seed = trainer.seed
    if asked is not None and asked < 1:
        raise ConfigError(f"trainer.replicas={asked}: expected at least 1.")


def load_weights(
    task: nn.Module,
    saved: Mapping[str, Any],
    strict: bool,
    load: Callable[[Mapping[str, Any], bool], Any] | None = None,
) -> None:
    """Load a checkpoint's weights, by `load` where a task's tensors are in parts.

    Raises CheckpointError that names the parameters that differ.
    """
    weights, own = saved.get("state_dict"), task.state_dict()
    if not isinstance(weights, Mapping):
        raise CheckpointError("The checkpoint holds no weights ('state_dict').")
    missing, unexpected = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [
        f"{name}: {tuple(weights[name].shape)} in the checkpoint, {tuple(own[name].shape)} in the task"
        for name in own.keys() & weights.keys()
        if weights[name].shape != own[name].shape
    ]
    if shapes or (strict and (missing or unexpected)):
        parts = [_few("it lacks", missing)] if missing else []
        parts += [_few("it has unknown", unexpected)] if unexpected else []
        parts += [_few("other shapes:", sorted(shapes))] if shapes else []
        hint = did_you_mean(missing[0], unexpected) if missing and unexpected else ""
        raise CheckpointError(
            f"The checkpoint is of another model than {type(task).__name__}: {'; '.join(parts)}.{hint}"
        )
    if load is None:
        task.load_state_dict(dict(weights), strict=strict)
    else:
        load(weights, strict)


def _few(words: str, names: list[str]) -> str:
    return f"{words} {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def require_same_optimizers(optimizers: Sequence[Optimizer], saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError, naming both, where an optimizer is of another class than the one whose state was saved.

    Torch would take the state, with the settings in it, and stumble over it in the first step or train by the old ones.
    """
    classes = [described[0] for described in saved.get("numerics", {}).get("optimizers", ())]
    for index, (optimizer, state) in enumerate(zip(optimizers, saved["optimizer_states"], strict=True)):
        own, was = kernels.class_of(optimizer), classes[index] if index < len(classes) else WRAPPER
        if was == own:
            continue
        if was == WRAPPER:  # the class is not told: settings tell, but each version of torch may add some
            settings: set[str] = set(next(iter(state.get("param_groups", ())), ()))
            foreign = sorted(settings - optimizer.param_groups[0].keys())
            missing = sorted(optimizer.param_groups[0].keys() - settings)
            if not (foreign and missing):
                continue
            was = f"one with {', '.join(foreign)} and without {', '.join(missing)}"
        number = f" {index}" if len(optimizers) > 1 else ""
        raise CheckpointError(
            f"The checkpoint's optimizer{number} is {was}, the task now returns {own}, which cannot go on from that "
            f"state. Return the one from before in configure_optimizers, or begin a new run from the weights alone "
            f"(load_from_checkpoint)."
        )


def tell_kept_settings(optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]], scheduled: bool) -> None:
    """Warn where an optimizer was made with other settings than those it goes on with, which are the checkpoint's.

    Where there are schedulers, what they may have changed is left out, but for the learning rate they began with.
    """
    for optimizer, state in zip(optimizers, states, strict=True):
        for own, was in zip(optimizer.param_groups, state.get("param_groups", ()), strict=False):
            names = {"initial_lr", "weight_decay"} if scheduled else own.keys() - {"initial_lr", *kernels.FLAGS}
            settings = {
                name: own[name] for name in names & was.keys() if isinstance(own.get(name), (int, float, tuple))
            }
            differing = [
                f"{name.removeprefix('initial_')}={was[name]} and not {value}"
                for name, value in sorted(settings.items())
                if value != was[name]
            ]
            if differing:
                log.warning(
                    "%s goes on as it was saved: with %s. To change that, set it in on_train_start, or begin a new run "
                    "from the weights (load_from_checkpoint).", kernels.class_of(optimizer), ", ".join(differing),
                )  # fmt: skip


def load_rest(trainer: "Trainer", saved: Mapping[str, Any]) -> None:
    """Take over optimizers, schedulers, metrics, data position and callbacks from a checkpoint."""
    run, strategy = trainer.current_run, trainer.strategy
    if "optimizer_states" not in saved:
        raise CheckpointError("The checkpoint holds weights only (save_weights_only), so a run cannot go on from it.")
    for what, own, states in (
        ("optimizers", run.optimization.optimizers, saved["optimizer_states"]),
        ("learning rate schedulers", run.optimization.schedulers, saved["lr_schedulers"]),
    ):
        if len(own) != len(states):
            raise CheckpointError(f"The checkpoint has {len(states)} {what}, the task now has {len(own)}.")
    require_same_optimizers(run.optimization.optimizers, saved)
    if run.bitwise:
        kernels.require_same_numerics(saved.get("numerics", {}), numerics_of(trainer))
    if saved is run.checkpoint and trainer.is_global_zero:
        tell_kept_settings(run.optimization.optimizers, saved["optimizer_states"], bool(run.optimization.schedulers))
    for optimizer, state in zip(run.optimization.optimizers, saved["optimizer_states"], strict=True):
        try:
            strategy.load_optimizer_state(optimizer, state)
        except ValueError as error:
            raise CheckpointError(f"The checkpoint's {type(optimizer).__name__} state does not fit: {error}") from error
        # Else a learning rate scheduler warns, where the resumed run begins with the end of an epoch.
        mark_stepped(optimizer, trainer.global_step > 0)
    for config, state in zip(run.optimization.schedulers, saved["lr_schedulers"], strict=True):
        made_for, now = state.get("total_steps"), getattr(config.scheduler, "total_steps", None)
        if isinstance(made_for, int) and isinstance(now, int) and now > made_for:
            raise ConfigError(
                f"{type(config.scheduler).__name__} was made for a run of {made_for} steps and cannot go beyond them; "
                f"this one would have {now}. Go on with the same max_epochs and max_steps, or begin a new run."
            )
        config.scheduler.load_state_dict(state)
    strategy.precision.load_state_dict(saved["precision"])
    run.metrics.load_state_dict(saved["metrics"], run.layout.owned(strategy.data_rank))
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in saved["callback_metrics"].items()})
    if run.data is not None:
        run.data.load_state_dict(saved["data"])
    if run.datamodule is not None and saved["datamodule"]:
        run.datamodule.load_state_dict(saved["datamodule"])
    for callback in trainer.callbacks:
        if callback.state_key in saved["callbacks"]:
            callback.load_state_dict(saved["callbacks"][callback.state_key])
