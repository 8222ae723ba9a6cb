"""How a run takes over what a checkpoint holds."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import kernels
from ..errors import CheckpointError, ConfigError, did_you_mean
from ..state import State
from ..torch_private import mark_stepped
from . import fingerprint
from .contents import numerics_of
from .fingerprint import Change, Changes
from .schedules import Replay, load_schedulers, replay_schedules

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


def find_changes(trainer: "Trainer", saved: Mapping[str, Any], rescheduled: Collection[int]) -> Changes:
    """Return what differs from the run that was saved, as rank 0 sees it; every rank calls it.

    `rescheduled`: see `fingerprint.compare`. Raises ConfigError, on every rank, where the run cannot go on with it: in
    the middle of an epoch with other samples in a step, or at all where not one bit may differ.
    """
    run, state = trainer.current_run, trainer.state
    changes = None
    if trainer.is_global_zero:
        changes = fingerprint.compare(saved, run.samples, run.fingerprint, rescheduled)
        changes.taken += fingerprint.numerics_changed(saved.get("numerics", {}), numerics_of(trainer), run.bitwise)
        changes.taken += run.other_dtypes
    found: Changes = trainer.strategy.broadcast(changes)
    before = (saved.get("fingerprint") or {}).get("samples")
    done = before is not None and before["batches of an epoch"] == state.epoch_rounds
    within = state.epoch_steps > 0 and not state.epoch_ended
    if within and not done and found.samples and trainer.resume_at == "step" and run.goes_on:
        raise ConfigError(
            f"The checkpoint is in the middle of epoch {state.epoch} (after step {state.epoch_steps}), whose samples "
            f"cannot be gone on with where other ones make up a step: {_listed(found.samples)}. Set that as it was; or "
            f"set trainer.resume_at=epoch, which ends this epoch here and begins the next; or begin a new run by "
            f"resume=PATH."
        )
    differing = [change for change in found.taken + found.kept if change.name != "reproducible"]
    begun = (saved.get("fingerprint") or {}).get("training", {}).get("reproducible", "bitwise")
    if run.bitwise and begun == "bitwise" and differing:
        raise ConfigError(
            f"reproducible: bitwise cannot go on with the same bits here: {_listed(differing)}. Go on as it was, or "
            f"with reproducible: order, which keeps samples and random numbers but not the last bits."
        )
    if within and (found.samples or (before is None and trainer.resume_at == "epoch")):
        found.end_epoch = not done
        run.end_epoch_here(before)
    return found


def _listed(changes: Sequence[Change]) -> str:
    return ", ".join(map(str, changes))


def tell_changes(trainer: "Trainer", changes: Changes, rates: Sequence[Change]) -> None:
    """Say in one message, on rank 0, what differs from the run that was saved, and which of the two counts."""
    if not trainer.is_global_zero or not (changes.samples or changes.taken or changes.kept):
        return
    state, lines = trainer.state, ["The run goes on with other settings than those it was saved with."]
    if changes.samples:
        at = f"; epoch {state.epoch} ends here, after {state.epoch_steps} steps" if changes.end_epoch else ""
        lines.append(f"In the samples of a step, as set now: {_listed(changes.samples)}{at}.")
    if changes.taken:
        lines.append(f"As set now: {_listed([*changes.taken, *rates])}.")
    if changes.kept:
        kept = ", ".join(f"{name}={was} and not {now}" for name, was, now in changes.kept)
        lines.append(
            f"As saved, and not as set now: {kept}. To change that, set it in on_train_start, or begin a new run from "
            f"the weights (load_from_checkpoint)."
        )
    log.warning("%s", "\n".join(lines))


def by_names(
    optimizer: Optimizer, state: dict[str, Any], before: list[list[str]] | None, now: list[list[str]] | None
) -> dict[str, Any]:
    """Return an optimizer's saved state with its parameters in the order that they have now.

    Raises CheckpointError, with names, where a parameter is new, gone or in a group with others.
    """
    if before is None or now is None or before == now:
        return state
    old, new = ({name for group in groups for name in group} for groups in (before, now))
    kind = kernels.class_of(optimizer)
    if old != new:
        lacks, unknown = sorted(new - old), sorted(old - new)
        parts = [_few("it lacks", lacks)] * bool(lacks) + [_few("it has unknown", unknown)] * bool(unknown)
        raise CheckpointError(f"The checkpoint's {kind} is of other parameters: {'; '.join(parts)}.")
    places = {frozenset(group): index for index, group in enumerate(before)}
    for group in now:
        if frozenset(group) not in places:
            was = {name: index for index, names in enumerate(before) for name in names}
            apart = _few("of", group[:5])
            raise CheckpointError(
                f"The checkpoint's {kind} has other parameter groups: {apart} one group is made, in which were groups "
                f"{sorted({was[name] for name in group})}. Return the groups from before in configure_optimizers."
            )
    number = {name: index for index, name in enumerate(name for group in before for name in group)}
    order = [number[name] for group in now for name in group]
    groups, start = [], 0
    for group in now:
        groups.append(
            {**state["param_groups"][places[frozenset(group)]], "params": [*range(start, start + len(group))]}
        )
        start += len(group)
    return {
        "state": {index: state["state"][place] for index, place in enumerate(order) if place in state["state"]},
        "param_groups": groups,
    }


def load_optimizers(trainer: "Trainer", saved: Mapping[str, Any]) -> None:
    """Take over the optimizers' states, by the names of parameters where they are known."""
    run, before = trainer.current_run, (saved.get("fingerprint") or {}).get("optimizers", ())
    for index, (optimizer, state) in enumerate(
        zip(run.optimization.optimizers, saved["optimizer_states"], strict=True)
    ):
        was = before[index]["parameters"] if index < len(before) else None
        state = by_names(optimizer, state, was, run.fingerprint["optimizers"][index]["parameters"])
        try:
            trainer.strategy.load_optimizer_state(optimizer, state)
        except ValueError as error:
            raise CheckpointError(f"The checkpoint's {type(optimizer).__name__} state does not fit: {error}") from error
        # Else a learning rate scheduler warns, where the resumed run begins with the end of an epoch.
        mark_stepped(optimizer, trainer.global_step > 0)


def keep_settings(trainer: "Trainer", saved: Mapping[str, Any], replays: Mapping[int, Replay]) -> None:
    """Note in the run's fingerprint which settings of optimizers count, so that the next resume compares with those."""
    before, own = (saved.get("fingerprint") or {}).get("optimizers", ()), trainer.current_run.fingerprint["optimizers"]
    rescheduled = {replay.optimizer for replay in replays.values()}
    for index, (was, now) in enumerate(zip(before, own, strict=False)):
        new = fingerprint.SCHEDULED if index in rescheduled else set()
        for one, other in zip(fingerprint.aligned(was, now), now["groups"], strict=False):
            other |= {name: one[name] for name in (one.keys() & other.keys()) - new}


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
    resumes = saved is run.checkpoint  # else another process of an elastic run hands it over
    replays = replay_schedules(trainer, saved) if resumes else {}
    changes = find_changes(trainer, saved, {replay.optimizer for replay in replays.values()}) if resumes else Changes()
    load_optimizers(trainer, saved)
    rates = load_schedulers(trainer, saved, replays)
    tell_changes(trainer, changes, rates)
    if resumes:
        keep_settings(trainer, saved, replays)
    else:
        run.fingerprint = {name: value for name, value in saved["fingerprint"].items() if name != "samples"}
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
