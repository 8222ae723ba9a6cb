"""Conversion between the contents of a run's checkpoint and those of Lightning's checkpoint files.

What a run takes over from such a file is chosen when it resumes (`progress_of`, `take_over`), where its callbacks and
optimizers are known. `as_lightning` makes the other direction, from a checkpoint alone.
"""

import ast
import logging
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler

from ...base.errors import CheckpointError
from ..checkpoints.foreign import LIGHTNING
from .left_out import LEFT_OUT

if TYPE_CHECKING:
    from ...callbacks.callback import Callback
    from ..trainer import Trainer

log = logging.getLogger("legato")

FORMAT_VERSION = "2.6.6"
"""Version of Lightning whose format `as_lightning` writes."""
SCALER = "MixedPrecision"
"""Key of the loss scale in Lightning's files."""
TRAINED, AVERAGING = "current_model_state", "averaging_state"
"""Keys of Lightning's weight averaging, which stores the average as `state_dict` and the trained weights apart."""
OWN_KEYS = {
    *("state", "run_id", "numerics", "fingerprint", "precision", "metrics", "callback_metrics", "data", "callbacks"),
    *("datamodule", "datamodule_name", "versions", "config"),
}
"""Keys of a checkpoint's contents that Lightning's files have not, or have in another form."""


WITHOUT_COUNTERPART = ("Checkpoint", "ExponentialMovingAverage")
"""Callbacks whose state Lightning's do not load: it names directories, or is stored elsewhere in the file."""


def is_lightning(saved: Mapping[str, Any]) -> bool:
    """Return whether these are the contents of Lightning's file."""
    return LIGHTNING in saved and "state" not in saved


# --- from Lightning ---------------------------------------------------------------------------------------------------
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


def take_over(trainer: "Trainer", saved: dict[str, Any]) -> None:
    """Turn the contents of Lightning's file into those of a checkpoint for this run, and log what is left out."""
    found: dict[str, Any] = {key: saved[key] for key in ("optimizer_states", "lr_schedulers") if key in saved}
    found["state_dict"] = saved.get(TRAINED, saved["state_dict"])
    found["precision"] = saved.get(SCALER) or saved.get("native_amp_scaling_state") or {}
    found["callback_metrics"] = {}
    found |= find_states(trainer, saved)
    if trainer.is_global_zero:
        states = (saved.get("callbacks") or {}).items()
        taken = {key for key, _ in states for callback in trainer.callbacks if is_state_of(callback, key)}
        left = {key.partition("{")[0] for key, state in states if state and key not in taken}
        _log_takeover(trainer, saved, found, sorted(left))
    saved.clear()
    saved.update(found)


