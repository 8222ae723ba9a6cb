"""Plays a scene to its end, through the faults that are in it, and says what it comes to and what it leaves behind."""

import contextlib
import gc
import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import event_files
import psutil
import torch
import torch.distributed as dist
from together.scene import HELD_OUT, SAMPLES, Fault, Net, Scene, Writes, make_loader, make_trainer
from waiting import children

import legato as lg
from legato.loggers.tensorboard import put_last
from legato.trainer.checkpoints import find, reading

TIMES = re.compile(r"time|per_second|seconds|throughput|straggler", re.IGNORECASE)
FILES = re.compile(
    r"metrics\.jsonl|events\.out\.tfevents\.[^/]+|(\.?[a-z]+\.)?lock|run\.json|"
    r"environment\.json|uncommitted\.diff|spikes\.jsonl|epochs\.jsonl|"
    r"checkpoints/index\.json|"
    r"checkpoints/(step-\d{8}|mine)/(model(-\d{5})?\.safetensors|tensors(-\d{5})?\.safetensors|state\.json|manifest\.json)"
)


@dataclass
class Result:
    """What a run came to."""

    weights: dict[str, torch.Tensor]
    points: dict[int, dict[str, float]]
    metrics: dict[str, float]
    kept: dict[str, float | None]
    saved: dict[str, dict[str, torch.Tensor]]
    state: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    """What is wrong with it, whatever it is compared with."""
    stopped: bool = False
    """Whether it was stopped and went on: such a stop saves a checkpoint of its own."""
    keeps_all: bool = False
    """Whether it keeps every checkpoint."""


class Unexpected(AssertionError):
    """A run ended as it must not."""


SET_BY_TORCH = {signal.SIGALRM, signal.SIGCHLD}
"""What the command here uses itself, and what torch's loader sets once and for all where it has workers."""


