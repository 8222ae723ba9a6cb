"""Restores a run from a checkpoint: loop state, weights, optimizers, schedulers and the states of other components."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...base.errors import CheckpointError, ConfigError, did_you_mean
from ...base.location import to_location
from ...base.quantities import counted
from ...base.torch_private import mark_stepped, schedulers_within
from ..checkpoints.storage import is_file
from ..optimization import kernels
from ..state import State
from . import fingerprint
from .fingerprint import Changes, SettingChange
from .parameter_names import differences, numbered

if TYPE_CHECKING:
    from ...base.contracts import Trainer
    from ...tasks.task import Task
    from ..strategies.state_dicts import StateDicts

log = logging.getLogger("legato")


# --- loop state and weights -------------------------------------------------------------------------------------------
def start_state(trainer: "Trainer", saved: Mapping[str, Any] | None) -> None:
    """Set the trainer's state to that of a new run or a checkpoint.

    A resumed run keeps its seed: if the trainer has a different one, a message says that the trainer's is ignored.
    Raises ConfigError if the trainer has a different number of replicas.
    """
    state, asked, processes = trainer.state, trainer.replicas, trainer.strategy.data_ranks.size
    if saved is not None and "state" in saved:
        restored = State.from_dict(saved["state"])
        if asked is not None and asked != restored.replicas:
            raise ConfigError(
                f"trainer.replicas={asked}, but the run started with {restored.replicas} replicas and keeps that "
                f"number. To resume the run on up to {restored.replicas} processes, omit trainer.replicas."
            )
        # The seed determines the order of samples. If it changed within an epoch, the epoch would repeat some samples
        # and miss others.
        if trainer.seed != restored.seed and trainer.is_global_zero:
            log.info("The run keeps its original seed, %d; seed=%d is ignored.", restored.seed, trainer.seed)
        vars(state).update(restored.to_dict())
        if asked is None and trainer.is_global_zero and restored.replicas > processes:
            log.info(
                "The run keeps its %d replicas, which take turns on %s, so each step has the same samples as "
                "before. To use a different number, start a new run from the weights (Task.load_from_checkpoint).",
                restored.replicas, counted(processes, "process"),
            )  # fmt: skip
        trainer.saver.run_id = saved.get("run_id") or trainer.saver.run_id
    elif state.global_step == 0:
        state.replicas, state.seed = asked if asked is not None else processes, trainer.seed
    if asked is not None and asked < 1:
        raise ConfigError(f"trainer.replicas={asked}: expected at least 1.")


def load_task_weights(
    task: "Task", saved: Mapping[str, Any], strict: bool, state_dicts: "StateDicts | None" = None
) -> None:
    """Load a checkpoint's weights. If the task is sharded, use `state_dicts` to load them.

    Raises a CheckpointError that lists the parameters that do not match.
    """
    weights, task_weights = saved.get("state_dict"), task.state_dict()
    if not isinstance(weights, Mapping):
        raise CheckpointError("The checkpoint contains no weights ('state_dict').")
    missing, unexpected = sorted(task_weights.keys() - weights.keys()), sorted(weights.keys() - task_weights.keys())
    # only tensors have shapes: a module's get_extra_state may return any object
    pairs = {name: (weights[name], task_weights[name]) for name in task_weights.keys() & weights.keys()}
    shapes = [
        f"{name}: {tuple(stored.shape)} in the checkpoint, {tuple(current.shape)} in the task"
        for name, (stored, current) in pairs.items()
        if hasattr(stored, "shape") and hasattr(current, "shape") and stored.shape != current.shape
    ]
    # torch would load the weights that fit before it raises an error, which would leave the task half loaded
    if shapes or (strict and (missing or unexpected)):
        problem = differences(missing, unexpected, shapes)
        hint = did_you_mean(missing[0], unexpected) if missing and unexpected else ""
        raise CheckpointError(f"The checkpoint does not fit the model of {type(task).__name__}: {problem}.{hint}")
    if state_dicts is None:
        task.load_state_dict(dict(weights), strict=strict)
    else:
        state_dicts.load_model(task, weights, strict)


# --- optimizers -------------------------------------------------------------------------------------------------------
def add_saved_groups(task: "Task", optimizers: Sequence[Optimizer], saved: Mapping[str, Any]) -> None:
    """Add the parameter groups that the saved run added to its optimizers after configure_optimizers (finetuning).

    Only groups with a frozen parameter are added. If any other group is missing, configure_optimizers has changed,
    which is an error.
    """
    parameters = dict(task.named_parameters())
    for optimizer, state in zip(optimizers, saved.get("optimizer_states", ()), strict=False):
        for group in state.get("param_groups", ())[len(optimizer.param_groups) :]:
            added = [parameters[name] for name in group["params"] if name in parameters]
            if len(added) == len(group["params"]) and not all(parameter.requires_grad for parameter in added):
                # with its settings: otherwise, the fingerprint would contain torch's defaults until they are loaded
                optimizer.add_param_group({**group, "params": added})


# --- learning rate schedulers -----------------------------------------------------------------------------------------
class Replay(NamedTuple):
    """Result of advancing a learning rate scheduler with changed settings to the saved step."""

    optimizer: int
    """Index of the scheduler's optimizer."""
    settings: list[dict[str, Any]]
    """Settings of the optimizer's parameter groups after the replay."""


