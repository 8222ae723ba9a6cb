"""Logger: the base class for loggers."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PICTURES = " Use logger.experiment: add_image, add_figure or add_histogram with TensorBoard, log with Weights & Biases."


class NoExperiment:
    """No-op experiment whose methods accept any arguments, so that `self.logger.experiment` works on any rank."""

    def __getattr__(self, name: str) -> "NoExperiment":
        # leave protocol names undefined: otherwise copy.deepcopy would call __deepcopy__
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
    """Base class for loggers. Override the methods you need. By default, they write nothing.

    On rank 0, the trainer calls `open`, then `log_*` and `save`, and finally `finalize`. On other ranks it calls only
    `follow`. A logger that is not open must ignore calls, so that a task can use `self.logger` in every process.
    """

    _directory: Path | None = None
    _is_open = False

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Start writing to `run_dir` or to another location.

        Args:
            run_dir: The run directory.
            resume_step: Step of the checkpoint that the run resumes from; None for a new run. Discard points from later
                steps, keep all others, and do not write kept points again.
        """
        self._directory, self._is_open = Path(run_dir), True

    def follow(self, run_dir: Path) -> None:
        """Record the run directory in a process that does not write logs: another rank, or the launching process."""
        self._directory = Path(run_dir)

    @property
    def save_dir(self) -> str | None:
        """Folder that contains all runs, or None before a run."""
        return None if self._directory is None else str(self._directory.parent.parent)

    @property
    def name(self) -> str | None:
        """Name of the run, or None before a run."""
        return None if self._directory is None else self._directory.parent.name

    @property
    def version(self) -> int | str | None:
        """The number in `version_N` or, if there is none, the folder's name. None before a run."""
        if self._directory is None:
            return None
        # a number, since Lightning programs write f"version_{logger.version}"
        match = re.fullmatch(r"version_(\d+)", self._directory.name)
        return int(match[1]) if match else self._directory.name

    @property
    def log_dir(self) -> str | None:
        """The run directory, or None before a run."""
        return None if self._directory is None else str(self._directory)

    @property
    def root_dir(self) -> str | None:
        """Folder that contains all versions of the run, or None before a run."""
        return None if self._directory is None else str(self._directory.parent)

    @property
    def experiment(self) -> Any:
        """The service's writer or run object, for features that the Logger class does not cover."""
        return NoExperiment()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write metrics at optimizer step `step`. Calls for the same step are merged."""

    def log_point(self, values: Mapping[str, float], step: int) -> None:
        """Write the values for a logging point. The trainer calls this method, which calls `log_metrics`."""
        self.log_metrics(values, step)

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Record hyperparameters and, at the end of a run, the final metrics."""

    def log_best(self, name: str, value: float) -> None:
        """At the end of a run, record the best value of the metric that a Checkpoint callback monitors."""

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Write Markdown text, such as the config."""

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the graph of a model if the logger supports it."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Called on rank 0 after a Checkpoint callback saves. A background save may not have finished yet."""

    def save(self) -> None:
        """Flush all values logged so far."""

    def finalize(self, status: str) -> None:
        """Close the log. `status` is "success" or another word that indicates why the run ended."""

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError. For methods of Lightning's loggers, the message suggests an alternative."""
        instead = PICTURES if name in ("log_image", "log_figure", "log_histogram") else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.{instead}")

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the logger as closed, because the process that becomes rank 0 will open it."""
        return {**vars(self), "_is_open": False}
