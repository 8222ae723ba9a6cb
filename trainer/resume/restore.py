"""Restore of a run from a checkpoint: loop state, weights, optimizers, schedulers, and the other parts of the run."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...base.errors import CheckpointError, ConfigError, did_you_mean
from ...base.location import to_location
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
    """Set the trainer's state to the start of a run, or to a checkpoint's.

    A run keeps its seed, and says so where the trainer has another. Raises ConfigError if that one has other replicas.
    """
    state, asked, processes = trainer.state, trainer.replicas, trainer.strategy.data_ranks.size
    if saved is not None and "state" in saved:
        restored = State.from_dict(saved["state"])
        if asked is not None and asked != restored.replicas:
            raise ConfigError(
                f"trainer.replicas={asked}, but the run began with {restored.replicas} replicas, which are fixed for a "
                f"run. Leave trainer.replicas out to go on with it; up to {restored.replicas} processes will do."
            )
        # the seed decides the order of samples: half an epoch of each would repeat some and miss others
        if trainer.seed != restored.seed and trainer.is_global_zero:
            log.info("The run keeps the seed that it began with, %d; seed=%d is ignored.", restored.seed, trainer.seed)
        vars(state).update(restored.to_dict())
        if asked is None and trainer.is_global_zero and restored.replicas > processes:
            log.info(
                "The run began with %d replicas and keeps them: they take turns on %d process%s, so a step has the "
                "samples that it had. For other replicas begin a new run from the weights (Task.load_from_checkpoint).",
                restored.replicas, processes, "es" * (processes > 1),
            )  # fmt: skip
        trainer.saver.run_id = saved.get("run_id") or trainer.saver.run_id
    elif state.global_step == 0:
        state.replicas, state.seed = asked if asked is not None else processes, trainer.seed
    if asked is not None and asked < 1:
        raise ConfigError(f"trainer.replicas={asked}: expected at least 1.")


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
    # torch would load what fits and raise afterwards: a task that is half loaded
    if shapes or (strict and (missing or unexpected)):
        problem = differences(missing, unexpected, shapes)
        hint = did_you_mean(missing[0], unexpected) if missing and unexpected else ""
        raise CheckpointError(f"The checkpoint is of another model than {type(task).__name__}: {problem}.{hint}")
    if state_dicts is None:
        task.load_state_dict(dict(weights), strict=strict)
    else:
        state_dicts.load_model(task, weights, strict)


# --- optimizers -------------------------------------------------------------------------------------------------------
def add_saved_groups(task: "Task", optimizers: Sequence[Optimizer], saved: Mapping[str, Any]) -> None:
    """Add the parameter groups to optimizers that the saved run had added after configure_optimizers (finetuning).

    With frozen parameters alone: another group is missing because configure_optimizers has changed, which is an error.
    """
    parameters = dict(task.named_parameters())
    for optimizer, state in zip(optimizers, saved.get("optimizer_states", ()), strict=False):
        for group in state.get("param_groups", ())[len(optimizer.param_groups) :]:
            added = [parameters[name] for name in group["params"] if name in parameters]
            if len(added) == len(group["params"]) and not all(parameter.requires_grad for parameter in added):
                # the settings of all groups are loaded later; without this one's torch's defaults would be described
                optimizer.add_param_group({**group, "params": added})


# --- learning rate schedulers -----------------------------------------------------------------------------------------
class Replay(NamedTuple):
    """Learning rate scheduler with other settings than the saved one, advanced to the same step."""

    optimizer: int
    """Index of its optimizer."""
    settings: list[dict[str, Any]]
    """Settings of the optimizer's parameter groups after the replay."""


