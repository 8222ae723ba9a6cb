"""Logger: the interface of loggers."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class NoExperiment:
    """No-op writer: any method may be called and does nothing."""

    def __getattr__(self, name: str) -> "NoExperiment":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "NoExperiment":
        """Do nothing."""
        return self

    def __enter__(self) -> "NoExperiment":
        return self

    def __exit__(self, *error: object) -> None:
        return None


class Logger:
    """Base class of loggers; writes nothing itself.

    Only rank 0 calls `open`, then `log_*` and `save`, and finally `finalize`. A logger that was not opened ignores
    calls, so that a task may use `self.logger` in every process.
    """

    def __init__(self) -> None:
        self._directory: Path | None = None

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Start writing, to `run_dir` or to the logger's own location.

        resume_step: the run resumes after this step: values logged for later steps are void, values of this and earlier
        steps are kept and must not be written again.
        """
        self._directory = Path(run_dir)

    @property
    def save_dir(self) -> str | None:
        """The parent folder of the runs; None before the logger is opened."""
        return None if self._directory is None else str(self._directory.parent.parent)

    @property
    def name(self) -> str | None:
        """The run's name; None before the logger is opened."""
        return None if self._directory is None else self._directory.parent.name

    @property
    def version(self) -> int | str | None:
        """N of `version_N`, or the folder's name; None before the logger is opened."""
        if self._directory is None:
            return None
        found = re.fullmatch(r"version_(\d+)", self._directory.name)
        return int(found[1]) if found else self._directory.name

    @property
    def log_dir(self) -> str | None:
        """The run directory; None before the logger is opened."""
        return None if self._directory is None else str(self._directory)

    @property
    def experiment(self) -> Any:
        """The underlying writer, for features without a method here."""
        return NoExperiment()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write values of one logging point; several calls for one step are merged."""

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Record hyperparameters and, at the end of a run, its final metrics."""

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Write a text."""

    def save(self) -> None:
        """Flush everything logged so far."""

    def finalize(self, status: str) -> None:
        """Close the log; `status` is "success" or one word for how the run ended."""