def find_states(trainer: "Trainer", saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the data module and of callbacks in Lightning's file, under the keys of this run."""
    module, states = trainer.current_run.datamodule, dict(saved.get("callbacks") or {})
    found: dict[str, Any] = {}
    for callback in trainer.callbacks:
        key = next((key for key in states if is_state_of(callback, key)), None)
        state = _average_of(saved) if is_a(callback, "ExponentialMovingAverage") else None
        if key is not None:
            state = read_state(callback, key, states.pop(key))
        if state is not None:
            found[callback.state_key] = state
    return {"callbacks": found, "datamodule": {} if module is None else saved.get(type(module).__qualname__, {})}


def is_a(callback: "Callback", name: str) -> bool:
    """Return whether a callback is of a class of this name, or of a subclass."""
    return name in (kind.__name__ for kind in type(callback).__mro__)


def is_state_of(callback: "Callback", key: str) -> bool:
    """Return whether a callback's state is stored under this key of Lightning's file: its own, or its counterpart's."""
    if key == callback.state_key:
        return True
    name, _, arguments = key.partition("{")
    if name == "EarlyStopping" and is_a(callback, name):
        wanted = {"monitor": getattr(callback, "monitor", None), "mode": getattr(callback, "mode", None)}
        return _arguments(arguments) in (wanted, {})
    return name == "Timer" and is_a(callback, name)


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments in Lightning's key of a callback: `EarlyStopping{'monitor': 'loss', 'mode': 'min'}`."""
    try:
        found = ast.literal_eval("{" + text) if text else {}
    except (ValueError, SyntaxError):
        return {"unknown": text}
    return found if isinstance(found, dict) else {"unknown": text}


def read_state(callback: "Callback", key: str, state: Any) -> Any:
    """Return a callback's state as it loads it, from that of its counterpart in Lightning."""
    if is_a(callback, "EarlyStopping") and key != callback.state_key:
        return {
            "wait_count": state["wait_count"],
            "best_score": float(state["best_score"]),
            "patience": state["patience"],
            "stopped_step": 0,  # Lightning trains on, until the next check
            "stopped_epoch": 0,
            "metric": {"from_validation": False, "validated_step": -1},
        }
    return state


def averaging_state(contents: Mapping[str, Any], but: Iterable[str] = ()) -> Mapping[str, Any] | None:
    """Return the state of the callback with whose averages a run is evaluated; `but`: keys of states left out."""
    states = [one for key, one in contents.get("callbacks", {}).items() if key not in but and isinstance(one, Mapping)]
    # the averages of StochasticWeightAveraging, whose state has more, are evaluated when training is over
    return next((one for one in states if one.get("averages") and "rates_before" not in one), None)


def averaged_weights(contents: Mapping[str, Any], but: Iterable[str] = ()) -> Any:
    """Return the weights by which a checkpoint was evaluated: the averages where it holds any."""
    state, weights = averaging_state(contents, but), contents.get("state_dict")
    if state is None or weights is None:
        return weights
    averages = state["averages"]
    return {name: averages[name].to(value.dtype) if name in averages else value for name, value in weights.items()}


def _average_of(saved: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the average of Lightning's weight averaging as the state of an ExponentialMovingAverage."""
    if TRAINED not in saved:
        return None
    weights = saved["state_dict"].items()
    averages = {name: value for name, value in weights if isinstance(value, torch.Tensor) and value.is_floating_point()}
    return {"updates": int(saved.get(AVERAGING, {}).get("n_averaged", 0)), "averages": averages}


def _log_takeover(trainer: "Trainer", saved: Mapping[str, Any], found: Mapping[str, Any], left: list[str]) -> None:
    state, run = trainer.state, trainer.current_run
    taken = ["weights", f"{len(found.get('optimizer_states', ()))} optimizer(s)"]
    taken += ["learning rate schedulers"] if found.get("lr_schedulers") else []
    taken += ["loss scale"] if found["precision"] else []
    taken += ["data module"] if found["datamodule"] else []
    taken += [key.partition("{")[0].partition("[")[0] for key in found["callbacks"]]
    place = f"epoch {state.epoch}" + (f" after {state.epoch_rounds} batches" if state.epoch_steps else "")
    lines = [
        f"{run.source} is a checkpoint of Lightning {saved[LIGHTNING]}. Going on at step {state.global_step} in "
        f"{place} with its {', '.join(taken)}."
    ]
    if left:
        lines.append(f"Not taken over: the state of {', '.join(left)}, for which this run has no callback.")
    if state.epoch_steps:
        lines.append("Not in the file: the values logged in this epoch so far, so that its means are of the rest.")
    lines.append(
        f"A loader that shuffles follows Legato's order from here on, which depends on seed={state.seed} and the epoch."
    )
    log.info("%s", "\n".join(lines))


# --- to Lightning -----------------------------------------------------------------------------------------------------
def as_lightning(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a checkpoint as Lightning's file has them; those of such a file stay as they are.

    Raises CheckpointError for a checkpoint between the last batch of an epoch and its schedulers' step if that step
    cannot be made here.
    """
    if is_lightning(contents):
        return dict(contents)
    found = {key: value for key, value in contents.items() if key not in OWN_KEYS}
    found = {key: value for key, value in found.items() if value or not key.endswith("hyper_parameters")}
    found = {key: value for key, value in found.items() if not key.endswith(LEFT_OUT)}
    for prefix in ("", "datamodule_"):
        if f"{prefix}hyper_parameters" in found:
            found.setdefault(f"{prefix}hparams_name", "kwargs")
    found[LIGHTNING] = FORMAT_VERSION
    state = contents.get("state")
    if state is None:  # weights alone
        return {**found, "loops": {}}
    ended = state["epoch_ended"] or _is_at_end(contents)
    if ended and not state["epoch_ended"] and state.get("scheduled_epochs", 0) <= state["epoch"]:
        found["optimizer_states"], found["lr_schedulers"] = _with_schedulers_stepped(contents)
    found["loops"] = _loops(contents, ended)
    found["global_step"] = _optimizer_steps(contents)
    states = {
        key: one for key, one in contents["callbacks"].items() if key.partition("[")[0] not in WITHOUT_COUNTERPART
    }
    found["callbacks"] = dict(_lightning_state(key, one) for key, one in states.items())
    averaging = averaging_state(contents)
    if averaging is not None:
        found[TRAINED], found[AVERAGING] = contents["state_dict"], {"n_averaged": torch.tensor(averaging["updates"])}
        found["state_dict"] = averaged_weights(contents)
    if contents.get("precision"):
        found[SCALER] = contents["precision"]
    if contents.get("datamodule") and contents.get("datamodule_name"):
        found[contents["datamodule_name"]] = contents["datamodule"]
    return found


def _setting(contents: Mapping[str, Any], part: str, name: str, default: Any) -> Any:
    return ((contents.get("fingerprint") or {}).get(part) or {}).get(name, default)


def _is_at_end(contents: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint was saved between the last batch of an epoch and the end of it."""
    rounds = _setting(contents, "samples", "batches of an epoch", None)
    return bool(rounds) and contents["state"]["epoch_rounds"] >= rounds


def _with_schedulers_stepped(contents: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the optimizers' and schedulers' states after the step that schedulers make at the end of an epoch.

    Lightning makes it before it validates and saves; Legato after that.
    """
    optimizers, schedulers = [dict(one) for one in contents["optimizer_states"]], list(contents["lr_schedulers"])
    automatic = _setting(contents, "training", "automatic_optimization", True)
    described = (contents.get("fingerprint") or {}).get("schedulers", []) if automatic else []
    for index, one in enumerate(described):
        if one["interval"] != "epoch" or (contents["state"]["epoch"] + 1) % one["frequency"]:
            continue
        if one["class"] == "ReduceLROnPlateau":
            continue  # Lightning steps it after it has saved, and so leaves that step out when it resumes
        kind = getattr(lr_scheduler, one["class"], None)
        if (
            kind is None
            or len(optimizers) != 1
            or "_schedulers" in schedulers[index]
            or "lr_lambdas" in schedulers[index]
        ):
            raise CheckpointError(
                f"The checkpoint was saved after the last batch of epoch {contents['state']['epoch']}, before its "
                f"{one['class']} made the step that ends an epoch. Lightning makes it before it saves, and here it "
                f"cannot be made. Convert a checkpoint that was saved when the epoch had ended: "
                f"Checkpoint(save_on_train_epoch_end=True)."
            )
        optimizers[0], schedulers[index] = _stepped(kind, optimizers[0], schedulers[index])
    return optimizers, schedulers


def _stepped(kind: Any, optimizer: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the states of an optimizer and its scheduler after one more step of the scheduler."""
    groups = [{**group, "params": [torch.nn.Parameter(torch.zeros(()))]} for group in optimizer["param_groups"]]
    stand_in = torch.optim.SGD(groups, lr=0.0)
    # without __init__, which makes a first step; the state holds all that it would set but the optimizer
    scheduler = kind.__new__(kind)
    scheduler.optimizer = stand_in
    scheduler.load_state_dict(dict(state))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at its first step it asks for marks that __init__ makes
        scheduler.step()
    moved = [
        {**saved, **{name: group[name] for name in saved.keys() & group.keys() - {"params"}}}
        for saved, group in zip(optimizer["param_groups"], stand_in.param_groups, strict=True)
    ]
    return {**optimizer, "param_groups": moved}, scheduler.state_dict()


def _optimizer_steps(contents: Mapping[str, Any]) -> int:
    """Return how many steps the optimizers have made: under manual optimization Lightning counts those of each."""
    step: int = contents["state"]["global_step"]
    if _setting(contents, "training", "automatic_optimization", True):
        return step
    made = 0
    for optimizer in contents["optimizer_states"]:
        counts = [one["step"] for one in optimizer["state"].values() if isinstance(one, Mapping) and "step" in one]
        made += int(max(counts)) if counts else step  # one that keeps no count is taken to step with each batch
    return made


def loops_of(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the progress of a run as Lightning's loops keep it."""
    return _loops(contents, contents["state"]["epoch_ended"] or _is_at_end(contents))


def _loops(contents: Mapping[str, Any], ended: bool) -> dict[str, Any]:
    state = contents["state"]
    automatic = _setting(contents, "training", "automatic_optimization", True)
    rounds, step = state["rounds"], state["global_step"]
    of_epoch = _setting(contents, "samples", "batches of an epoch", None) or rounds // max(1, state["epoch"])
    epoch, within = state["epoch"], state["epoch_rounds"] > 0 and not ended
    done = state["epoch_rounds"] if within or ended else of_epoch
    steps = state["epoch_steps"] if within or ended else step // max(1, epoch)
    validated = state["validated_at"] == step or (not within and state["validated_at"] > 0)
    # saved when a batch had ended, but for what follows it; after its validation all of it is done
    behind = int(within and not validated)
    made = _optimizer_steps(contents)
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


def _lightning_state(key: str, state: Mapping[str, Any]) -> tuple[str, Any]:
    """Return Lightning's key and state of a callback; those of callbacks without a counterpart as they are."""
    name, _, rest = key.partition("[")
    if name == "EarlyStopping" and "metric" in state:
        monitor, _, mode = rest.removesuffix("]").rpartition(", ")
        return f"EarlyStopping{ {'monitor': monitor, 'mode': mode}!r}", {
            "wait_count": state["wait_count"],
            "stopped_epoch": state["stopped_epoch"],
            "best_score": torch.tensor(float(state["best_score"])),
            "patience": state["patience"],
        }
    if name == "Timer":
        return "Timer", {"time_elapsed": {**dict.fromkeys(("sanity_check", "predict"), 0.0), **state["time_elapsed"]}}
    return key, state