def replay_schedules(trainer: "Trainer", saved: Mapping[str, Any], before: Mapping[str, Any]) -> dict[int, Replay]:
    """Advance the schedulers with changed settings to the saved step. Return the replays, keyed by scheduler index.

    The learning rate then follows the current schedule. Schedulers are not replayed if they include ReduceLROnPlateau,
    if the task steps them, or if an optimizer has more than one of them, because each one multiplies the others'
    results.
    """
    optimization, replays = trainer.current_run.optimization, {}
    optimizers = [getattr(optimizer, "original", optimizer) for optimizer in optimization.optimizers]
    scheduled = [getattr(config.scheduler, "optimizer", None) for config in optimization.schedulers]
    for index, config in enumerate(optimization.schedulers):
        changed = changed_schedule(trainer, before, index)
        if not changed:
            continue
        # Replayed, not restored: with the old state and a new length, a cosine schedule would rise again, because torch
        # multiplies the current rate. In a test, the rate rose from 3.9e-7 to 9.2e-4.
        scheduler, optimizer, by_task = config.scheduler, scheduled[index], optimization.own_scheduler_step
        if (
            isinstance(scheduler, LRScheduler)
            and not _has_plateau(scheduler)
            and scheduled.count(optimizer) == 1
            and not by_task
        ):
            steps = saved["lr_schedulers"][index].get("last_epoch")
            # if the saved count has a different unit, count from the start of the run in the new unit
            if not isinstance(steps, int) or changed.keys() & {"interval", "frequency"}:
                state = trainer.state
                steps = (state.global_step if config.interval == "step" else state.scheduled_epochs) // config.frequency
            replays[index] = Replay(optimizers.index(optimizer), _replay(scheduler, optimizer, steps))
        elif "class" in changed:
            raise _other_class("learning rate scheduler", *changed["class"])
    return replays


def _other_class(name: str, was: str, now: str) -> CheckpointError:
    # torch would load the old state, and then fail in the first step or train with the old settings
    return CheckpointError(
        f"The checkpoint's {name} is {was}, but the task now returns {now}, which cannot load that state. Return "
        f"{was} from configure_optimizers, or start a new run from the weights alone (load_from_checkpoint)."
    )


def changed_schedule(trainer: "Trainer", before: Mapping[str, Any], index: int) -> dict[str, tuple[Any, Any]]:
    """Return the saved and current values of each scheduler setting that differs from the checkpoint, keyed by name."""
    now = fingerprint.section_of(trainer.current_run.fingerprint, f"schedulers.{index}")
    was = fingerprint.section_of(before, f"schedulers.{index}")
    return {name: (was[name], now[name]) for name in now.keys() & was.keys() if was[name] != now[name]}


def _has_plateau(scheduler: Any) -> bool:
    return isinstance(scheduler, ReduceLROnPlateau) or any(map(_has_plateau, schedulers_within(scheduler)))


def _replay(scheduler: Any, optimizer: Any, steps: int) -> list[dict[str, Any]]:
    """Advance a new scheduler by `steps` (at 4 us each). Return the settings that change in each parameter group."""
    before = [fingerprint.settings_of(group) for group in optimizer.param_groups]
    mark_stepped(optimizer, True)  # otherwise the scheduler warns that the optimizer has not stepped
    try:
        for _ in range(steps):
            scheduler.step()
    except ValueError as error:
        raise ConfigError(
            f"{type(scheduler).__name__} covers fewer than the {steps} steps the run has already taken: "
            f"{error}. Set max_epochs and max_steps to at least their earlier values."
        ) from error
    settings = []
    for group, was in zip(optimizer.param_groups, before, strict=True):
        now = fingerprint.settings_of(group)
        moved = {name for name, value in now.items() if name in fingerprint.SCHEDULED or value != was.get(name)}
        settings.append({name: group[name] for name in moved})
    return settings


