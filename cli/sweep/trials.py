"""Runs the trials of a sweep, a few at a time, each in a process of its own, until all are done or a signal comes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.messages import tell
from ...trainer.processes.signals import INTERRUPTED, RESUME_ME, handling_end_signals
from .folder import CONFIG, LOG, PLAN, RESULT, read_json, write_json, write_text

_START = f"import sys; from {__package__}.trial import enter_trial; sys.exit(enter_trial())"
_POLL_SECONDS = 0.05
_ENDED_FROM_OUTSIDE = (RESUME_ME, INTERRUPTED, -signal.SIGTERM, -signal.SIGINT)


@dataclass
class Trial:
    """One trial: its folder, its values, and the text of its config."""

    index: int
    folder: Path
    values: dict[str, Any]
    config: str
    devices: str = ""
    """Value of CUDA_VISIBLE_DEVICES in the trial; "" for the sweep's own."""
    result: dict[str, Any] | None = None
    """State, "done" or "failed", with value, step and seconds or the error; None while it runs or waits."""

    @property
    def name(self) -> str:
        """Text of the values, for messages."""
        return " ".join(f"{key}={value}" for key, value in self.values.items())

    def read(self) -> None:
        """Read the result of an earlier start."""
        self.result = read_json(self.folder / RESULT)


def share_devices(names: Sequence[str], jobs: int, each: int | None) -> list[str]:
    """Return the devices of each of `jobs` trials at a time, fewer if there are too few devices; [] if not for one.

    each: devices of a trial; None: what there is, in equal parts.
    """
    each = each or max(1, len(names) // jobs)
    return [",".join(names[first : first + each]) for first in range(0, len(names) - each + 1, each)][:jobs]


@dataclass
class TrialQueue:
    """Processes of trials. After `run`, `signal` is the one that ended it; 0: none."""

    metric: str
    mode: str
    jobs: int
    devices: Sequence[str] = ()
    """The devices of each trial that runs at a time, as CUDA_VISIBLE_DEVICES has them; () leaves it as it is."""
    signal: int = 0
    running: dict[int, tuple[Trial, "subprocess.Popen[bytes]"]] = field(default_factory=dict)

    def run(self, source: Any) -> None:
        """Run the trials that `source.next_trial()` gives (None: none for now); tell `source.ended(trial)` of each."""
        with handling_end_signals(self._end):
            while True:
                while not self.signal and len(self.running) < self.jobs:
                    trial = source.next_trial()
                    if trial is None:
                        break
                    self._start(trial)
                if not self.running:
                    return
                time.sleep(_POLL_SECONDS)
                for index, (trial, process) in list(self.running.items()):
                    if process.poll() is not None:
                        del self.running[index]
                        self._record(trial, process)
                        source.ended(trial)

    def _start(self, trial: Trial) -> None:
        trial.folder.mkdir(parents=True, exist_ok=True)
        (trial.folder / RESULT).unlink(missing_ok=True)
        write_text(trial.folder / CONFIG, trial.config)
        plan = {"index": trial.index, "metric": self.metric, "mode": self.mode, "values": trial.values}
        if self.devices:
            taken = [one.devices for one, _ in self.running.values()]
            trial.devices = plan["devices"] = next(one for one in self.devices if one not in taken)
        write_json(trial.folder / PLAN, plan)
        # A session of its own: Ctrl-C in the terminal reaches the sweep alone, which then ends each trial once.
        with (trial.folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _START, str(trial.folder)],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.running[trial.index] = trial, process
        if self.signal:  # it came in between
            process.terminate()
        tell(f"trial {trial.index}: {trial.name} started")

    def _record(self, trial: Trial, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        process.stdin.close()
        trial.read()
        code = process.returncode
        if trial.result is None and code not in _ENDED_FROM_OUTSIDE and not (self.signal and code < 0):
            said = (trial.folder / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line.strip() for line in reversed(said) if line.strip()), "It printed nothing")
            ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            trial.result = {"state": "failed", "error": f"{last[:300]} ({ended})"}
            write_json(trial.folder / RESULT, trial.result)

    def _end(self, number: int) -> None:
        """Ask all trials to save and end; at a second Ctrl-C, end them."""
        again, self.signal = self.signal == number == signal.SIGINT, self.signal or number
        for _, process in self.running.values():
            if process.poll() is None:
                if again:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.terminate()
