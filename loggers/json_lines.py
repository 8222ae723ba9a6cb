"""JSONLinesLogger: writes `metrics.jsonl`, with one line of JSON per logging point."""

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ..base.run_names import require_local, run_directory_gone
from .logger import Logger

log = logging.getLogger("legato")

POINTS_FILE = "metrics.jsonl"


class JSONLinesLogger(Logger):
    """Writes a line such as `{"step": 100, "time": 1767225600.123, "train/loss": 0.5}` for each logging point.

    * "time" is in seconds since the Unix epoch.
    * Values reach the operating system before the call returns, so none are lost if the process is killed.
    * Calls for the same step share a line. The last line may still change. Its newline is written only when the next
      step begins, so every line that ends in a newline is final.
    * Strict JSON has no NaN, so non-finite values become the strings "NaN", "Infinity" and "-Infinity", which
      `float()` parses.
    * A metric named "step" or "time" is written as "step_" or "time_".
    * When a run resumes, lines for steps after the checkpoint and lines truncated by a power failure are removed.

    Args:
        path: Local path of the file. None: `metrics.jsonl` in the run directory.

    Raises ConfigError if `path` is in an object store.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        require_local(path, "JSONLinesLogger's path")
        self.path = None if path is None else Path(os.path.abspath(path))
        """Path of the file. Before `open`, None if the file is to be in the run directory."""
        self._in_run_dir = path is None
        # the last line of the file, which has no newline yet, and its offset in bytes
        self._line: dict[str, Any] = {}
        self._line_start = 0
        self._resume_step: int | None = None
        self._recorded: set[str] = set()

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Open the file and remove the lines for steps after `resume_step`."""
        super().open(run_dir, resume_step)
        if self._in_run_dir:
            self.path = Path(run_dir) / POINTS_FILE
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._line, self._line_start = keep_lines(self.path, resume_step)
        self._resume_step = resume_step
        self._recorded = set(self._line) if self._line.get("step") == resume_step else set()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write this step's line, or add `metrics` to it. Before `open`, this does nothing."""
        if not self._is_open:
            return
        values = {
            f"{name}_" if name in ("step", "time") else name: _json_value(value) for name, value in metrics.items()
        }
        if step == self._resume_step:
            # a resumed run validates again at its checkpoint's step: recorded values stay, and new ones are added
            values = {name: value for name, value in values.items() if name not in self._recorded}
            if not values:
                return
        with self._append() as file:
            start, opening = self._line_start, b""
            if self._line.get("step") != step:
                if self._line:
                    start, opening = file.seek(0, os.SEEK_END), b"\n"
                self._line, self._line_start = {"step": int(step), "time": round(time.time(), 3)}, start + len(opening)
            self._line |= values
            file.seek(start)
            # a single write, so that a killed process leaves either the old or the new line
            file.write(opening + json.dumps(self._line, allow_nan=False).encode())
            # the new line is shorter if a value is logged again with fewer digits
            file.truncate()

    def _append(self) -> BinaryIO:
        """Open the file. If it was deleted, warn and create a new file. Raises ConfigError if the folder is missing."""
        assert self.path is not None
        # open it for each point, since writes to an open file succeed even after it is deleted
        try:
            file = self.path.open("r+b" if self.path.exists() else "w+b", buffering=0)
        except FileNotFoundError as error:
            raise run_directory_gone(self.path.parent) from error
        if self._line and not os.fstat(file.fileno()).st_size:
            # no resume step, since the new file has no recorded values
            self._line, self._line_start, self._resume_step = {}, 0, None
            log.warning("%s was deleted or moved during the run. Further points will go to a new file.", self.path)
        return file

    def save(self) -> None:
        """Sync the file to disk."""
        if self._is_open:
            with self._append() as file:
                os.fsync(file.fileno())

    def finalize(self, status: str) -> None:
        """Write the last line's newline."""
        if self._is_open and self._line:
            with self._append() as file:
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
                os.fsync(file.fileno())
        self._is_open, self._line = False, {}


def keep_lines(path: Path, resume_step: int | None) -> tuple[dict[str, Any], int]:
    """Atomically rewrite the file without invalid lines, lines after `resume_step` and the last line's newline.

    Returns the last point and the byte offset of its line.
    """
    if not path.exists():
        return {}, 0
    points = [parse_point(line) for line in path.read_bytes().splitlines()]
    kept = [point for point in points if point is not None and (resume_step is None or point["step"] <= resume_step)]
    lines = [json.dumps(point).encode() for point in kept]
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(b"\n".join(lines))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    if None in points:
        log.warning("%s: dropped %d invalid line(s).", path, points.count(None))
    return (kept[-1], sum(map(len, lines[:-1])) + len(lines) - 1) if kept else ({}, 0)


def parse_point(line: bytes) -> dict[str, Any] | None:
    """Return the point stored in a line of the file, or None if the line is invalid."""
    try:
        point = json.loads(line)
    # RecursionError: brackets nested too deeply for the parser
    except (ValueError, RecursionError):
        return None
    return point if isinstance(point, dict) and isinstance(point.get("step"), int) else None


def _json_value(value: Any) -> Any:
    if not isinstance(value, (int, float)):
        value = value.item() if hasattr(value, "item") else float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
