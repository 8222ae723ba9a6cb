"""Trials of `legato tune` as seen from the search: processes that run blocks, and the comparison of two of them."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ...base.errors import WorkerError
from ..sweep.folder import write_json
from .pace import BLOCK, ERROR, FACTS, LOG, ORDER, SECONDS_BETWEEN_LOOKS, WORDS

_RUN_PACED = f"import sys; from {__package__}.pace import enter_paced; sys.exit(enter_paced())"
FEWEST, MOST = 6, 30
"""Blocks of a candidate: with FEWEST it may be kept, after MOST it is given up."""
LEAST_GAIN = 0.01
"""A gain below this is not worth a line in a config."""
CLEARLY_WORSE = 0.95
"""A candidate that is slower than this in each of its first three blocks is given up."""
MOST_LEAD = 5
"""Largest length of the steps before the clock begins, in blocks."""
SHORT_EPOCH = 4
"""Epochs that are shorter than this many blocks are measured as a whole."""
SECONDS_TO_START = 600.0
"""Seconds until the first block has ended; compilation is part of it."""


class PacedTrial:
    """One running process with a config; raises WorkerError, with the reason, where that has failed."""

    def __init__(self, folder: Path, words: Sequence[str], block_seconds: float) -> None:
        folder.mkdir()
        self.folder, self.block_seconds, self.number, self.steps, self.lead = folder, block_seconds, 0, 1, 1
        write_json(folder / WORDS, list(words))
        # A session of its own: Ctrl-C in the terminal reaches the search alone, which then ends its trials.
        with (folder / LOG).open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _RUN_PACED, str(folder)],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def warm_up(self) -> Mapping[str, Any]:
        """Run blocks until one takes long enough; return the facts of the run, with the seconds that all this took."""
        began = time.monotonic()
        facts: dict[str, Any] = json.loads(self._wait(FACTS).read_text())
        loader, epoch = facts["loader"] or {}, facts["steps of an epoch"]
        self._block()
        # What workers have loaded while the trial waited is not to be measured.
        self.lead = 1 + (loader["num_workers"] or 0) * (loader["prefetch_factor"] or 2) if loader else 1
        while (seconds := self._block()["seconds"]) < self.block_seconds / 2:
            self.steps = min(8 * self.steps, math.ceil(self.steps * self.block_seconds / max(seconds, 1e-6)))
        self.lead = min(self.lead, max(1, int(MOST_LEAD * self.block_seconds * self.steps / seconds)))
        if epoch is not None and epoch < SHORT_EPOCH * self.steps:
            # Whole epochs: between them workers may be started, in each block equally often.
            self.steps = epoch * max(1, round(self.steps / epoch))
        facts["seconds"] = time.monotonic() - began
        return facts

    def rate(self) -> float:
        """Run one block and return its samples a second."""
        found = self._block()
        return float(found["samples"] / found["seconds"])

    def _block(self) -> Mapping[str, float]:
        write_json(self.folder / ORDER.format(self.number), {"steps": self.steps, "lead": self.lead})
        found: Mapping[str, float] = json.loads(self._wait(BLOCK.format(self.number)).read_text())
        self.number += 1
        return found

    def _wait(self, name: str) -> Path:
        deadline, path = time.monotonic() + SECONDS_TO_START, self.folder / name
        while not path.exists():
            if self.process.poll() is not None:
                raise WorkerError(self._reason())
            if time.monotonic() > deadline:
                raise WorkerError(f"no block within {SECONDS_TO_START:.0f} s")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return path

    def _reason(self) -> str:
        with suppress(OSError):
            return (self.folder / ERROR).read_text()
        code = self.process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how} (memory ran out?)" if -code == signal.SIGKILL else how

    def end(self, patience: float = 5.0) -> None:
        """End the process: by its own will within `patience` seconds, else by force."""
        if self.process.poll() is None and patience and (self.folder / FACTS).exists():
            write_json(self.folder / ORDER.format(self.number), {"steps": 0, "lead": 0})
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


@dataclass(frozen=True)
class SpeedRatio:
    """Speed of a candidate, in multiples of the baseline's."""

    ratio: float
    """The median over pairs of blocks."""
    noise: float
    """Three standard errors of it: with a dozen settings, one in twenty by luck is too many."""
    better: bool
    """Whether it is faster by more than the noise."""


def judge(ratios: Sequence[float]) -> SpeedRatio:
    """Judge by pairs of blocks: better where the median is above 1 by the noise, and nearly all blocks are above 1."""
    middle = median(ratios)
    deviation = 1.4826 * median(abs(one - middle) for one in ratios)
    noise = 3 * 1.2533 * deviation / math.sqrt(len(ratios))  # 1.2533: a median's standard error to a mean's
    above = sum(one > 1 for one in ratios)
    better = middle > 1 + max(LEAST_GAIN, noise) and above >= 0.8 * len(ratios) and len(ratios) >= FEWEST
    return SpeedRatio(middle, noise, better)


def compare_in_turn(baseline: Callable[[], float], candidate: Callable[[], float]) -> SpeedRatio:
    """Run blocks of both in turn, each of the candidate between two of the baseline, so that a drift cancels.

    baseline, candidate: run a block and return its samples a second.
    """
    ratios = list[float]()
    before = baseline()
    while True:
        found, after = candidate(), baseline()
        ratios.append(2 * found / (before + after))
        before, result = after, judge(ratios)
        if len(ratios) == 3 and max(ratios) < CLEARLY_WORSE:
            return result
        undecided = not result.better and result.ratio + result.noise > 1 + LEAST_GAIN
        if len(ratios) >= MOST or (len(ratios) >= FEWEST and not undecided):
            return result
