"""CSVLogger: writes `metrics.csv` and `hparams.yaml` to the run directory."""

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
    """Writes `metrics.csv`, with one row per call to `log_metrics`, and `hparams.yaml` to the run directory.

    * Each row reaches the operating system before the call returns, so no row is lost if the process is killed.
    * Columns are sorted by name. When a new metric adds a column, the file is replaced atomically.
    * When a run resumes, the rows for steps after the checkpoint are removed, and no value is written twice.
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
        """Read the file and remove the rows for steps after `resume_step`."""
        super().open(run_dir, resume_step)
        self._path = Path(run_dir, METRICS_FILE)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows, self.columns = _read(self._path)
        kept = [row for row in rows if resume_step is None or int(row["step"]) <= resume_step]
        # the resumed run logs the checkpoint's step again; values already in the file stay unchanged
        last = [row for row in kept if int(row["step"]) == resume_step]
        self._resume_step = resume_step
        # an empty cell means that the row has no value for that metric
        self._recorded = {name for row in last for name, value in row.items() if value}
        if self.columns:
            self._write_anew(kept)

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write a row. Before `open`, this does nothing."""
        if self._path is None:
            return
        row = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        if step == self._resume_step:
            row = {name: value for name, value in row.items() if name not in self._recorded}
            if not row:
                return
        row["step"] = int(step)
        if not row.keys() <= set(self.columns) or not self._path.exists():
            # rewrite the file, since all rows need the columns in the header
            rows, _ = _read(self._path)
            # sorted, so that the header does not depend on the order in which metrics were logged
            self.columns = sorted({*self.columns, *row})
            self._write_anew(rows)
        # closing passes the row to the operating system; a killed process would lose a buffered row
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
            # any descriptor works, since fsync also covers data written through other descriptors
            with self._path.open("a") as file:
                os.fsync(file.fileno())

    def finalize(self, status: str) -> None:
        """Sync the file to disk and write hyperparameters recorded before `open` to `hparams.yaml`."""
        self.save()
        if self.hparams:
            self.log_hyperparams({})

    def _write_anew(self, rows: list[dict[str, str]]) -> None:
        assert self._path is not None
        # in the same folder, since a rename is atomic only within a file system
        partial = self._path.with_name(f"{self._path.name}.partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self._path)


def _read(path: Path) -> tuple[list[dict[str, str]], list[str]]:
    """Return a file's complete rows and its columns."""
    if not path.exists():
        return [], []
    # rows stay complete if the process is killed, but a power failure may truncate the last row
    lines, _, _ = path.read_bytes().rpartition(b"\n")
    reader = csv.DictReader(io.StringIO(lines.decode(errors="replace"), newline=""))
    rows = [row for row in reader if None not in row and None not in row.values() and row.get("step", "").isdigit()]
    return rows, list(reader.fieldnames or [])
