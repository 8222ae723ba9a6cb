"""Learning rate schedulers that a resume takes over: their states, or a replay where their settings have changed."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..errors import CheckpointError, ConfigError
from ..torch_private import mark_stepped, schedulers_within
from . import fingerprint
from .fingerprint import Change

if TYPE_CHECKING:
    from ..trainer import Trainer


class Replay(NamedTuple):
    """A learning rate scheduler with other settings than the saved one, advanced to the same step."""

    optimizer: int
    """The index of its optimizer."""
    settings: list[dict[str, Any]]
    """What it has made of the optimizer's parameter groups."""


def replay_schedules(trainer: "Trainer", saved: Mapping[str, Any]) -> dict[int, Replay]:
    """Advance each scheduler whose settings have changed to where the saved one stood; return them by their index.

    So the learning rate becomes that of the schedule which the task makes now. Some cannot be replayed: a plateau's,
    one that the task steps in its own way, and several of one optimizer, each of which multiplies what others made.
    """
    optimization, found = trainer.current_run.optimization, {}
    optimizers = [getattr(one, "original", one) for one in optimization.optimizers]
    whose = [getattr(config.scheduler, "optimizer", None) for config in optimization.schedulers]
    for index, config in enumerate(optimization.schedulers):
        changed = changes_of(trainer, saved, index)
        if not changed:
            continue
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


def changes_of(trainer: "Trainer", saved: Mapping[str, Any], index: int) -> list[Change]:
    """Return which settings of a scheduler differ from the checkpoint's."""
    before = (saved.get("fingerprint") or {}).get("schedulers", ())
    own = trainer.current_run.fingerprint["schedulers"][index]
    return fingerprint.changed_schedule(
        before[index] if index < len(before) else None, saved["lr_schedulers"][index], own
    )


def _position(trainer: "Trainer", saved: Mapping[str, Any], index: int, changed: list[Change]) -> int | None:
    """Return how many steps a scheduler has to have made; None where the saved state does not say."""
    config, state = trainer.current_run.optimization.schedulers[index], trainer.state
    if any(change.name.endswith((" interval", " frequency")) for change in changed):
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
    """Advance a new scheduler; return what it has made of the parameter groups. 4 us a step."""
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


def load_schedulers(trainer: "Trainer", saved: Mapping[str, Any], replays: Mapping[int, Replay]) -> list[Change]:
    """Take over the schedulers' states, with settings of now where they differ; return how learning rates change."""
    rates = []
    for index, config in enumerate(trainer.current_run.optimization.schedulers):
        scheduler, state = config.scheduler, saved["lr_schedulers"][index]
        if index not in replays:
            own, names = (
                scheduler.state_dict(),
                {change.name.rpartition(".")[2] for change in changes_of(trainer, saved, index)},
            )
            scheduler.load_state_dict({**state, **{name: own[name] for name in names & own.keys()}})
            continue
        was = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
        for group, settings in zip(scheduler.optimizer.param_groups, replays[index].settings, strict=True):
            group.update(settings)
        now = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
        rates.append(Change("learning rate", *((was[0], now[0]) if len({*was, *now}) <= 2 else (was, now))))
    return rates