def replay_schedules(trainer: "Trainer", saved: Mapping[str, Any], before: Mapping[str, Any]) -> dict[int, Replay]:
    """Advance each scheduler whose settings changed to the saved step; return them by index.

    The learning rate so follows the schedule as it is set now. Not replayed: ReduceLROnPlateau, schedulers that the
    task steps itself, and several schedulers of one optimizer, each of which multiplies the others' results.
    """
    optimization, found = trainer.current_run.optimization, {}
    optimizers = [getattr(one, "original", one) for one in optimization.optimizers]
    whose = [getattr(config.scheduler, "optimizer", None) for config in optimization.schedulers]
    for index, config in enumerate(optimization.schedulers):
        changed = changed_schedule(trainer, before, index)
        if not changed:
            continue
        # Replayed and not restored: with the new length in the old state a cosine turns round (torch multiplies the
        # rate it finds), and the rate rose from 3.9e-7 to 9.2e-4 in a test.
        scheduler, optimizer, own = config.scheduler, whose[index], optimization.own_scheduler_step
        if (
            isinstance(scheduler, LRScheduler)
            and not _has_plateau(scheduler)
            and whose.count(optimizer) == 1
            and not own
        ):
            steps = saved["lr_schedulers"][index].get("last_epoch")
            # the saved count may be in another unit: then it is counted from the beginning in the new one
            if not isinstance(steps, int) or changed.keys() & {"interval", "frequency"}:
                state = trainer.state
                steps = (state.global_step if config.interval == "step" else state.scheduled_epochs) // config.frequency
            found[index] = Replay(optimizers.index(optimizer), _replay(scheduler, optimizer, steps))
        elif "class" in changed:
            raise _other_class("learning rate scheduler", *changed["class"])
    return found


def _other_class(name: str, was: str, now: str) -> CheckpointError:
    # torch would load the state, settings included, and fail in the first step or train with the old settings
    return CheckpointError(
        f"The checkpoint's {name} is {was}, the task now returns {now}, which cannot go on from that state. Return the "
        f"one from before in configure_optimizers, or begin a new run from the weights alone (load_from_checkpoint)."
    )


def changed_schedule(trainer: "Trainer", before: Mapping[str, Any], index: int) -> dict[str, tuple[Any, Any]]:
    """Return the settings of a scheduler that differ from the checkpoint's, by name: what was, and what is now."""
    own = fingerprint.section_of(trainer.current_run.fingerprint, f"schedulers.{index}")
    was = fingerprint.section_of(before, f"schedulers.{index}")
    return {name: (was[name], own[name]) for name in own.keys() & was.keys() if was[name] != own[name]}


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


def load_schedulers(
    trainer: "Trainer", saved: Mapping[str, Any], before: Mapping[str, Any], replays: Mapping[int, Replay]
) -> list[SettingChange]:
    """Load the schedulers' states, keeping changed settings; return how learning rates change."""
    rates = []
    for index, config in enumerate(trainer.current_run.optimization.schedulers):
        scheduler, state = config.scheduler, saved["lr_schedulers"][index]
        if index not in replays:
            own = scheduler.state_dict()
            names = {name.removeprefix("state.") for name in changed_schedule(trainer, before, index)}
            scheduler.load_state_dict({**state, **{name: own[name] for name in names & own.keys()}})
            continue
        was = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
        for group, settings in zip(scheduler.optimizer.param_groups, replays[index].settings, strict=True):
            group.update(settings)
        now = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
        rates.append(SettingChange("learning rate", *((was[0], now[0]) if len({*was, *now}) <= 2 else (was, now))))
    return rates


# --- settings that have changed ---------------------------------------------------------------------------------------
def find_changes(
    trainer: "Trainer", before: Mapping[str, Any], rescheduled: Collection[int], reordered: Collection[int]
) -> Changes:
    """Return the differences from the saved run, as seen by rank 0; every rank calls it.

    before: the checkpoint's fingerprint, with its groups in the current order.
    rescheduled: see `fingerprint.compare`.
    reordered: optimizers whose parameters are in another order.

    Raises ConfigError, on every rank, for other samples in the middle of an epoch, and for any difference that
    `bitwise` does not allow.
    """
    run, state = trainer.current_run, trainer.state
    samples, numerics = fingerprint.below("samples", run.data.samples), fingerprint.below("numerics", run.numerics)
    changes = fingerprint.compare(before, samples | run.fingerprint | numerics, rescheduled, run.bitwise)
    if trainer.is_global_zero and fingerprint.CONTENT in before:
        names = run.training_data.changed_content(before[fingerprint.CONTENT])
        # on another machine the same samples may differ in their last bits, which is no reason to refuse them
        (changes.changed if fingerprint.is_elsewhere(before) else changes.samples).extend(
            SettingChange(fingerprint.SAMPLES + (name and f" of {name}"), "these", "others") for name in names
        )
    order = ("another order", "matched by name")
    changes.changed += [SettingChange(f"optimizers.{index}.params", *order) for index in reordered]
    # ranks may see different things (threads, a length that a share of the data has), but must decide alike
    changes = cast(Changes, trainer.strategy.collectives.broadcast(changes))
    dealt_out = fingerprint.section_of(before, "samples")
    is_done = bool(dealt_out) and dealt_out[fingerprint.ROUNDS] == state.epoch_rounds
    within = state.epoch_steps > 0 and not state.epoch_ended
    if within and not is_done and changes.samples and trainer.resume_at == "step" and run.resumes_same_run:
        raise ConfigError(
            f"The checkpoint is in the middle of epoch {state.epoch} (after step {state.epoch_steps}), whose samples "
            f"cannot be continued with other samples in a step: {_list_changes(changes.samples)}. Set that as it "
            f"was; or set trainer.resume_at=epoch, which ends this epoch here and begins the next; or begin a new run "
            f"by resume=PATH."
        )
    allowed = ("reproducible", fingerprint.LEFT_OUT_SAMPLES)
    data = [change for change in changes.samples if change.name.startswith(fingerprint.DATA)]
    differing = [change for change in changes.changed + changes.restored + data if change.name not in allowed]
    if run.bitwise and before.get("training.reproducible", "bitwise") == "bitwise" and differing:
        raise ConfigError(
            f"reproducible: bitwise cannot go on with the same bits here: {_list_changes(differing)}. Go on as it was, "
            f"or with reproducible: order, which keeps samples and random numbers but not the last bits."
        )
    if within and changes.samples:
        changes.end_epoch = not is_done
        run.end_epoch_here(dealt_out)
    return changes


