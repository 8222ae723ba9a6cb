"""Restore of a run from a checkpoint: schedulers, loop state, weights, optimizers, and the rest."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...base.errors import CheckpointError, ConfigError, did_you_mean
from ...base.torch_private import mark_stepped, schedulers_within
from ..optimization import kernels
from ..state import State
from . import fingerprint
from .fingerprint import Changes, SettingChange

if TYPE_CHECKING:
    from ...base.contracts import Trainer
    from ...tasks.task import Task
    from ..strategies.state_dicts import StateDicts

log = logging.getLogger("legato")


class Replay(NamedTuple):
    """Learning rate scheduler with other settings than the saved one, advanced to the same step."""

    optimizer: int
    """Index of its optimizer."""
    settings: list[dict[str, Any]]
    """Settings of the optimizer's parameter groups after the replay."""


def replay_schedules(trainer: "Trainer", saved: Mapping[str, Any]) -> dict[int, Replay]:
    """Advance each scheduler whose settings changed to the saved step; return them by index.

    The learning rate so follows the schedule as it is set now. Not replayed: ReduceLROnPlateau, schedulers that the
    task steps itself, and several schedulers of one optimizer, each of which multiplies the others' results.
    """
    optimization, found = trainer.current_run.optimization, {}
    optimizers = [getattr(one, "original", one) for one in optimization.optimizers]
    whose = [getattr(config.scheduler, "optimizer", None) for config in optimization.schedulers]
    for index, config in enumerate(optimization.schedulers):
        changed = changes_of(trainer, saved, index)
        if not changed:
            continue
        # Replayed and not restored: with the new length in the old state a cosine turns round (torch multiplies the
        # rate it finds), and the rate rose from 3.9e-7 to 9.2e-4 in a test.
        scheduler, optimizer, steps = config.scheduler, whose[index], _position(trainer, saved, index, changed)
        plain = isinstance(scheduler, LRScheduler) and not _has_plateau(scheduler)
        alone = optimizer is not None and whose.count(optimizer) == 1 and not optimization.own_scheduler_step
        if plain and alone and steps is not None:
            found[index] = Replay(optimizers.index(optimizer), _replay(scheduler, optimizer, steps))
            continue
        if changed[0].name == fingerprint.SCHEDULER:
            raise CheckpointError(
                f"The checkpoint's learning rate scheduler is {changed[0].was}, the task now returns {changed[0].now}, "
                f"which cannot go on from that state. Return the one from before in configure_optimizers, or begin a "
                f"new run from the weights alone (load_from_checkpoint)."
            )
    return found


def changes_of(trainer: "Trainer", saved: Mapping[str, Any], index: int) -> list[SettingChange]:
    """Return the settings of a scheduler that differ from the checkpoint's."""
    before = (saved.get("fingerprint") or {}).get("schedulers", ())
    own = trainer.current_run.fingerprint["schedulers"][index]
    return fingerprint.changed_schedule(before[index] if index < len(before) else None, own)


def _position(trainer: "Trainer", saved: Mapping[str, Any], index: int, changed: list[SettingChange]) -> int | None:
    """Return the number of steps that a scheduler must have made; None if the saved state lacks it."""
    config, state = trainer.current_run.optimization.schedulers[index], trainer.state
    if any(change.name.endswith((" interval", " frequency")) for change in changed):
        # the saved count is in the old unit, so it is counted from the beginning in the new one
        done = state.global_step if config.interval == "step" else state.epoch + state.epoch_ended
        return done // config.frequency
    return _steps_of(saved["lr_schedulers"][index])


def _steps_of(state: Mapping[str, Any]) -> int | None:
    inner = state.get("_schedulers")
    found = state.get("last_epoch", _steps_of(inner[0]) if isinstance(inner, list) and inner else None)
    return found if isinstance(found, int) and found >= 0 else None


def _has_plateau(scheduler: Any) -> bool:
    return isinstance(scheduler, ReduceLROnPlateau) or any(map(_has_plateau, schedulers_within(scheduler)))


def _replay(scheduler: Any, optimizer: Any, steps: int) -> list[dict[str, Any]]:
    """Advance a new scheduler, at 4 us a step; return the settings of the parameter groups."""
    before = [fingerprint.settings_of(group) for group in optimizer.param_groups]
    mark_stepped(optimizer, True)  # else the scheduler warns that no optimizer has stepped
    try:
        for _ in range(steps):
            scheduler.step()
    except ValueError as error:
        raise ConfigError(
            f"{type(scheduler).__name__} was made for fewer than the {steps} steps that the checkpoint has behind it: "
            f"{error}. Go on with a max_epochs and max_steps that are no fewer than before."
        ) from error
    found = []
    for group, was in zip(optimizer.param_groups, before, strict=True):
        now = fingerprint.settings_of(group)
        moved = {name for name, value in now.items() if name in fingerprint.SCHEDULED or value != was.get(name)}
        found.append({name: group[name] for name in moved})
    return found