# --- the state of this process -------------------------------------------------------------------------------------
def process_state() -> dict[str, Any]:
    """Return what a run may change for the whole process and must put back."""
    numbers = [number for number in signal.Signals if number not in (signal.SIGKILL, signal.SIGSTOP)]
    loggers = [logging.getLogger(), logging.getLogger("legato"), logging.getLogger("torch")]
    return {
        "signals": {number.name: signal.getsignal(number) for number in numbers if number not in SET_BY_TORCH},
        "wakeup": _wakeup(),
        "warnings": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "dtype": torch.get_default_dtype(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled),
        "matmul": torch.get_float32_matmul_precision(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "process group": dist.is_initialized(),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "streams": (sys.stdin, sys.stdout, sys.stderr, sys.excepthook, threading.excepthook, sys.unraisablehook),
        "logging": [(logger.level, list(logger.handlers), list(logger.filters), logger.disabled) for logger in loggers],
        "start method": multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
        "collector": gc.isenabled(),
        "temporary files": sorted(os.listdir(os.environ["TMPDIR"])) if "TMPDIR" in os.environ else [],
        "shared memory": sorted(name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name),
    }


def _wakeup() -> int:
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return descriptor


def open_files() -> list[str]:
    """Return what this process has open, but for what has no name."""
    paths = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            paths.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(name for name in paths if name.startswith("/") and not name.startswith(("/proc", "/dev", "/sys")))


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Say what is no longer as it was."""
    problems = []
    for name, old in before.items():
        new = after[name]
        if isinstance(old, dict):
            problems += [
                f"process: {name}: {key} was {old.get(key)}, is {new.get(key)}"
                for key in sorted(old.keys() | new.keys())
                if old.get(key) != new.get(key)
            ]
        elif old != new:
            problems.append(f"process: {name} was {old}, is {new}")
    return problems


def put_back(before: dict[str, Any]) -> None:
    """Undo what a run left changed, so that the next one is not blamed for it."""
    for name, handler in before["signals"].items():
        if handler is not None and signal.getsignal(signal.Signals[name]) != handler:
            signal.signal(signal.Signals[name], handler)
    torch.use_deterministic_algorithms(before["deterministic"][0], warn_only=before["deterministic"][1])
    torch.set_num_threads(before["threads of torch"][0])
    torch.autograd.set_detect_anomaly(*before["anomaly"])
    os.chdir(before["folder"])


# --- a run ---------------------------------------------------------------------------------------------------------
def play(scene: Scene, folder: Path, steps: list[int]) -> Result:
    """Play a scene until it is done; each fault comes at its step of `steps`, each stop too. Raises Unexpected."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = list(steps)
    faults = [Fault(kind, steps.pop(), folder) for kind in scene.faults]
    stops = sorted(steps.pop() for _ in scene.stops_at)
    problems: list[str] = []
    trainer = None
    if "fit before" in scene.around or "validate before" in scene.around:
        (folder / "disarmed").touch()
        trainer = make_trainer(scene, folder, faults)
        if "fit before" in scene.around:
            fit(trainer, scene, faults)
        else:
            trainer.validate(Net(**scene.task), make_loader(HELD_OUT, scene.data, shuffle=False), verbose=False)
        (folder / "disarmed").unlink()
    reused, first = trainer, "auto" if "fit before" not in scene.around else None
    ended_by: list[str] = []
    attempt, left = -1, len(faults) + len(stops) + 1
    while left:
        attempt, left = attempt + 1, left - 1
        changed = {"max_steps": stops[0]} if stops else {}
        trainer = reused if reused is not None and not changed else make_trainer(scene, folder, faults, **changed)
        fired = [fault for fault in faults if fault.fired]
        try:
            task = fit(trainer, scene, faults, resume=first if attempt == 0 and reused is not None else "auto")
        except BaseException as error:
            new = [fault for fault in faults if fault.fired and fault not in fired]
            if make_room(error, folder) and ended_by:
                left += 1
                continue
            if not any(fault.explains(error) for fault in new):
                raise Unexpected(f"attempt {attempt} ended by {type(error).__name__}: {error}") from error
            ended_by += [fault.kind for fault in new]
            continue
        new = [fault.kind for fault in faults if fault.fired and fault not in fired]
        if new and not scene.arguments.get("max_restarts"):  # with it the launcher may have started again
            problems.append(f"{new} happened, and the run ended as if nothing had been")
        if stops:
            stops.pop(0)
            continue
        break
    else:
        raise Unexpected(f"not done after {attempt + 1} attempts, which ended by {ended_by}")
    result = result_of(trainer, task, problems)
    result.stopped = bool(ended_by or scene.stops_at)
    if "evaluate after" in scene.around:
        weights = {name: value.clone() for name, value in task.state_dict().items()}
        results = trainer.validate(task, make_loader(HELD_OUT, scene.data, shuffle=False), verbose=False)
        values = {name: value for metrics in results for name, value in metrics.items()}
        if not values or not all(math.isfinite(value) for value in values.values()):
            problems.append(f"validate after fit found {values}")
        if any(not torch.equal(value, weights[name]) for name, value in task.state_dict().items()):
            problems.append("validate after fit changed the task's weights")
    if "predict after" in scene.around:
        loaders = make_loader(HELD_OUT, scene.data, shuffle=False)
        trainer.predict(task, loaders, return_predictions=False)
        writer = next(callback for callback in trainer.callbacks if isinstance(callback, Writes))
        for index, loader in enumerate(loaders if isinstance(loaders, list) else [loaders]):
            if writer.found(index) != list(range(len(loader.dataset))):
                problems.append(f"predict after fit wrote the samples {writer.found(index)} of loader {index}")
    return result


def make_room(error: BaseException, folder: Path) -> bool:
    """Remove other folders of checkpoints where a run that begins again asks for it; return whether it does."""
    if "contains checkpoints from another run" not in str(error):
        return False
    for name in ("second", "async", "weights"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return True


def fit(trainer: lg.Trainer, scene: Scene, faults: list[Fault], resume: str | None = None) -> Net:
    """Fit a new task; check that the process is as before, however it ends."""
    task = Net(**scene.task)
    fault = next((fault for fault in faults if fault.kind == "data"), None)
    loaders = make_loader(SAMPLES, scene.data, fault), make_loader(HELD_OUT, scene.data, shuffle=False)
    before = process_state()
    persistent = trainer if scene.data.get("persistent") else None  # workers live as long as their loader is known
    processes, files, threads = children(), open_files(), set(threading.enumerate())
    problem: BaseException | None = None
    try:
        trainer.fit(task, *loaders, resume=resume)
    except BaseException as error:
        problem = error
    let_go(problem)
    del loaders
    problems = changes(before, process_state())
    deadline, left = time.monotonic() + 30, []
    while persistent is None and (left := _left(processes, files, threads)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    if problems or left:
        put_back(before)
        raise Unexpected("; ".join(problems + left)) from problem
    if problem is not None:
        raise problem
    return task


def let_go(error: BaseException | None) -> None:
    """Clear the frames of a traceback, as if nobody held it any longer: loaders in them keep their workers alive."""
    while error is not None:
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


SERVERS = ("resource_tracker", "forkserver")


def _left(processes: set[int], files: list[str], threads: set[threading.Thread]) -> list[str]:
    leftovers = [
        f"thread {thread.name} is left"
        for thread in set(threading.enumerate()) - threads
        if thread.name != "tqdm_monitor"
    ]
    for number in children() - processes:
        try:
            line = " ".join(psutil.Process(number).cmdline())
        except psutil.NoSuchProcess:
            continue
        if not any(server in line for server in SERVERS):
            leftovers.append(f"process {number} is left: {line[:200]}")
    new = [name for name in open_files() if name not in files]
    return leftovers + ([f"files are left open: {new}"] if new else [])


def result_of(trainer: lg.Trainer, task: Net, problems: list[str]) -> Result:
    """Return what a run came to; `problems` are added to."""
    run_dir = trainer.run_dir
    assert run_dir is not None
    points = points_of(run_dir, problems)
    check_tensorboard(run_dir, points, problems)
    check_files(run_dir, problems)
    keeper = trainer.checkpoint_callback
    assert keeper is not None
    mine = run_dir / "checkpoints" / "mine"
    if mine.exists():
        find.verify(mine)
    present = {path.name for path in find.checkpoints_in(run_dir / "checkpoints")} - {mine.name}
    if present != set(keeper.scores):
        problems.append(f"on the disk are {sorted(present)}, the callback knows of {sorted(keeper.scores)}")
    saved = {name: reading.read_checkpoint(run_dir / "checkpoints" / name)["state_dict"] for name in sorted(present)}
    state = {name: value for name, value in trainer.state.to_dict().items() if name != "elapsed"}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if not TIMES.search(name)}
    weights = {name: value.detach().clone() for name, value in task.state_dict().items()}
    result = Result(weights, points, metrics, dict(keeper.scores), saved, state, problems)
    result.keeps_all = keeper.save_top_k == -1
    return result


def points_of(run_dir: Path, problems: list[str]) -> dict[int, dict[str, float]]:
    """Return the points of metrics.jsonl by step, without what tells the time."""
    path = run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [record["step"] for record in records]
    if steps != sorted(set(steps)):
        problems.append(f"metrics.jsonl has the steps {steps}")
    return {
        record["step"]: {
            name: float(value)
            for name, value in record.items()
            if not TIMES.search(name) and name not in ("step", "time")
        }
        for record in records
    }


def check_tensorboard(run_dir: Path, points: dict[int, dict[str, float]], problems: list[str]) -> None:
    """Hold TensorBoard's scalars against metrics.jsonl: the same values, each once, but for equal ones of a resume."""
    written: dict[tuple[int, str], list[float]] = {}
    for tag, shown in event_files.points(run_dir).items():
        for step, value in shown:
            if not TIMES.search(tag) and not tag.startswith("~best/"):
                written.setdefault((step, tag), []).append(value)
    expected = {(step, put_last(name)): value for step, values in points.items() for name, value in values.items()}
    doubled = sorted(key for key, values in written.items() if len(values) > 1)
    if doubled:
        problems.append(f"TensorBoard has {doubled[:3]} more than once")
    if written.keys() != expected.keys():
        lacking, more = sorted(expected.keys() - written.keys()), sorted(written.keys() - expected.keys())
        problems.append(f"TensorBoard lacks {lacking[:4]} and has besides {more[:4]}")
    for key in written.keys() & expected.keys():
        if not same(written[key][-1], expected[key], 1e-6):
            problems.append(f"TensorBoard has {written[key]} for {key}, metrics.jsonl {expected[key]}")
            break


def check_files(run_dir: Path, problems: list[str]) -> None:
    """Say which files of a run directory nobody expects."""
    for path in run_dir.rglob("*"):
        name = str(path.relative_to(run_dir))
        if path.is_file() and not FILES.fullmatch(name):
            problems.append(f"{name} is left in the run directory")
        elif path.is_dir() and path.name.startswith("."):
            problems.append(f"the folder {name} is left in the run directory")


def same(ours: float, theirs: float, tolerance: float) -> bool:
    """Return whether two numbers are the same, NaN and infinities too."""
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return True
    return abs(ours - theirs) <= tolerance * max(1.0, abs(theirs))


# --- two results ----------------------------------------------------------------------------------------------------
def differences(ours: Result, theirs: Result, tolerance: float) -> list[str]:
    """Say in what a run differs from the one that it should equal."""
    problems = list(ours.problems)
    problems += _differing("weights", ours.weights, theirs.weights, tolerance)
    for name in ("global_step", "epoch", "epoch_steps", "rounds", "samples_seen", "skipped_steps", "replicas"):
        if ours.state[name] != theirs.state[name]:
            problems.append(f"state.{name} is {ours.state[name]}, not {theirs.state[name]}")
    if ours.points.keys() != theirs.points.keys():
        problems.append(f"points at {sorted(ours.points)}, not at {sorted(theirs.points)}")
    for step in sorted(ours.points.keys() & theirs.points.keys()):
        problems += _values(f"point {step}", ours.points[step], theirs.points[step], tolerance)
    problems += _values("callback_metrics", ours.metrics, theirs.metrics, tolerance)
    more = {name for name in ours.kept.keys() - theirs.kept.keys() if ours.kept[name] is None and ours.stopped}
    if ours.kept.keys() - more != theirs.kept.keys() or (more and not theirs.keeps_all):
        problems.append(f"kept are {ours.kept}, not {theirs.kept}")
    for name in ours.kept.keys() & theirs.kept.keys():
        score, expected_score = ours.kept[name], theirs.kept[name]
        if (score is None) != (expected_score is None) or (
            score is not None and not same(score, expected_score, tolerance)
        ):
            problems.append(f"the score of {name} is {score}, not {expected_score}")
        if name in ours.saved and name in theirs.saved:
            problems += _differing(name, ours.saved[name], theirs.saved[name], tolerance)
    return problems


def _differing(
    subject: str, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float
) -> list[str]:
    if ours.keys() != theirs.keys():
        return [f"{subject}: has {sorted(ours)}, not {sorted(theirs)}"]
    for name in ours:
        tensor, expected = ours[name], theirs[name]
        if tensor.dtype != expected.dtype:
            return [f"{subject}: {name} is {tensor.dtype}, not {expected.dtype}"]
        if not (
            torch.allclose(tensor, expected, rtol=tolerance, atol=tolerance)
            if tolerance
            else torch.equal(tensor, expected)
        ):
            return [f"{subject}: {name} differs by {(tensor.double() - expected.double()).abs().max():.2e}"]
    return []


def _values(subject: str, ours: dict[str, float], theirs: dict[str, float], tolerance: float) -> list[str]:
    problems = []
    if ours.keys() != theirs.keys():
        lacking, more = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
        problems.append(f"{subject} lacks {lacking} and has besides {more}")
    for name in ours.keys() & theirs.keys():
        if not same(ours[name], theirs[name], tolerance):
            problems.append(f"{subject}: {name} is {ours[name]!r}, not {theirs[name]!r}")
    return problems
