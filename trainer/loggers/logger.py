"""Logger: what the trainer asks of everything that keeps a run's numbers."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class NoExperiment:
    """Stands in for a writer where nothing is written: every method may be called, and does nothing."""

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
    """A place where a run's numbers go. This base writes nothing; override what the place can hold.

    Rank 0 alone calls `open`, then `log_*` and `save`, and at the end `finalize`. A logger that was not opened is
    silent, so that a task may use `self.logger` in every process.
    """

    def __init__(self) -> None:
        self._directory: Path | None = None

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Begin to write, in `run_dir` unless the logger was given a place of its own.

        With `resume_step` the run goes on after that step: what was logged for later steps is void, what was logged
        for it and earlier ones stays, and is not written again.
        """
        self._directory = Path(run_dir)

    @property
    def save_dir(self) -> str | None:
        """The folder that holds the runs; None before the logger is opened."""
        return None if self._directory is None else str(self._directory.parent.parent)

    @property
    def name(self) -> str | None:
        """The run's name; None before the logger is opened."""
        return None if self._directory is None else self._directory.parent.name

    @property
    def version(self) -> int | str | None:
        """The N of `version_N`, or the folder's name where it is no number; None before the logger is opened."""
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
        """The writer behind this logger, for what has no method here."""
        return NoExperiment()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the numbers of one point; several calls for one step add to it."""

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Keep what the run was made with and, at its end, what it reached."""

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Write a text."""

    def save(self) -> None:
        """Hand over everything logged so far, so that it outlives this process."""

    def finalize(self, status: str) -> None:
        """End the log; `status` is "success" or says in one word how the run ended."""
