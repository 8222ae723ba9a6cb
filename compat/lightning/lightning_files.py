"""The progress of a run in Lightning's checkpoint files: read from those that Lightning wrote, and written to ours."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base.errors import CheckpointError
from ...trainer.state import State

log = logging.getLogger("legato")

LIGHTNING = "pytorch-lightning_version"
"""Key that only Lightning's files have."""
FORMAT_VERSION = "2.6.6"
"""Version of Lightning whose format is written."""
SCALER = "MixedPrecision"
"""Key of the loss scale."""
TRAINED, AVERAGING = "current_model_state", "averaging_state"
"""Keys of Lightning's weight averaging, which stores the average as `state_dict` and the trained weights apart."""


# --- reading ----------------------------------------------------------------------------------------------------------
def contents_of(trainer: Any, path: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a checkpoint of Legato's from those of Lightning's file, and log what is not in it.

    They keep Lightning's keys, as hooks of the program look at them.
    """
    contents = {**saved, "state_dict": saved.get(TRAINED, saved["state_dict"]), "callback_metrics": {}}
    contents["precision"] = saved.get(SCALER) or saved.get("native_amp_scaling_state") or {}
    run = trainer.current_run
    if run.stage != "fit":
        return contents
    progress = progress_of(saved, run.task.automatic_optimization, trainer.accumulate_grad_batches)
    # Lightning's files do not say how many replicas there were: those of this start, as for a new run
    replicas = trainer.replicas if trainer.replicas is not None else trainer.strategy.data_ranks.size
    contents["state"] = State(**{**progress, "replicas": replicas, "seed": trainer.seed}).to_dict()
    if trainer.is_global_zero:
        _tell(trainer, path, saved, progress)
    return contents


def _tell(trainer: Any, path: Path, saved: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
    rounds, step, states = progress["epoch_rounds"], progress["global_step"], saved.get("callbacks") or {}
    place = f"epoch {progress['epoch']}" + (f" after {rounds} batches" if rounds else "")
    lines = [f"{path} is a checkpoint of Lightning {saved[LIGHTNING]}. Going on at step {step} in {place}."]
    known = {callback.state_key for callback in trainer.callbacks}
    left = sorted({key.partition("{")[0] for key, state in states.items() if state and key not in known})
    if left:
        lines.append(f"Not taken over: the state of {', '.join(left)}, for which this run has no callback.")
    if rounds:
        lines.append("Not in the file: the values logged in this epoch so far, so that its means are of the rest.")
    lines.append(
        f"A loader that shuffles follows Legato's order from here on, which depends on seed={trainer.seed} and the "
        f"epoch."
    )
    log.info("%s", "\n".join(lines))


def progress_of(saved: Mapping[str, Any], automatic: bool, accumulate: int) -> dict[str, Any]:
    """Return the fields of `State` that Lightning's file tells.

    A checkpoint of the end of an epoch, whose schedulers have stepped, goes on with the next epoch. The batches of an
    unfinished accumulation, whose gradients were not applied yet, are trained on again. Raises CheckpointError if the
    file does not say how far the run was.
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
            f"The checkpoint of Lightning {saved.get(LIGHTNING)} does not say how far its run was ({error}). If it is "
            f"of an older version, convert it first: python -m lightning.pytorch.utilities.upgrade_checkpoint "
            f"FILE. Its weights are read by load_from_checkpoint."
        ) from None
    # gradients of an unfinished window are in no file: its batches are trained on again
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
    """Return a setting in the fingerprint of a run's checkpoint; the default where it is not known."""
    return (contents.get("fingerprint") or {}).get(name, default)


def is_at_end(contents: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint was saved between the last batch of an epoch and the end of it."""
    rounds = setting(contents, "samples.batches of an epoch")
    return bool(rounds) and contents["state"]["epoch_rounds"] >= rounds


def loops_of(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the progress of a run as Lightning's loops keep it."""
    state = contents["state"]
    ended = state["epoch_ended"] or is_at_end(contents)
    automatic = setting(contents, "training.automatic_optimization", default=True)
    rounds, step = state["rounds"], state["global_step"]
    of_epoch = setting(contents, "samples.batches of an epoch") or rounds // max(1, state["epoch"])
    epoch, within = state["epoch"], state["epoch_rounds"] > 0 and not ended
    done = state["epoch_rounds"] if within or ended else of_epoch
    steps = state["epoch_steps"] if within or ended else step // max(1, epoch)
    validated = state["validated_at"] == step or (not within and state["validated_at"] > 0)
    # saved when a batch had ended, but for what follows it; after its validation all of it is done
    # Lightning saves within on_train_batch_end, before it counts the batch as completed
    behind = int(within and not validated)
    made = state["optimizer_steps"]
    optimizer, manual = ((step, steps), (0, 0)) if automatic else ((0, 0), (made, made))
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
    """Return a progress of batches, of which `behind` are processed but not completed."""
    both = {}
    for name, count in (("total", total), ("current", current)):
        both[name] = {**_counts(count, "started", "processed"), "completed": count - behind}
    return {**both, "is_last_batch": is_last}
