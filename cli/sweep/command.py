"""`legato sweep`: run a config with many values, and show which were best."""

import hashlib
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError, WorkerError
from ...base.messages import STDOUT, tell
from ...trainer.processes.environment import get_variable
from ...trainer.processes.signals import RESUME_ME, raise_for_signal
from ..config.check import Config, load_config
from ..config.read import MOVED, is_override, name_of_value
from .folder import LOCK, SWEEP, hold, read_json, write_json
from .space import Axis, Guided, Listed, Search, Values, read_axis
from .table import results, write_summary
from .trials import Trial, TrialQueue, share_devices

_MAX_NAME = 120
_MAX_CHECKS = 200


def run_sweep(options: Namespace) -> None:
    """Run the trials that are not done yet, show all results, and exit with 1 if one failed, 75 if some are left."""
    for name in ("random", "optuna", "jobs"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(f"legato sweep: --{name} must be at least 1, not {getattr(options, name)}.")
    if options.random and options.optuna:
        raise ConfigError("legato sweep: --random and --optuna exclude each other. Keep one.")
    sweep = Sweep(options)
    with hold(sweep.open() / LOCK):
        sweep.run()
    sweep.finish()


class Sweep:
    """One sweep: what varies, the config of each trial, and the results."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        words = [word for word in options.words if word != "resume=auto"]
        found = [read_axis(*_key_and_text(word)) if is_override(word) else None for word in words]
        self.axes: list[Axis] = [axis for axis in found if axis is not None]
        self.fixed = [word for word, axis in zip(words, found, strict=True) if axis is None]
        if not self.axes:
            raise ConfigError(
                "legato sweep: nothing varies. Give a key several values: task.lr=1e-4,1e-3, "
                "task.hidden=range(32,129,32), task.lr=log(1e-5,1e-2) or task.dropout=uniform(0,0.5)."
            )
        keys = [axis.key for axis in self.axes]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"legato sweep: {key} is given twice. Give all its values at once.")
            if key.partition(".")[0] in ("run", "resume", "checkpoint", "launcher"):
                raise ConfigError(f"legato sweep: {key} cannot vary: it says where a run is kept or executed.")
        self.base = self._check()
        self.metric, self.mode = self._objective()
        seed = self.base.values["seed"]
        self.search: Search
        if options.optuna:
            self.search = Guided(self.axes, options.optuna, seed, self.mode)
        else:
            self.search = Listed(self.axes, options.random, seed)
        self.directory = Path()
        self.trials: list[Trial] = []
        # one trial at a time sees what the sweep does
        names = visible_devices(self.base) if options.jobs > 1 else []
        devices = share_devices(names, options.jobs, _count_each(self.base))
        self.queue = TrialQueue(self.metric, self.mode, len(devices) or options.jobs, devices)

    # --- before the first trial ---------------------------------------------------------------------------------------
    def _check(self) -> Config:
        """Check the config with each value of each key, the others at their first; return it with the first of all."""
        first = {axis.key: axis.examples()[0] for axis in self.axes}
        base = load_config([*self.fixed, *_words_of(first)])
        if base.values.get("launcher") is not None:
            raise ConfigError("legato sweep runs its trials on this machine: remove `launcher`, or say launcher=null.")
        others = [first | {axis.key: text} for axis in self.axes for text in axis.examples()[1:]]
        for values in others[:_MAX_CHECKS]:
            load_config([*self.fixed, *_words_of(values)])
        return base

    def _objective(self) -> tuple[str, str]:
        """Return the metric to compare, and whether "min" or "max" of it is best."""
        callbacks = self.base.values.get("callbacks", {}).values()
        monitored = {one["monitor"]: one.get("mode") or "min" for one in reversed(callbacks) if one.get("monitor")}
        metric = self.options.metric or next(reversed(monitored), None)
        mode = self.options.mode or monitored.get(metric)
        if metric is None or mode is None:
            missing = "--metric NAME --mode min" if metric is None else "--mode min, or --mode max"
            raise ConfigError(
                f"legato sweep: no callback of the config monitors a metric, so say what to compare: {missing}."
            )
        return metric, mode

    def open(self) -> Path:
        """Find the directory of this sweep, which an earlier start of the same command made, or make one."""
        values = self.base.values
        home = Path(values["run"]["root"]).absolute() / values["run"]["name"]
        kind = "optuna" if self.options.optuna else "random" if self.options.random else "grid"
        space = {axis.key: list(axis.examples()) for axis in self.axes}
        wanted = {
            "kind": kind, "space": space, "metric": self.metric, "mode": self.mode, "version": 1,
            "config": hashlib.sha256(self.base.text().encode()).hexdigest(),
        }  # fmt: skip
        for number in range(10**6):
            self.directory = home / f"sweep_{number}"
            there = read_json(self.directory / SWEEP)
            if there == wanted:
                break
            if there is None and not self.directory.exists():
                self.directory.mkdir(parents=True)
                write_json(self.directory / SWEEP, wanted)
                break
        return self.directory

    # --- the trials ---------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Run what is not done; print the table."""
        tell(f"{self.search.count} trials in {self.directory}")
        self.queue.run(self)
        write_summary(self.directory, self.trials, self.mode)
        print(results(self.trials, self.metric, self.mode), file=STDOUT, flush=True)

    def next_trial(self) -> Trial | None:
        """Return the next trial to start; None where there is none, or none yet."""
        while len(self.trials) < self.search.count:
            index = len(self.trials)
            known = {one.index: (one.result or {}).get("value") for one in self.trials}
            if any(one.result is None for one in self.trials[: max(0, index - self.search.ahead + 1)]):
                return None
            trial = self._make(index, self.search.values(index, known))
            self.trials.append(trial)
            trial.read()
            if trial.result is not None and trial.result["state"] == "failed" and self.search.repeats_failed:
                trial.result = None
            if trial.result is None:
                return trial
        return None

    def ended(self, trial: Trial) -> None:
        """Report a trial whose process has ended, and write the summary."""
        result = trial.result or {"state": "interrupted"}
        said = f"{self.metric}={result['value']:.6g}" if result["state"] == "done" else result["state"]
        error = f": {result['error']}" if "error" in result else ""
        tell(f"trial {trial.index}: {trial.name} {said}{error}")
        write_summary(self.directory, self.trials, self.mode)

    def _make(self, index: int, values: Values) -> Trial:
        config = load_config([*self.fixed, *_words_of(values)])
        given = {key: _value_at(config.values, key) for key in values}
        last = {key: key.rpartition(".")[2] for key in values}
        names = last if len(set(last.values())) == len(last) else {key: key for key in values}
        name = f"{index:03d}-" + ",".join(f"{names[key]}={name_of_value(value)}" for key, value in given.items())
        name = name.encode()[:_MAX_NAME].decode(errors="ignore")
        run = {**config.values["run"], "root": str(self.directory), "name": name}
        changed = replace(config, values={**config.values, "run": run, "resume": "auto"})
        return Trial(index, self.directory / name, given, changed.text())

    def finish(self) -> None:
        """Exit as the results demand: 130 or 75 after a signal, 75 if trials are left, 1 if one failed."""
        left = self.search.count - sum(one.result is not None for one in self.trials)
        failed = sum((one.result or {}).get("state") == "failed" for one in self.trials)
        if left:
            print(f"{left} trials are left: the same command again goes on.", file=STDOUT, flush=True)
        if self.queue.signal:
            raise_for_signal(self.queue.signal)
        if left:
            sys.exit(RESUME_ME)
        if failed:
            raise WorkerError(f"{failed} of {self.search.count} trials failed: see log.txt in their folders.")


def visible_devices(config: Config) -> list[str]:
    """Return the CUDA devices that this process sees, by number or name; none where the trials do not use them."""
    trainer = config.values["trainer"]
    if trainer["accelerator"] in ("cpu", "mps") or isinstance(trainer["devices"], list):
        return []
    given = get_variable("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    import torch

    return list(map(str, range(torch.cuda.device_count())))


def _count_each(config: Config) -> int | None:
    devices = str(config.values["trainer"]["devices"])
    return int(devices) if devices.isdecimal() else None


def _key_and_text(word: str) -> tuple[str, str]:
    key, _, text = word.partition("=")
    return key, text


def _words_of(values: Mapping[str, str]) -> list[str]:
    return [f"{key}={text}" for key, text in values.items()]


def _value_at(values: Any, key: str) -> Any:
    """Return the value of a dotted key; under `trainer:` some move to a key of their own."""
    section, _, name = key.partition(".")
    parts = MOVED.get(name) if section == "trainer" else None
    for part in parts or key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