def load_schedulers(
    trainer: "Trainer", saved: Mapping[str, Any], before: Mapping[str, Any], replays: Mapping[int, Replay]
) -> list[SettingChange]:
    """Load the schedulers' states except for changed settings, and return the changes in learning rates."""
    rates = []
    for index, config in enumerate(trainer.current_run.optimization.schedulers):
        scheduler, state = config.scheduler, saved["lr_schedulers"][index]
        if index not in replays:
            current = scheduler.state_dict()
            names = {name.removeprefix("state.") for name in changed_schedule(trainer, before, index)}
            scheduler.load_state_dict({**state, **{name: current[name] for name in names & current.keys()}})
            continue
        was = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
        for group, settings in zip(scheduler.optimizer.param_groups, replays[index].settings, strict=True):
            group.update(settings)
        now = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
        rates.append(SettingChange("learning rate", *((was[0], now[0]) if len({*was, *now}) <= 2 else (was, now))))
    return rates


# --- changed settings -------------------------------------------------------------------------------------------------
def find_changes(
    trainer: "Trainer", before: Mapping[str, Any], rescheduled: Collection[int], reordered: Collection[int]
) -> Changes:
    """Return, on every rank, how rank 0's settings differ from those of the saved run. All ranks must call this.

    Args:
        before: the checkpoint's fingerprint, with groups in the current order.
        rescheduled: see `fingerprint.compare`.
        reordered: optimizers whose parameters are in a different order.

    Raises ConfigError, on every rank, if a step's samples would change mid-epoch, or if a difference is not allowed
    under `bitwise`.
    """
    run, state = trainer.current_run, trainer.state
    samples, numerics = fingerprint.below("samples", run.data.samples), fingerprint.below("numerics", run.numerics)
    changes = fingerprint.compare(before, samples | run.fingerprint | numerics, rescheduled, run.bitwise)
    if trainer.is_global_zero and fingerprint.CONTENT in before:
        names = run.training_data.changed_content(before[fingerprint.CONTENT])
        # on another machine, the same samples may differ in their low-order bits, which is not an error
        (changes.changed if fingerprint.is_elsewhere(before) else changes.samples).extend(
            SettingChange(fingerprint.SAMPLES + (name and f" of {name}"), "saved ones", "different ones")
            for name in names
        )
    order = ("saved order", "matched by name")
    changes.changed += [SettingChange(f"optimizers.{index}.params", *order) for index in reordered]
    # ranks may have different values (threads, the length of a share of the data) but must make the same decision
    changes = cast(Changes, trainer.strategy.collectives.broadcast(changes))
    dealt_out = fingerprint.section_of(before, "samples")
    is_done = bool(dealt_out) and dealt_out[fingerprint.ROUNDS] == state.epoch_rounds
    is_mid_epoch = state.epoch_steps > 0 and not state.epoch_ended
    if is_mid_epoch and not is_done and changes.samples and trainer.resume_at == "step" and run.resumes_same_run:
        raise ConfigError(
            f"The checkpoint was saved in the middle of epoch {state.epoch} (after step {state.epoch_steps}), and the "
            f"samples in each step have changed: {_list_changes(changes.samples)}. Undo these changes, set "
            f"trainer.resume_at=epoch to end this epoch and start the next, or start a new run with resume=PATH."
        )
    allowed = ("reproducible", fingerprint.LEFT_OUT_SAMPLES)
    data = [change for change in changes.samples if change.name.startswith(fingerprint.DATA)]
    differing = [change for change in changes.changed + changes.restored + data if change.name not in allowed]
    if run.bitwise and before.get("training.reproducible", "bitwise") == "bitwise" and differing:
        raise ConfigError(
            f"A run with reproducible=bitwise would not stay bitwise identical: {_list_changes(differing)}. Undo the "
            f"changes, or resume with reproducible=order, which preserves only samples and random numbers."
        )
    if is_mid_epoch and changes.samples:
        changes.end_epoch = not is_done
        run.end_epoch_here(dealt_out)
    return changes


def _list_changes(changes: Sequence[SettingChange]) -> str:
    return ", ".join(map(str, changes))