def load_schedulers(trainer: "Trainer", saved: Mapping[str, Any], replays: Mapping[int, Replay]) -> list[SettingChange]:
    """Load the schedulers' states, keeping changed settings; return how learning rates change."""
    rates = []
    for index, config in enumerate(trainer.current_run.optimization.schedulers):
        scheduler, state = config.scheduler, saved["lr_schedulers"][index]
        if index not in replays:
            own = scheduler.state_dict()
            names = {change.name.rpartition(".")[2] for change in changes_of(trainer, saved, index)}
            scheduler.load_state_dict({**state, **{name: own[name] for name in names & own.keys()}})
            continue
        was = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
        for group, settings in zip(scheduler.optimizer.param_groups, replays[index].settings, strict=True):
            group.update(settings)
        now = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
        rates.append(SettingChange("learning rate", *((was[0], now[0]) if len({*was, *now}) <= 2 else (was, now))))
    return rates


WRAPPER = "ZeroRedundancyOptimizer"
"""Class that checkpoints of strategy zero1 once named, rather than that of the optimizer in it."""


def start_state(trainer: "Trainer", saved: Mapping[str, Any] | None) -> None:
    """Set the trainer's state to the start of a run, or to a checkpoint's.

    A run keeps its seed, and says so where the trainer has another. Raises ConfigError if that one has other replicas.
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
        if trainer.seed != restored.seed and trainer.is_global_zero:
            log.info("The run keeps the seed that it began with, %d; seed=%d is ignored.", restored.seed, trainer.seed)
        for name, value in restored.to_dict().items():
            setattr(state, name, value)
        if asked is None and trainer.is_global_zero:
            tell_of_replicas(restored.replicas, trainer.strategy.data_ranks.size)
        run_id = saved.get("run_id")
        trainer.saver.run_id = run_id if isinstance(run_id, str) and run_id else trainer.saver.run_id
    elif state.global_step == 0:
        begin_state(trainer)
    if asked is not None and asked < 1:
        raise ConfigError(f"trainer.replicas={asked}: expected at least 1.")


def tell_of_replicas(replicas: int, processes: int) -> None:
    """Say that a resumed run has more replicas than processes, where it was not asked for."""
    if replicas > processes:
        log.info(
            "The run began with %d replicas and keeps them: they take turns on %d process%s, so a step has the samples "
            "that it had. For other replicas begin a new run from the weights (Task.load_from_checkpoint).",
            replicas, processes, "es" * (processes > 1),
        )  # fmt: skip


def begin_state(trainer: "Trainer") -> None:
    """Set what the trainer's arguments decide for a run, and no checkpoint of another does."""
    asked = trainer.replicas
    trainer.state.replicas = asked if asked is not None else trainer.strategy.data_ranks.size
    trainer.state.seed = trainer.seed


def load_task_weights(
    task: "Task", saved: Mapping[str, Any], strict: bool, state_dicts: "StateDicts | None" = None
) -> None:
    """Load a checkpoint's weights, by `state_dicts` for a sharded task.

    Raises CheckpointError with the names of parameters that differ.
    """
    weights, own = saved.get("state_dict"), task.state_dict()
    if not isinstance(weights, Mapping):
        raise CheckpointError("The checkpoint holds no weights ('state_dict').")
    missing, unexpected = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [
        f"{name}: {tuple(weights[name].shape)} in the checkpoint, {tuple(own[name].shape)} in the task"
        for name in own.keys() & weights.keys()
        # what get_extra_state of a module returns need not be a tensor
        if hasattr(weights[name], "shape") and hasattr(own[name], "shape") and weights[name].shape != own[name].shape
    ]
    if shapes or (strict and (missing or unexpected)):
        parts = [_few("it lacks", missing)] if missing else []
        parts += [_few("it has unknown", unexpected)] if unexpected else []
        parts += [_few("other shapes:", sorted(shapes))] if shapes else []
        hint = did_you_mean(missing[0], unexpected) if missing and unexpected else ""
        raise CheckpointError(
            f"The checkpoint is of another model than {type(task).__name__}: {'; '.join(parts)}.{hint}"
        )
    if state_dicts is None:
        task.load_state_dict(dict(weights), strict=strict)
    else:
        state_dicts.load_model(task, weights, strict)


