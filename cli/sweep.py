"""`legato sweep`: runs a config with different values, each trial as a separate `legato fit`, and ranks the results."""

import csv
import ctypes
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..base.errors import ConfigError, WorkerError
from ..base.messages import STDOUT, tell
from ..base.run_names import require_local
from ..trainer.processes.signals import INTERRUPTED, RESUME_ME, handling_end_signals, raise_for_signal
from ..trainer.runs.directory import find_runs
from .config.check import Config, load_config
from .config.read import is_override
from .runs.text import shortened, table

Values = dict[str, str]
"""A trial's values as override strings, by key."""
MOST_VALUES = 100_000
"""Maximum number of values per key, and of combinations."""
MOST_CHECKED = 200
"""Maximum number of values checked before the first trial. A check takes 10 ms."""
AHEAD = 4
"""Number of trials that Optuna chooses in advance, which limits the number of parallel trials."""
ENDED_FROM_OUTSIDE = (RESUME_ME, INTERRUPTED, -signal.SIGTERM, -signal.SIGINT)
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


# --- values -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Axis:
    """The values for a key: a list, or an interval of numbers. If both bounds are integers, so are the numbers."""

    key: str
    texts: tuple[str, ...]
    """All values, or the bounds of the interval."""
    scale: str = ""
    """"uniform" or "log" for an interval, "" for a list."""

    def draw(self, source: random.Random) -> str:
        """Return a random value."""
        if not self.scale:
            return source.choice(self.texts)
        low, high = map(float, self.texts)
        if self.scale == "log":
            return self._text(math.exp(source.uniform(math.log(low), math.log(high))))
        return self._text(source.uniform(low, high))

    def suggest(self, trial: Any) -> str:
        """Return the value that Optuna chooses for `trial`."""
        if not self.scale:
            return str(trial.suggest_categorical(self.key, self.texts))
        return self._text(trial.suggest_float(self.key, *map(float, self.texts), log=self.scale == "log"))

    def _text(self, number: float) -> str:
        """Format a number with four significant digits, which keeps trial names short."""
        # bounds without a decimal point mean integers, such as a layer width
        is_whole = all(re.fullmatch(r"[-+]?\d+", text) for text in self.texts)
        return str(round(number)) if is_whole else repr(float(f"{number:.4g}"))


