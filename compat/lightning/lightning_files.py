"""Converts a run's progress to and from the format of Lightning's checkpoint files."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base.errors import CheckpointError
from ...trainer.state import State

log = logging.getLogger("legato")

LIGHTNING = "pytorch-lightning_version"
"""Key that exists only in Lightning's files."""
FORMAT_VERSION = "2.6.6"
"""Version of Lightning whose format Legato writes."""
SCALER = "MixedPrecision"
"""Key of the loss scale."""
TRAINED, AVERAGING = "current_model_state", "averaging_state"
"""Keys of Lightning's weight averaging, which stores averages as `state_dict` and training weights separately."""


# --- reading ----------------------------------------------------------------------------------------------------------
def contents_of(trainer: Any, path: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a Lightning file to the contents of a Legato checkpoint. Log which parts are missing from the file.

    The contents retain Lightning's keys, because the program's hooks may read them.
    """
    contents = {**saved, "state_dict": saved.get(TRAINED, saved["state_dict"]), "callback_metrics": {}}
    contents["precision"] = saved.get(SCALER) or saved.get("native_amp_scaling_state") or {}
    run = trainer.current_run
    if run.stage != "fit":
        return contents
    progress = progress_of(saved, run.task.automatic_optimization, trainer.accumulate_grad_batches)
    # Lightning's files do not contain the number of replicas, so the current setting is used, as for a new run
    replicas = trainer.replicas if trainer.replicas is not None else trainer.strategy.data_ranks.size
    contents["state"] = State(**{**progress, "replicas": replicas, "seed": trainer.seed}).to_dict()
    if trainer.is_global_zero:
        _log_progress(trainer, path, saved, progress)
    return contents


def _log_progress(trainer: Any, path: Path, saved: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
    rounds, step, states = progress["epoch_rounds"], progress["global_step"], saved.get("callbacks") or {}
    place = f"epoch {progress['epoch']}" + (f" after {rounds} batches" if rounds else "")
    lines = [f"Lightning {saved[LIGHTNING]} wrote {path}. Resuming at step {step} in {place}."]
    state_keys = {callback.state_key for callback in trainer.callbacks}
    left = sorted({key.partition("{")[0] for key, state in states.items() if state and key not in state_keys})
    if left:
        lines.append(f"Not restored: the state of {', '.join(left)}, because this run has no such callback.")
    if rounds:
        lines.append("Values logged so far in this epoch are not in the file, so the means omit these values.")
    lines.append(f"A loader that shuffles now uses Legato's order, which depends on seed={trainer.seed} and the epoch.")
    log.info("%s", "\n".join(lines))


def progress_of(saved: Mapping[str, Any], automatic: bool, accumulate: int) -> dict[str, Any]:
    """Return the fields of `State` that can be read from a Lightning file.

    If the checkpoint was saved at the end of an epoch, after the schedulers stepped, the run continues with the next
    epoch. The batches of an unfinished step are processed again, because their gradients were not applied.

    Raises CheckpointError if the file does not record the run's progress.
    """
    try:
        fit = saved["loops"]["fit_loop"]
        epochs, batches = fit["epoch_progress"]["current"], fit["epoch_loop.batch_progress"]
        epoch, begun, is_last = epochs["processed"], epochs["started"] > epochs["processed"], batches["is_last_batch"]
        done, total = batches["current"]["processed"] if begun else 0, batches["total"]["processed"]
        evaluated = fit.get("epoch_loop.val_loop.batch_progress", {}).get("is_last_batch", False)
        validated = batches["current"]["completed"] == done and evaluated
        step = int(saved["global_step"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"The checkpoint from Lightning {saved.get(LIGHTNING)} does not contain the progress of its run ({error}). "
            "Upgrade files from older versions: python -m lightning.pytorch.utilities.upgrade_checkpoint FILE. To "
            "load only the weights, use load_from_checkpoint."
        ) from None
    # files do not contain the gradients of an unfinished step, so its batches are processed again
    left = 0 if is_last else done % accumulate
    within = begun and not is_last
    return {
        "global_step": step if automatic else total,
        "epoch": epoch + (begun and is_last),
        "scheduled_epochs": epoch + (begun and is_last),
        "plateau_step": step if automatic else total,
        "epoch_steps": (done - left) // accumulate if within else 0,
        "epoch_rounds": done - left if within else 0,
        "rounds": total - left,
        "elapsed": _seconds_of(saved),
        "logged_at": step if automatic else total,
        "validated_at": (step if automatic else total) if validated and within and done else -1,
    }


def _seconds_of(saved: Mapping[str, Any]) -> float:
    timer = saved.get("callbacks", {}).get("Timer", {})
    return float(timer.get("time_elapsed", {}).get("train", 0.0))


# --- writing ----------------------------------------------------------------------------------------------------------
def setting(contents: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return a setting from the fingerprint in a checkpoint, or the default if the setting is missing."""
    return (contents.get("fingerprint") or {}).get(name, default)


def is_at_end(contents: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint was saved between the last batch of an epoch and the end of that epoch."""
    rounds = setting(contents, "samples.batches of an epoch")
    return bool(rounds) and contents["state"]["epoch_rounds"] >= rounds


def loops_of(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's progress as the states of Lightning's loop objects."""
    state = contents["state"]
    ended = state["epoch_ended"] or is_at_end(contents)
    automatic = setting(contents, "training.automatic_optimization", default=True)
    rounds, step = state["rounds"], state["global_step"]
    of_epoch = setting(contents, "samples.batches of an epoch") or rounds // max(1, state["epoch"])
    epoch, within = state["epoch"], state["epoch_rounds"] > 0 and not ended
    done = state["epoch_rounds"] if within or ended else of_epoch
    steps = state["epoch_steps"] if within or ended else step // max(1, epoch)
    validated = state["validated_at"] == step or (not within and state["validated_at"] > 0)
    # Lightning saves in on_train_batch_end, before the batch is counted as completed. After a validation run that
    # follows the batch, all counts are complete.
    behind = int(within and not validated)
    optimizer_steps = state["optimizer_steps"]
    optimizer, manual = ((step, steps), (0, 0)) if automatic else ((0, 0), (optimizer_steps, optimizer_steps))
    evaluated = _batches(int(validated), int(validated), 0, validated)
    nothing = {"state_dict": {}, "batch_progress": _batches(0, 0, 0, False)}
    epochs = {"ready": epoch + (within or ended), "started": epoch + (within or ended)}
    epochs |= {"processed": epoch + ended, "completed": epoch}
    fit = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": step - behind},
        "epoch_loop.batch_progress": _batches(rounds, done, behind, not within and rounds > 0),
        "epoch_loop.scheduler_progress": {"total": _counts(0), "current": _counts(0)},
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": {"total": _counts(optimizer[0]), "current": _counts(optimizer[1])},
                "zero_grad": {
                    "total": _counts(optimizer[0], "started"),
                    "current": _counts(optimizer[1], "started"),
                },
            }
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": {
            "total": _counts(manual[0]),
            "current": _counts(manual[1]),
        },
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": evaluated,
        "epoch_progress": {"total": dict(epochs), "current": dict(epochs)},
    }
    return {"fit_loop": fit, "validate_loop": nothing, "test_loop": nothing, "predict_loop": nothing}


def _counts(count: int, *more: str) -> dict[str, int]:
    return dict.fromkeys(("ready", "completed", *more), count)


def _batches(total: int, current: int, behind: int, is_last: bool) -> dict[str, Any]:
    """Return batch progress in Lightning's form, with `behind` batches processed but not yet completed."""
    progress = {}
    for name, count in (("total", total), ("current", current)):
        progress[name] = {**_counts(count, "started", "processed"), "completed": count - behind}
    return {**progress, "is_last_batch": is_last}