def _few(words: str, names: list[str]) -> str:
    return f"{words} {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def require_same_optimizers(optimizers: Sequence[Optimizer], saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError if an optimizer is of another class than the one whose state was saved.

    Torch would load the state, settings included, and fail in the first step or train with the old settings.
    """
    classes = [described[0] for described in saved.get("numerics", {}).get("optimizers", ())]
    for index, (optimizer, state) in enumerate(zip(optimizers, saved["optimizer_states"], strict=True)):
        own, was = kernels.class_of(optimizer), classes[index] if index < len(classes) else WRAPPER
        if was == own:
            continue
        if was == WRAPPER:  # the class was not saved: compare settings, to which torch versions may add some
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
    """Return the differences from the saved run, as seen by rank 0; every rank calls it.

    `rescheduled`: see `fingerprint.compare`. Raises ConfigError, on every rank, for other samples in the middle of an
    epoch, and for any difference that `bitwise` does not allow.
    """
    run, state = trainer.current_run, trainer.state
    changes = None
    if trainer.is_global_zero:
        changes = fingerprint.compare(saved, run.data.samples, run.fingerprint, rescheduled)
        changes.changed += fingerprint.numerics_changed(saved.get("numerics", {}), run.numerics, run.bitwise)
        changes.changed += run.other_dtypes
    # ranks may see different things (threads, a length that a share of the data has), but must decide alike
    found: Changes = trainer.strategy.collectives.broadcast(changes)
    before = (saved.get("fingerprint") or {}).get("samples")
    done = before is not None and before["batches of an epoch"] == state.epoch_rounds
    within = state.epoch_steps > 0 and not state.epoch_ended
    if within and not done and found.samples and trainer.resume_at == "step" and run.goes_on:
        raise ConfigError(
            f"The checkpoint is in the middle of epoch {state.epoch} (after step {state.epoch_steps}), whose samples "
            f"cannot be continued with other samples in a step: {_list_changes(found.samples)}. Set that as it "
            f"was; or set trainer.resume_at=epoch, which ends this epoch here and begins the next; or begin a new run "
            f"by resume=PATH."
        )
    allowed = ("reproducible", fingerprint.LEFT_OUT_SAMPLES)
    differing = [change for change in found.changed + found.restored if change.name not in allowed]
    begun = (saved.get("fingerprint") or {}).get("training", {}).get("reproducible", "bitwise")
    if run.bitwise and begun == "bitwise" and differing:
        raise ConfigError(
            f"reproducible: bitwise cannot go on with the same bits here: {_list_changes(differing)}. Go on as it was, "
            f"or with reproducible: order, which keeps samples and random numbers but not the last bits."
        )
    if within and found.samples:
        found.end_epoch = not done
        run.end_epoch_here(before)
    return found


def _list_changes(changes: Sequence[SettingChange]) -> str:
    return ", ".join(map(str, changes))


def log_changes(trainer: "Trainer", changes: Changes, rates: Sequence[SettingChange]) -> None:
    """Log the differences from the saved run on rank 0, and whether the new or the saved values count."""
    if not trainer.is_global_zero or not (changes.samples or changes.changed or changes.restored):
        return
    state, lines = trainer.state, ["The run resumes with other settings than it was saved with."]
    if changes.samples:
        at = f"; epoch {state.epoch} ends here, after {state.epoch_steps} steps" if changes.end_epoch else ""
        lines.append(f"In the samples of a step, as set now: {_list_changes(changes.samples)}{at}.")
    if changes.changed:
        lines.append(f"As set now: {_list_changes([*changes.changed, *rates])}.")
    if changes.restored:
        restored = ", ".join(f"{name}={was} and not {now}" for name, was, now in changes.restored)
        lines.append(
            f"As saved, and not as set now: {restored}. To change that, set it in on_train_start, or begin a new run "
            f"from the weights (load_from_checkpoint)."
        )
    log.warning("%s", "\n".join(lines))


def in_parameter_order(
    optimizer: Optimizer, state: dict[str, Any], before: list[list[str]] | None, now: list[list[str]] | None
) -> dict[str, Any]:
    """Return an optimizer's saved state with its parameters in the current order.

    Raises CheckpointError, with names, if a parameter is new, gone or in a group with others.
    """
    if before is None or now is None or before == now:
        return state
    old, new = ({name for group in groups for name in group} for groups in (before, now))
    kind = kernels.class_of(optimizer)
    if old != new:
        lacks, unknown = sorted(new - old), sorted(old - new)
        parts = [_few("it lacks", lacks)] * bool(lacks) + [_few("it has unknown", unknown)] * bool(unknown)
        raise CheckpointError(f"The checkpoint's {kind} is of other parameters: {'; '.join(parts)}.")
    # groups are told by the names in them: their order, and that of parameters, may have changed
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
    """Load the optimizers' states, by the names of parameters where they are known."""
    run, before = trainer.current_run, (saved.get("fingerprint") or {}).get("optimizers", ())
    for index, (optimizer, state) in enumerate(
        zip(run.optimization.optimizers, saved["optimizer_states"], strict=True)
    ):
        was = before[index]["parameters"] if index < len(before) else None
        state = in_parameter_order(optimizer, state, was, run.fingerprint["optimizers"][index]["parameters"])
        try:
            trainer.strategy.state_dicts.load_optimizer(optimizer, state)
        except ValueError as error:
            raise CheckpointError(f"The checkpoint's {type(optimizer).__name__} state does not fit: {error}") from error
        # Else a learning rate scheduler warns if the resumed run begins with the end of an epoch.
        mark_stepped(optimizer, trainer.global_step > 0)


