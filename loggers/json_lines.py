"""JSONLinesLogger: writes `metrics.jsonl`, one machine-readable line per logging step."""

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..base.run_names import require_local, run_directory_gone
from .logger import Logger

log = logging.getLogger("legato")

POINTS_FILE = "metrics.jsonl"


class JSONLinesLogger(Logger):
    """Writes `{"step": 100, "time": 1767225600.123, "train/loss": 0.5}` lines, each step once.

    * Each call reaches the operating system before it returns, so a killed process loses nothing.
    * Several calls for one step share a line, so the last line may still grow; it gets its newline when the next step
    begins. Every line that ends in a newline is final.
    * Strict JSON has no NaN: such values are the strings "NaN", "Infinity" and "-Infinity", which `float()` parses (a
    null would look as if nothing was logged).
    * A metric called "step" or "time" is written as "step_" or "time_".
    * A resume removes the lines of later steps and invalid lines (torn by a power cut).
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        require_local(path, "JSONLinesLogger's path")
        self.path = None if path is None else Path(os.path.abspath(path))
        """Path of the file; by default in the run directory."""
        self._own_path = path is not None
        self.file: BinaryIO | None = None
        self._line: dict[str, Any] = {}
        self._line_start = 0
        self._recorded: set[str] = set()
        self._resume_step: int | None = None

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Open the file, without lines that a resume voids."""
        super().open(run_dir, resume_step)
        if not self._own_path:
            self.path = Path(run_dir) / POINTS_FILE
        assert self.path is not None
        self._close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._resume_step = resume_step
        self._line, self._line_start, size = keep_lines(self.path, resume_step)
        self._recorded = set(self._line) if self._line.get("step") == resume_step else set()
        self.file = self.path.open("r+b" if self.path.exists() else "w+b", buffering=0)
        self.file.seek(size)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the line of this step, or add `metrics` to it. Does nothing before `open`."""
        if self.file is None:
            return
        self._follow_path()
        values = {
            f"{name}_" if name in ("step", "time") else name: _json_value(value) for name, value in metrics.items()
        }
        if step == self._resume_step:
            values = {name: value for name, value in values.items() if name not in self._recorded}
            if not values:
                return
        opening = b""
        if self._line.get("step") != step:
            if self._line:
                opening = b"\n"
                self._line_start = self.file.seek(0, os.SEEK_END) + 1
            self._line = {"step": int(step), "time": round(time.time(), 3)}
        self._line |= values
        self.file.seek(self._line_start - len(opening))
        # a single write, so that a kill leaves either the old or the new line
        self.file.write(opening + json.dumps(self._line, allow_nan=False).encode())
        self.file.truncate()

    def _follow_path(self) -> None:
        """Start a new file, with a warning, if it was deleted or moved; raise if its folder is run_directory_gone."""
        assert self.path is not None
        assert self.file is not None
        with suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), os.fstat(self.file.fileno())):
                return
        self._close()
        if not self.path.parent.is_dir():
            raise run_directory_gone(self.path.parent)
        self.file = self.path.open("w+b", buffering=0)
        self._resume_step = None
        log.warning("%s was deleted or moved while the run was writing it. A new file begins here.", self.path)

    def save(self) -> None:
        """Sync the file to disk."""
        if self.file is not None:
            os.fsync(self.file.fileno())

    def finalize(self, status: str) -> None:
        """End the last line and close the file."""
        self._close()

    def _close(self) -> None:
        if self.file is not None:
            if self._line:
                self.file.seek(0, os.SEEK_END)
                self.file.write(b"\n")
            self.save()
            self.file.close()
        self.file, self._line, self._line_start = None, {}, 0

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open file when the logger is pickled to another process."""
        return {**self.__dict__, "file": None, "_line": {}, "_line_start": 0}


def keep_lines(path: Path, resume_step: int | None) -> tuple[dict[str, Any], int, int]:
    """Remove the lines after `resume_step` and invalid lines, and the newline of the last line.

    Returns the last line, its offset, and the file's size. The file is replaced atomically.
    """
    if not path.exists():
        return {}, 0, 0
    partial = path.with_name(f"{path.name}.partial")
    last: dict[str, Any] = {}
    start = size = dropped = 0
    with path.open("rb") as old, partial.open("wb") as new:
        for raw in old:
            content = raw.rstrip(b"\n")
            record = parse_point(content)
            if record is None:
                dropped += 1
            elif resume_step is None or record["step"] <= resume_step:
                ending = b"\n" if last else b""
                new.write(ending + content)
                last, start, size = record, size + len(ending), size + len(ending) + len(content)
        new.flush()
        os.fsync(new.fileno())
    os.replace(partial, path)
    if dropped:
        log.warning("%s: dropped %d invalid line(s).", path, dropped)
    return last, start, size


def parse_point(line: bytes) -> dict[str, Any] | None:
    """Return the point that a line of the file is; None for one that was torn."""
    try:
        point = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return point if isinstance(point, dict) and isinstance(point.get("step"), int) else None


def _json_value(value: Any) -> Any:
    if not isinstance(value, (int, float)):
        value = value.item() if hasattr(value, "item") else float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
