"""`legato tune`: tries settings on the real task, keeps those that make it faster, and writes them as a config."""

import json
import os
import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from ...base.errors import ConfigError, WorkerError
from ...base.messages import STDOUT
from ...base.run_names import require_local
from ...trainer.processes.signals import handling_end_signals, raise_for_signal
from ..config.check import load_config
from ..config.read import dump_yaml, find_config_file, is_override, parse_yaml
from .measure import CLEARLY_WORSE, PacedTrial, SpeedRatio, compare_in_turn
from .settings import Setting, groups, larger_batches, last_group, of_workers, precisions

HEADER = "# Written by `legato tune`"
PAIRS = 7
"""Pairs of blocks among which the seconds of a setting are shared out."""
SLOW_START = 30.0
"""Seconds until a trial ran that are worth a word: compilation."""


def run_tune(options: Namespace) -> None:
    """Search, printing a line for each setting, and write the overlay, also after Ctrl-C."""
    search = SpeedSearch(options)
    try:
        with handling_end_signals(raise_for_signal):
            search.run()
    finally:
        search.end()
        if search.speed:
            search.write()


class SpeedSearch:
    """A greedy search, one setting after the other, from the config as it is; the best so far is the baseline."""

    def __init__(self, options: Namespace) -> None:
        self.options, self.words = options, list(options.words)
        if not options.seconds > 0:
            raise ConfigError(f"legato tune: --seconds must be more than 0, not {options.seconds:g}.")
        config = load_config(self.words)
        self.values: Mapping[str, Any] = config.values
        if self.values.get("launcher") is not None or self.values["trainer"]["num_nodes"] > 1:
            raise ConfigError("legato tune runs its trials on this machine: say launcher=null trainer.num_nodes=1.")
        files = [word for word in self.words if not is_override(word)]
        self.out = Path(options.out or f"{Path(files[-1]).stem}.tuned.yaml")
        require_local(self.out, "--out")
        if self.out.exists() and not self.out.read_text(encoding="utf-8", errors="replace").startswith(HEADER):
            raise ConfigError(
                f"legato tune: {self.out} is there, and not of `legato tune`. Choose another: --out FILE."
            )
        if not self.out.absolute().parent.is_dir():
            raise ConfigError(f"legato tune: there is no folder {self.out.parent} to write {self.out.name} into.")
        self.files = files
        self.kept: dict[str, Any] = {}
        self.remarks: list[str] = []
        self.speed = 0.0
        """Samples a second of the config as it is."""
        self.facts: Mapping[str, Any] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="legato-tune-"))
        self.trials: list[PacedTrial] = []
        self.baseline: PacedTrial | None = None

    # --- the search -------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Try everything; keep what is faster, if all of it together is."""
        self.baseline = self._start({})
        try:
            self.facts = self.baseline.warm_up()
            self.speed = median(self.baseline.rate() for _ in range(3))
        except WorkerError as error:
            raise WorkerError(f"The config itself does not train: {error}. `legato check` says more.") from None
        _say("setting", "samples/s", "ratio", "note")
        where = f"{self.facts['processes']} x {self.facts['device']}, {self.facts['threads']} threads"
        _say("as it is", f"{self.speed:,.0f}", "1.00", where)
        for group in groups(self.values, self.facts):
            self._try(group)
        for group in of_workers(self.facts):
            self._try(group)
        self._try(last_group(self.values, self.facts))
        if self.options.precision:
            self._try(precisions(self.values))
        if self.options.batch_size:
            self._try(larger_batches(self.values, self.facts), climbs=True)
        if self.kept:
            self._confirm()
        if self.values["trainer"]["reproducible"] == "bitwise" and self.kept:
            self.remarks.append("reproducible: bitwise: this is for a new run; one that has begun keeps its settings")

    def _try(self, settings: Iterable[Setting], climbs: bool = False) -> None:
        """Try settings that exclude each other; end at one that fails or is clearly slower than the one before.

        climbs: end also at the first that is no better.
        """
        best, only = 0.0, tuple(self.options.only or ("",))
        for setting in settings:
            if not any(key.startswith(only) for key in setting.changes):
                continue
            if setting.reason:
                _say(setting.name, "", "", f"not tried: {setting.reason}")
                continue
            result = self._measure(setting)
            if result is None or result.ratio < CLEARLY_WORSE * best or (climbs and not result.better):
                return
            best = 1.0 if result.better else max(best, result.ratio)

    def _measure(self, setting: Setting) -> SpeedRatio | None:
        """Compare a setting with the baseline, whose place it takes where it is faster; None where it failed."""
        assert self.baseline is not None
        rates: list[float] = []
        trial = self._start(setting.changes)

        def rate() -> float:
            rates.append(trial.rate())
            return rates[-1]

        try:
            facts = trial.warm_up()
            result = compare_in_turn(self.baseline.rate, rate)
        except WorkerError as error:
            trial.end(0)
            _say(setting.name, "", "", f"failed: {error}")
            return None
        note = "kept" if result.better else "slower" if result.ratio + result.noise < 1 else "no faster"
        note += f", {setting.effect}" if result.better else ""
        note += f", {facts['seconds']:.0f} s until it ran" if facts["seconds"] > SLOW_START else ""
        _say(setting.name, f"{median(rates):,.0f}", f"{result.ratio:.2f}", f"{note} (±{result.noise:.2f})")
        if result.better:
            self.baseline.end()
            self.baseline, self.facts = trial, facts
            self.kept |= setting.changes
            self.remarks += [setting.advice] if setting.advice else []
        else:
            trial.end()
        return result

    def _confirm(self) -> None:
        """Compare all that was kept with the config as it is: gains need not add up, and one may be luck."""
        assert self.baseline is not None
        plain = self._start(None)
        plain.warm_up()
        result = compare_in_turn(plain.rate, self.baseline.rate)
        plain.end()
        verdict = "faster" if result.better else "not faster: nothing is kept"
        _say("all of it against the config", "", f"{result.ratio:.2f}", f"{verdict} (±{result.noise:.2f})")
        if not result.better:
            self.kept, self.remarks = {}, []

    def _start(self, changes: Mapping[str, Any] | None) -> PacedTrial:
        """Start a trial with what is kept so far and some changes; None: with neither."""
        values = {} if changes is None else {**self.kept, **changes}
        words = [*self.words, *(f"{key}={json.dumps(value)}" for key, value in values.items())]
        trial = PacedTrial(self.folder / str(len(self.trials)), words, self.options.seconds / (2 * PAIRS))
        self.trials.append(trial)
        return trial

    def end(self) -> None:
        """End all processes, and remove their files."""
        for trial in self.trials:
            trial.end(0)
        deadline = time.monotonic() + 5
        while self.folder.exists() and time.monotonic() < deadline:  # processes of several ranks end on their own
            shutil.rmtree(self.folder, ignore_errors=True)

    # --- the overlay ------------------------------------------------------------------------------------------------
    def write(self) -> None:
        """Write a config that extends the given ones by the command line's values and by what is kept."""
        values: dict[str, Any] = {"extends": [_from(self.out, name) for name in self.files]}
        words = (word.partition("=") for word in self.words if is_override(word))
        given = {key: parse_yaml(text, key).values for key, _, text in words}
        for key, value in {**given, **self.kept}.items():
            holder, names = values, key.split(".")
            for name in names[:-1]:
                inner = holder.get(name)
                holder[name] = inner if isinstance(inner, dict) else {"name": inner} if inner else {}
                holder = holder[name]
            holder[names[-1]] = value
        lines = [f"{HEADER} on {datetime.now():%Y-%m-%d}, on {self.facts['processes']} x {self.facts['device']}."]
        lines += [f"# {remark[0].upper()}{remark[1:]}." for remark in self.remarks]
        self.out.write_text("\n".join([*lines, dump_yaml(values)]), encoding="utf-8")
        for line in lines[1:]:
            print(line.removeprefix("# "), file=STDOUT)
        said = f"with {Setting(self.kept).name}" if self.kept else "with nothing, since nothing was faster"
        print(f"Wrote {self.out}, {said}", file=STDOUT, flush=True)


def _from(out: Path, name: str) -> str:
    """Return a config's name as a file beside `out` gives it."""
    return os.path.relpath(find_config_file(Path(name)), out.absolute().parent)


def _say(setting: str, rate: str, ratio: str, note: str) -> None:
    """Print a row of the table."""
    print(f"{setting:<52}  {rate:>11}  {ratio:>5}  {note}".rstrip(), file=STDOUT, flush=True)