def record_settings(trainer: "Trainer", saved: Mapping[str, Any], replays: Mapping[int, Replay]) -> None:
    """Record in the run's fingerprint which settings of optimizers count, for the next resume to compare with."""
    before, own = (saved.get("fingerprint") or {}).get("optimizers", ()), trainer.current_run.fingerprint["optimizers"]
    rescheduled = {replay.optimizer for replay in replays.values()}
    for index, (was, now) in enumerate(zip(before, own, strict=False)):
        new = fingerprint.SCHEDULED if index in rescheduled else set()
        for one, other in zip(fingerprint.in_group_order(was, now), now["groups"], strict=False):
            other |= {name: one[name] for name in (one.keys() & other.keys()) - new}


def load_rest(trainer: "Trainer", saved: Mapping[str, Any], resumes: bool) -> None:
    """Load optimizers, schedulers, metrics, data position and callbacks from a checkpoint.

    `resumes`: the run resumes from it; else another process of an elastic run sent it.
    """
    run, strategy = trainer.current_run, trainer.strategy
    if "state" not in saved:
        is_file = run.source is not None and run.source.is_file()
        hint = " A run of Lightning's goes on from its file by `legato lightning SCRIPT`." if is_file else ""
        raise CheckpointError(
            f"The checkpoint holds weights only (save_weights_only), so a run cannot go on from it. Begin a new run "
            f"from them: load_from_checkpoint.{hint}"
        )
    for what, own, states in (
        ("optimizers", run.optimization.optimizers, saved["optimizer_states"]),
        ("learning rate schedulers", run.optimization.schedulers, saved["lr_schedulers"]),
    ):
        if len(own) != len(states):
            raise CheckpointError(f"The checkpoint has {len(states)} {what}, the task now has {len(own)}.")
    require_same_optimizers(run.optimization.optimizers, saved)
    # In this order: a replay moves the settings of the optimizers' groups, loading the optimizers puts the saved ones
    # in their place, and load_schedulers sets those of replayed schedules once more.
    replays = replay_schedules(trainer, saved) if resumes else {}
    changes = find_changes(trainer, saved, {replay.optimizer for replay in replays.values()}) if resumes else Changes()
    load_optimizers(trainer, saved)
    rates = load_schedulers(trainer, saved, replays)
    log_changes(trainer, changes, rates)
    if resumes:
        record_settings(trainer, saved, replays)
    else:
        run.fingerprint.clear()
        run.fingerprint.update({name: value for name, value in saved["fingerprint"].items() if name != "samples"})
    strategy.precision.load_state_dict(saved["precision"])
    if "metrics" in saved:
        run.metrics.load_state_dict(saved["metrics"], run.layout.owned(strategy.data_ranks.rank))
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in saved["callback_metrics"].items()})
    run.metrics.measured_at.update(dict.fromkeys(saved["callback_metrics"], -1))
    if run.data.training is not None:
        run.data.training.load_state_dict(saved.get("data", {}))
    load_saved_states(trainer, saved)


def load_saved_states(trainer: "Trainer", saved: Mapping[str, Any]) -> None:
    """Load the states of the data module and of callbacks, where the checkpoint has them."""
    module, states = trainer.current_run.datamodule, saved.get("callbacks", {})
    if module is not None and saved.get("datamodule"):
        module.load_state_dict(saved["datamodule"])
    for callback in trainer.callbacks:
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])
