"""What a checkpoint holds, and how a run takes it over."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import kernels
from ..errors import CheckpointError, ConfigError, TaskError, did_you_mean
from ..finite import require_finite
from ..state import State
from . import checkpoint, run_directory

if TYPE_CHECKING:
    from ...tasks.hyperparameters import Hyperparameters
    from ..trainer import Trainer


log = logging.getLogger("legato")

WRAPPER = "ZeroRedundancyOptimizer"
"""What checkpoints of strategy zero1 once said instead of the class of the optimizer in it."""


def save(trainer: "Trainer", path: Path, weights_only: bool, asynchronous: bool) -> None:
    """Write a checkpoint of this moment; every rank calls it. A point that is due is logged before, lest it be lost."""
    with trainer.strategy.timeouts.during("checkpoint"):
        _save(trainer, path, weights_only, asynchronous)


def _save(trainer: "Trainer", path: Path, weights_only: bool, asynchronous: bool) -> None:
    if trainer.strategy.task is None:
        checkpoint.write(path, left_by_workers(trainer, weights_only))
        return
    step = trainer.global_step
    if trainer.training and step and step % trainer.log_every_n_steps == 0:
        trainer.log_step()
    require_finite(trainer.current_run)
    found = contents(trainer, weights_only)
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.save()  # what a resume counts as logged must be on disk before the checkpoint that says so
    writers = trainer.strategy.writers
    if writers is not None or trainer.is_global_zero:
        write = trainer.writer.save if asynchronous else checkpoint.write
        write(path, found, ranks=checkpoint.ALONE if writers is None else writers)
    trainer.strategy.barrier()


def contents(trainer: "Trainer", weights_only: bool) -> dict[str, Any]:
    """Return what a checkpoint of this moment holds; every rank calls it."""
    run, strategy = trainer.current_run, trainer.strategy
    found: dict[str, Any] = {
        "state_dict": run.task.state_dict() if strategy.task is None else strategy.model_state(),
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
        trainer.state.elapsed = trainer.elapsed
        found |= {
            "state": trainer.state.to_dict(),
            "numerics": numerics_of(trainer),
            "optimizer_states": [strategy.optimizer_state(optimizer) for optimizer in run.optimization.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in run.optimization.schedulers],
            "precision": strategy.precision.state_dict(),
            "metrics": run.metrics.state_dict(),
            "callback_metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "data": run.data.state_dict() if run.data is not None else {},
            "callbacks": callback_states(trainer),
            "datamodule": run.datamodule.state_dict() if run.datamodule is not None else {},
        }
    run.hooks.call("on_save_checkpoint", found)
    return found


def left_by_workers(trainer: "Trainer", weights_only: bool) -> dict[str, Any]:
    """Return what a checkpoint holds of a run that was in workers, which took its optimizers with them.

    Raises TaskError where the run's own newest checkpoint is needed for those and is not of its end.
    """
    if weights_only:
        return contents(trainer, weights_only)
    newest = run_directory.newest_in(trainer.run_dir) if trainer.run_dir is not None else None
    saved = checkpoint.read(newest) if newest is not None else {}
    if saved.get("global_step") != trainer.global_step or "optimizer_states" not in saved:
        raise TaskError(
            "The run's optimizers ended with its processes, and it kept no whole checkpoint of its last step "
            f"{trainer.global_step} to copy. Let a Checkpoint callback save when training ends, or save with "
            "weights_only=True."
        )
    return saved


def require_step_done(trainer: "Trainer") -> None:
    """Refuse to save in the middle of a step, whose batches are read and logged although it does not count yet."""
    if trainer.training and trainer.metrics.step == trainer.global_step:
        raise TaskError(
            f"save_checkpoint was called in the middle of step {trainer.global_step + 1}, from which no run could go "
            f"on. Call it where trainer.global_step has advanced (in on_train_batch_end after a step's last batch), or "
            f"with weights_only=True."
        )


def hyperparameters_of(owner: "Hyperparameters", prefix: str = "") -> dict[str, Any]:
    """Return what a checkpoint says of an object's hyperparameters, under Lightning's keys.

    It also says under which argument they were handed over together, if they were.
    """
    found = {"hyper_parameters": _plain(owner.hparams), "hparams_name": owner.__dict__.get("_hparams_name")}
    return {prefix + key: value for key, value in found.items() if value or key == "hyper_parameters"}


def _plain(value: Any) -> Any:
    """Return mappings and sequences of other kinds, such as OmegaConf's, as dicts and lists."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(map(_plain, value)) if isinstance(value, tuple) else [_plain(item) for item in value]
    return value


def numerics_of(trainer: "Trainer") -> dict[str, Any]:
    """Return what the bits of this run depend on besides config, data and seed."""
    strategy = trainer.strategy
    found = kernels.numerics(trainer.optimizers, strategy.precision.name, strategy.device, bool(trainer.compile))
    return {**found, "micro_batches": strategy.micro_batches}


def callback_states(trainer: "Trainer") -> dict[str, Any]:
    """Return the state of every callback that has one, by its key."""
    states = {}
    for callback in trainer.callbacks:
        state = callback.state_dict()
        if state:
            if callback.state_key in states:
                raise ConfigError(f"Two callbacks have the state_key {callback.state_key!r}; give one of them its own.")
            states[callback.state_key] = state
    return states


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
        optimizer._opt_called = trainer.global_step > 0  # type: ignore[attr-defined]
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