def log_changes(trainer: "Trainer", changes: Changes, rates: Sequence[SettingChange]) -> None:
    """On rank 0, log the differences from the saved run, and whether the new or the saved values are used."""
    rounding = f"Low-order bits may now differ: {_list_changes(changes.rounding)}." if changes.rounding else ""
    if not trainer.is_global_zero or not (changes.samples or changes.changed or changes.restored):
        if trainer.is_global_zero and rounding:
            log.info("%s", rounding)
        return
    state, lines = trainer.state, ["The run resumes with settings that differ from the checkpoint."]
    if changes.samples:
        at = f"; epoch {state.epoch} ends here, after {state.epoch_steps} steps" if changes.end_epoch else ""
        lines.append(f"New values that change the samples in each step: {_list_changes(changes.samples)}{at}.")
    if changes.changed:
        lines.append(f"New values: {_list_changes([*changes.changed, *rates])}.")
    if changes.restored:
        restored = ", ".join(f"{name}={was} (not {now})" for name, was, now in changes.restored)
        lines.append(
            f"Values from the checkpoint: {restored}. To change them, set them in on_train_start, or start a new run "
            f"from the weights (load_from_checkpoint)."
        )
    log.warning("%s", "\n".join(filter(None, [*lines, rounding])))


# --- the complete state -----------------------------------------------------------------------------------------------
def load_rest(trainer: "Trainer", saved: Mapping[str, Any], resumes: bool) -> None:
    """Load everything except the loop state and the weights from a checkpoint.

    Args:
        resumes: True if the run is resuming from a stored checkpoint, False if another process in an elastic run sent
            the contents.
    """
    run, state_dicts = trainer.current_run, trainer.strategy.state_dicts
    optimizers = run.optimization.optimizers
    _require_complete(trainer, saved)
    before = dict(saved.get("fingerprint") or {})
    states, reordered, replays, rescheduled, changes = [], [], {}, set[int](), Changes()
    for index, (optimizer, saved_state) in enumerate(zip(optimizers, saved["optimizer_states"], strict=True)):
        kind = kernels.class_of(optimizer)
        was = before.get(f"optimizers.{index}.class", kind)
        if was != kind:
            raise _other_class(f"optimizer {index}" if len(optimizers) > 1 else "optimizer", was, kind)
        names = state_dicts.parameter_names(run.task, optimizer)
        state, groups = numbered(kind, saved_state, names)
        before |= _in_current_order(before, index, groups)
        if groups and names is not None and [group["params"] for group in saved_state["param_groups"]] != names:
            reordered.append(index)
        states.append(state)
    # The order matters: a replay changes the settings of the optimizers' groups, loading the optimizers restores the
    # saved settings, and load_schedulers applies the settings of replayed schedules again.
    if resumes:
        replays = replay_schedules(trainer, saved, before)
        rescheduled = {replay.optimizer for replay in replays.values()}
        changes = find_changes(trainer, before, rescheduled, reordered)
    for optimizer, state in zip(optimizers, states, strict=True):
        try:
            state_dicts.load_optimizer(optimizer, state)
        except ValueError as error:
            raise CheckpointError(f"The state of {type(optimizer).__name__} does not match: {error}") from error
        # otherwise a learning rate scheduler warns if the resumed run starts with the end of an epoch
        mark_stepped(optimizer, trainer.global_step > 0)
    log_changes(trainer, changes, load_schedulers(trainer, saved, before, replays))
    # from now on, the saved settings are the run's settings, including for the next resume
    keys = {name for name in run.fingerprint if name.startswith("optimizers.") and name in before}
    run.fingerprint.update({name: before[name] for name in keys if not fingerprint.follows_schedule(name, rescheduled)})
    for name, component in run.parts().items():
        if name in saved:
            component.load_state_dict(saved[name])


def _require_complete(trainer: "Trainer", saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a checkpoint contains only weights or a different number of optimizers or schedulers."""
    run = trainer.current_run
    if "state" not in saved:
        foreign = run.source is not None and is_file(to_location(run.source))
        hint = " To resume a Lightning run from its file, use `legato lightning SCRIPT`." if foreign else ""
        raise CheckpointError(
            f"The checkpoint contains only weights (save_weights_only), so a run cannot resume from it. Start a new "
            f"run from the weights with load_from_checkpoint.{hint}"
        )
    for kind, current, states in (
        ("optimizer", run.optimization.optimizers, saved["optimizer_states"]),
        ("learning rate scheduler", run.optimization.schedulers, saved["lr_schedulers"]),
    ):
        if len(current) != len(states):
            raise CheckpointError(
                f"The checkpoint has {counted(len(states), kind)}, but the task returns {len(current)}. Return "
                f"{len(states)}."
            )


def _in_current_order(before: Mapping[str, Any], index: int, places: Sequence[int]) -> dict[str, Any]:
    """Return the saved settings of an optimizer's groups, keyed by the groups' current indices."""
    groups = [fingerprint.section_of(before, f"optimizers.{index}.groups.{place}") for place in places]
    return {
        name: value
        for number, group in enumerate(groups)
        for name, value in fingerprint.below(f"optimizers.{index}.groups.{number}", group).items()
    }