def read_axis(word: str) -> Axis | None:
    """Parse the values of `key=VALUES`: `1e-4,1e-3`, `range(32,129,32)`, `log(1e-5,1e-2)` or `uniform(0,1)`.

    Commas inside brackets or quotes do not separate values. Returns None for a single value. Raises ConfigError for
    malformed values.
    """
    key, _, text = word.partition("=")
    if call := re.fullmatch(r"(range|log|uniform)\(([^()]*)\)", text):
        return _read_call(word, key, call[1], call[2].split(","))
    try:  # YAML's parser finds the commas that separate values
        node: Any = yaml.compose(f"[{text}]", Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        if "," in text:
            raise ConfigError(
                f"{word}: the values between commas are not valid YAML. Quote values that are strings."
            ) from error
        return None
    texts = tuple(text[item.start_mark.index - 1 : item.end_mark.index - 1] for item in node.value)
    return Axis(key, tuple(dict.fromkeys(texts))) if len(texts) > 1 else None


def _read_call(word: str, key: str, kind: str, numbers: Sequence[str]) -> Axis:
    with suppress(TypeError, ValueError, OverflowError):
        if kind == "range" and (values := range(*map(int, numbers))):
            return Axis(key, tuple(map(str, values[: MOST_VALUES + 1])))
        low, high = (number.strip() for number in numbers)
        if kind != "range" and (0 if kind == "log" else -math.inf) < float(low) < float(high) < math.inf:
            return Axis(key, (low, high), kind)
    raise ConfigError(
        f"{word}: write range(FIRST, END, STEP) with integers (END is excluded), log(LOW, HIGH) with "
        f"0 < LOW < HIGH, or uniform(LOW, HIGH) with LOW < HIGH."
    )


def list_values(axes: Sequence[Axis], count: int | None, seed: int) -> list[Values]:
    """Return the values of all trials: a grid, or `count` random trials. Increasing `count` only appends trials."""
    interval = next((axis for axis in axes if axis.scale), None)
    if interval is not None:
        if count is None:
            raise ConfigError(
                f"{interval.key} is an interval, so the number of trials is unlimited. Limit it with --random 20 or "
                f"--optuna 20, or list values: {interval.key}={','.join(interval.texts)}."
            )
        # a generator per trial: a larger count does not change the first trials
        sources = (random.Random(f"{seed}/{index}") for index in range(count))
        return [{axis.key: axis.draw(source) for axis in axes} for source in sources]
    if math.prod(len(axis.texts) for axis in axes) > MOST_VALUES:
        raise ConfigError(
            f"A sweep may have at most {MOST_VALUES:,} combinations. Use fewer values, or --random N "
            f"with an interval: uniform(LOW,HIGH) or log(LOW,HIGH)."
        )
    combinations = itertools.product(*(axis.texts for axis in axes))
    grid = [{axis.key: text for axis, text in zip(axes, texts, strict=True)} for texts in combinations]
    if count is not None:
        # shuffled and truncated, since random draws would repeat combinations
        random.Random(seed).shuffle(grid)
    return grid[:count]


def guided_values(
    axes: Sequence[Axis], count: int, seed: int, mode: str, results: Sequence[float | None]
) -> Iterator[Values]:
    """Yield the values that Optuna's TPE sampler chooses, given the `results` of all but the last AHEAD - 1 trials.

    As a result, the values do not depend on the number of parallel trials. The result of a failed trial is None.
    """
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("--optuna needs the optuna package: pip install optuna. Or use --random N.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction=f"{mode}imize", sampler=optuna.samplers.TPESampler(seed=seed))
    for index in range(count):
        if index >= AHEAD:
            value = results[index - AHEAD]
            # failed trials are reported too, so that Optuna avoids values near theirs
            study.tell(index - AHEAD, value, state=optuna.trial.TrialState.FAIL if value is None else None)
        chosen = study.ask()
        yield {axis.key: axis.suggest(chosen) for axis in axes}


# --- trials -----------------------------------------------------------------------------------------------------------
@dataclass
class Trial:
    """A trial in a sweep, with a folder that contains its log and run directory."""

    folder: Path
    values: Values
    state: str = ""
    """"done", "failed" (with the reason in `error`), or "" for an unfinished trial."""
    error: str = ""
    value: float | None = None
    step: int | None = None
    process: "subprocess.Popen[bytes] | None" = None
    devices: str = ""
    """Environment variable NAME=VALUE that assigns devices to the process, or "" to assign none."""

    def read(self, metric: str, mode: str) -> str:
        """Read the result from the run directory, and return the run's state, or "" if it has not started."""
        runs = find_runs(self.folder) if self.folder.is_dir() else []
        if not runs:
            return ""
        state, points = runs[-1].state, runs[-1].metrics
        pairs = zip(points.get(metric, ()), points.get("step", ()), strict=False)
        finite = [(float(value), int(step)) for value, step in pairs if math.isfinite(value)]
        if finite:
            self.value, self.step = (min if mode == "min" else max)(finite, key=lambda pair: pair[0])
        if state == "failed":
            self.state, self.value, self.error = "failed", None, runs[-1].error
        elif state == "done":
            self.state = "done" if finite else "failed"
            self.error = "" if finite else f"{metric!r} was never logged with a finite value."
        return state

    def start(self, words: Sequence[str], devices: str) -> None:
        """Start the trial, or continue it from its newest checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.state, self.error, self.devices = "", "", devices
        values = [f"{key}={text}" for key, text in self.values.items()]
        place = [f"run.root={json.dumps(str(self.folder.parent))}", f"run.name={json.dumps(self.folder.name)}"]
        # runs the module, since the script `legato` may belong to another installation
        command = [sys.executable, "-m", __package__.partition(".")[0], "fit", *words, *values, *place, "resume=auto"]
        # uses the program env, since this process's environment must not change
        command = ["env", devices, *command] if devices else command
        # A new session, so that Ctrl-C in the terminal reaches only the sweep, which then stops each trial once.
        with (self.folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip

    def end(self, metric: str, mode: str) -> None:
        """Read the result after the process exits."""
        assert self.process is not None
        # the run directory holds the state; the exit code matters only if the run did not start
        code, self.process = self.process.returncode, None
        self.read(metric, mode)
        if code and not self.state and code not in ENDED_FROM_OUTSIDE:  # failed before it made a run directory
            lines = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace").split("\n")
            messages = [line for line in lines if re.match(r"legato: |[\w.]+(Error|Exception)\b", line)]
            self.state, self.error = "failed", messages[-1][:300] if messages else f"Ended with exit code {code}."


def _die_with_parent() -> None:
    """Ask the kernel to send this process SIGTERM if the sweep dies, so that the trial is saved (Linux only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGTERM)


# --- the sweep --------------------------------------------------------------------------------------------------------
class Sweep:
    """The trials and the folder of a sweep.

    The config is checked once for each value of each key, with the first value of every other key. Raises ConfigError
    if there is a mistake.
    """

    def __init__(self, options: Namespace) -> None:
        # a sweep always resumes; users may have copied it from the command for a single run
        words = [word for word in options.words if word != "resume=auto"]
        axes = [read_axis(word) if is_override(word) else None for word in words]
        self.axes = [axis for axis in axes if axis is not None]
        self.fixed = [word for word, axis in zip(words, axes, strict=True) if axis is None]
        self.optuna = bool(options.optuna)
        _check_keys([axis.key for axis in self.axes])
        first = {axis.key: axis.texts[0] for axis in self.axes}
        variants = [first | {axis.key: text} for axis in self.axes for text in axis.texts[1:]]
        self.base, *_ = [
            load_config([*self.fixed, *(f"{key}={text}" for key, text in values.items())])
            # checks each value once, not each combination, since a mistake is usually in a single value
            for values in [first, *variants[:MOST_CHECKED]]
        ]
        if self.base.values.get("launcher") is not None:
            raise ConfigError("legato sweep runs its trials on this machine: remove `launcher`, or set launcher=null.")
        self.metric, self.mode = _objective(options, self.base)
        self.trials: list[Trial] = []
        self.results: list[float | None] = []
        seed = self.base.values["seed"]
        if self.optuna:
            self.count = options.optuna
            self.values = guided_values(self.axes, options.optuna, seed, self.mode, self.results)
        else:
            listed = list_values(self.axes, options.random, seed)
            self.count, self.values = len(listed), iter(listed)
        # devices of the parallel trials that are not in use
        self.free = (devices_of_jobs(self.base, options.jobs) if options.jobs > 1 else []) or [""] * options.jobs
        kind = "optuna" if options.optuna else "random" if options.random else "grid"
        self.folder = self.open(kind)
        self.signals: list[int] = []

    def open(self, kind: str) -> Path:
        """Return the folder that an earlier launch of the same command created for this sweep, or a new folder."""
        run, space = self.base.values["run"], {axis.key: [axis.scale, *axis.texts] for axis in self.axes}
        require_local(run["root"], "run.root of a sweep")
        root = Path(run["root"]).absolute() / run["name"]
        identity = {"kind": kind, "space": space, "metric": self.metric, "mode": self.mode, "config": self.base.text()}
        text = json.dumps(identity, indent=1)
        for number in itertools.count():
            folder: Path = root / f"sweep_{number}"
            file = folder / "sweep.json"
            if not folder.exists():
                folder.mkdir(parents=True)
                # includes the full config, since a different value means different trials
                file.write_text(text, encoding="utf-8")
            if file.is_file() and file.read_text(encoding="utf-8") == text:
                return folder
        raise AssertionError

    def run(self) -> None:
        """Run all trials that are not complete."""
        tell(f"{self.count} trials in {self.folder}")
        running: list[Trial] = []
        with handling_end_signals(self._end):
            while True:
                while not self.signals and self.free and (trial := self.next_trial()) is not None:
                    trial.start(self.fixed, self.free.pop(0))
                    running.append(trial)
                    tell(f"{trial.folder.name} started")
                    if self.signals:  # a signal arrived while the trial was starting
                        self._end(0)
                if not running:
                    return
                # polls, since os.wait would also reap processes of libraries
                time.sleep(0.05)
                for trial in [t for t in running if t.process is None or t.process.poll() is not None]:
                    running.remove(trial)
                    self.free.append(trial.devices)
                    trial.end(self.metric, self.mode)
                    done = f"{self.metric}={trial.value:.6g}" if trial.state == "done" else trial.state
                    tell(f"{trial.folder.name} {done or 'interrupted'}{trial.error and ': '}{trial.error}")
                    self.write()

    def next_trial(self) -> Trial | None:
        """Return the next trial to start. Return None if no trial is left or if Optuna needs other results first."""
        while len(self.trials) < self.count:
            if self.optuna:
                # results are reported in order, so that Optuna chooses the same values when the command is repeated
                ended = self.trials[: max(0, len(self.trials) - AHEAD + 1)]
                if not all(trial.state for trial in ended):
                    return None
                self.results[:] = [trial.value for trial in ended]
            values = next(self.values)
            text = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())
            name = f"{len(self.trials):03d}-" + re.sub(r"[^\w.+=,@-]+", "-", text)
            trial = Trial(self.folder / name.encode()[:120].decode(errors="ignore"), values)
            self.trials.append(trial)
            while trial.read(self.metric, self.mode) == "running" and not self.signals:
                time.sleep(0.1)  # a trial from an earlier, killed launch may still be saving
            # a failed trial is repeated, except under Optuna, whose later choices depend on the failure
            if trial.state != "done" and not (trial.state == "failed" and self.optuna):
                return trial
        return None

    def write(self) -> str:
        """Write summary.csv, best trial first, and return its contents as a table."""
        order, sign = ("done", "failed", ""), 1 if self.mode == "min" else -1
        ranked = sorted(self.trials, key=lambda trial: (order.index(trial.state), sign * (trial.value or 0)))
        rows: list[list[Any]] = [[*(axis.key for axis in self.axes), self.metric, "step", "state", "run", "error"]]
        for trial in ranked:
            state = trial.state or "unfinished"
            rows.append([*trial.values.values(), trial.value, trial.step, state, trial.folder.name, trial.error])
        # atomic, since the file may be read while trials are finishing
        beside = self.folder / "summary.csv.tmp"
        with beside.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
        beside.replace(self.folder / "summary.csv")
        return table([[_cell(cell) for cell in row[:-1]] for row in rows])

    def finish(self) -> None:
        """Print the results. Exit with 130 or 75 after a signal, 75 if trials are unfinished, or 1 if one failed."""
        print(self.write(), file=STDOUT, flush=True)
        left = self.count - sum(bool(trial.state) for trial in self.trials)
        failed = sum(trial.state == "failed" for trial in self.trials)
        if left:
            print(f"Trials left to run: {left}. Repeat the command to continue.", file=STDOUT, flush=True)
        if self.signals:
            raise_for_signal(self.signals[0])
        if left:
            sys.exit(RESUME_ME)
        if failed:
            raise WorkerError(f"{failed} of {self.count} trials failed. See log.txt in their folders.")

    def _end(self, number: int) -> None:
        """Signal all trials to save and exit, or kill them after a second Ctrl-C.

        If `number` is 0, repeat the earlier signals.
        """
        self.signals += [number] if number else []
        again = self.signals.count(signal.SIGINT) > 1
        for trial in self.trials:
            if trial.process is not None and trial.process.poll() is None:
                if again:
                    os.killpg(trial.process.pid, signal.SIGKILL)
                else:
                    trial.process.terminate()


def run_sweep(options: Namespace) -> None:
    """Run the unfinished trials and print all results."""
    for name in ("random", "optuna", "jobs"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(f"legato sweep: --{name} must be at least 1, got {getattr(options, name)}.")
    if options.random and options.optuna:
        raise ConfigError("legato sweep: --random and --optuna cannot be combined. Remove one of them.")
    sweep = Sweep(options)
    sweep.run()
    sweep.finish()


def _check_keys(keys: Sequence[str]) -> None:
    if not keys:
        raise ConfigError("legato sweep: no key has several values. Example: task.lr=1e-4,1e-3.")
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"legato sweep: {key} is set twice. List all its values in one argument.")
        if key.partition(".")[0] in ("run", "resume", "checkpoint", "launcher"):
            raise ConfigError(f"legato sweep: {key} cannot vary: it affects where a run is stored, not its result.")


def _objective(options: Namespace, base: Config) -> tuple[str, str]:
    """Return the metric to compare and its mode, "min" or "max"."""
    callbacks = base.values.get("callbacks", {}).values()
    monitored = {entry["monitor"]: entry.get("mode") or "min" for entry in callbacks if entry.get("monitor")}
    metric = options.metric or next(iter(monitored), None)
    mode = options.mode or monitored.get(metric)
    if metric is None or mode is None:
        raise ConfigError(
            "legato sweep: no callback in the config monitors a metric. Set the metric to compare: --metric NAME "
            "with --mode min or --mode max."
        )
    return metric, mode


def devices_of_jobs(config: Config, jobs: int) -> list[str]:
    """Return NAME=VALUE variables that assign devices to `jobs` parallel trials; [] if the config lists the devices."""
    from ..trainer.accelerators import visible_devices  # imports torch

    trainer = config.values["trainer"]
    if isinstance(trainer["devices"], list):
        return []
    (variable, names), devices = visible_devices(trainer["accelerator"]), str(trainer["devices"])
    each = int(devices) if devices.isdecimal() else None
    return [f"{variable}={share}" for share in share_devices(names.split(",") if names else [], jobs, each)]


def share_devices(names: Sequence[str], jobs: int, each: int | None) -> list[str]:
    """Return the devices for each of `jobs` parallel trials, or for fewer trials if there are too few devices.

    Args:
        each: Number of devices per trial. None: an equal share.
    """
    each = each or max(1, len(names) // jobs)
    return [",".join(names[first : first + each]) for first in range(0, len(names) - each + 1, each)][:jobs]


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return shortened(text, 28)
