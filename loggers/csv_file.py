"""CSVLogger: writes `metrics.csv`, a row for each logged point, and `hparams.yaml` to the run directory."""

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .hyperparameters import write_hyperparameters
from .logger import Logger

METRICS_FILE = "metrics.csv"


class CSVLogger(Logger):
    """Writes a row for each call of `log_metrics`, with the columns in order of their names.

    * Each row reaches the operating system at once, so a killed process loses nothing.
    * A new metric is a new column, for which the file is replaced by a rename.
    * A resume removes the rows of later steps, and writes no value twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hparams: dict[str, Any] = {}
        self._path: Path | None = None
        self.columns: list[str] = []
        """Columns of the file."""
        self._resume_step: int | None = None
        self._recorded: set[str] = set()

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Remove the rows that a resume voids."""
        super().open(run_dir, resume_step)
        self._path = Path(run_dir, METRICS_FILE)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows, self.columns = _read(self._path)
        kept = [row for row in rows if resume_step is None or int(row["step"]) <= resume_step]
        # the point at the step of the checkpoint is logged again when the run goes on: what it has here stays as it is
        last = [row for row in kept if int(row["step"]) == resume_step]
        self._resume_step = resume_step
        # an empty cell is no value, but a column of other rows
        self._recorded = {name for row in last for name, value in row.items() if value}
        if self.columns:
            self._write_anew(kept)

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write a row. Does nothing before `open`."""
        if self._path is None:
            return
        row = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        if step == self._resume_step:
            row = {name: value for name, value in row.items() if name not in self._recorded}
            if not row:
                return
        row["step"] = int(step)
        if not row.keys() <= set(self.columns) or not self._path.exists():
            # costs a pass over the whole file, since all rows need the columns of the header
            rows, _ = _read(self._path)
            # sorted, so that the header does not depend on which metric came first
            self.columns = sorted({*self.columns, *row})
            self._write_anew(rows)
        # closed after each row, which hands it to the system: a buffer would be lost with a killed process
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row)

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Write `hparams.yaml`."""
        self.hparams.update(params)
        if self._path is not None:
            write_hyperparameters(self._path.parent, self.hparams)

    def save(self) -> None:
        """Sync the file to disk."""
        if self._path is not None and self._path.exists():
            # any descriptor will do: fsync writes out what was written to the file by others, too
            with self._path.open("a") as file:
                os.fsync(file.fileno())

    def finalize(self, status: str) -> None:
        """Sync the file, and write `hparams.yaml` with what was recorded before `open`."""
        self.save()
        if self.hparams:
            self.log_hyperparams({})

    def _write_anew(self, rows: list[dict[str, str]]) -> None:
        assert self._path is not None
        # beside the file and not in a temporary folder: a rename is atomic only within one file system
        partial = self._path.with_name(f"{self._path.name}.partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self._path)


def _read(path: Path) -> tuple[list[dict[str, str]], list[str]]:
    """Return the whole rows of a file and its columns, without one that was torn by a power cut."""
    if not path.exists():
        return [], []
    # a kill leaves whole rows, but a power cut may leave half of the last one
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    reader = csv.DictReader(io.StringIO(whole.decode(errors="replace"), newline=""))
    rows = [row for row in reader if None not in row and None not in row.values() and row.get("step", "").isdigit()]
    return rows, list(reader.fieldnames or [])