def _list_changes(changes: Sequence[SettingChange]) -> str:
    return ", ".join(map(str, changes))


def log_changes(trainer: "Trainer", changes: Changes, rates: Sequence[SettingChange]) -> None:
    """Log the differences from the saved run on rank 0, and whether the new or the saved values count."""
    rounding = f"Last bits may differ from here on, by {_list_changes(changes.rounding)}." if changes.rounding else ""
    if not trainer.is_global_zero or not (changes.samples or changes.changed or changes.restored):
        if trainer.is_global_zero and rounding:
            log.info("%s", rounding)
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
    log.warning("%s", "\n".join(filter(None, [*lines, rounding])))


# --- all of it --------------------------------------------------------------------------------------------------------
def load_rest(trainer: "Trainer", saved: Mapping[str, Any], resumes: bool) -> None:
    """Load all but loop state and weights from a checkpoint.

    `resumes`: the run resumes from it; else another process of an elastic run sent it.
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
    # In this order: a replay moves the settings of the optimizers' groups, loading the optimizers puts the saved ones
    # in their place, and load_schedulers sets those of replayed schedules once more.
    if resumes:
        replays = replay_schedules(trainer, saved, before)
        rescheduled = {replay.optimizer for replay in replays.values()}
        changes = find_changes(trainer, before, rescheduled, reordered)
    for optimizer, state in zip(optimizers, states, strict=True):
        try:
            state_dicts.load_optimizer(optimizer, state)
        except ValueError as error:
            raise CheckpointError(f"The checkpoint's {type(optimizer).__name__} state does not fit: {error}") from error
        # Else a learning rate scheduler warns if the resumed run begins with the end of an epoch.
        mark_stepped(optimizer, trainer.global_step > 0)
    log_changes(trainer, changes, load_schedulers(trainer, saved, before, replays))
    # the saved settings count from here on, also for the next resume
    kept = {name for name in run.fingerprint if name.startswith("optimizers.") and name in before}
    run.fingerprint.update({name: before[name] for name in kept if not fingerprint.follows_schedule(name, rescheduled)})
    for name, part in run.parts().items():
        if name in saved:
            part.load_state_dict(saved[name])


def _require_complete(trainer: "Trainer", saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError for weights alone, and for other numbers of optimizers or schedulers."""
    run = trainer.current_run
    if "state" not in saved:
        foreign = run.source is not None and is_file(to_location(run.source))
        hint = " A run of Lightning's goes on from its file by `legato lightning SCRIPT`." if foreign else ""
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


def _in_current_order(before: Mapping[str, Any], index: int, places: Sequence[int]) -> dict[str, Any]:
    """Return the saved settings of an optimizer's groups under the current numbers of the groups."""
    groups = [fingerprint.section_of(before, f"optimizers.{index}.groups.{place}") for place in places]
    return {
        name: value
        for number, group in enumerate(groups)
        for name, value in fingerprint.below(f"optimizers.{index}.groups.{number}", group).items()
    }
