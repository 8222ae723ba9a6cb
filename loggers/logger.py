"""Logger: the interface of loggers."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("legato")


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

    _directory: Path | None = None
    _is_open = False
    _said: tuple[str, ...] = ()
    """Methods of which it was said that this logger has none."""

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Start writing, to `run_dir` or to the logger's own location.

        resume_step: the run resumes after this step: values logged for later steps are void, values of this and earlier
        steps are kept and must not be written again.
        """
        self._directory, self._is_open = Path(run_dir), True

    def follow(self, run_dir: Path) -> None:
        """Learn where rank 0 writes, in a process that opens nothing: another rank, or the one that started workers."""
        self._directory = Path(run_dir)

    @property
    def save_dir(self) -> str | None:
        """The parent folder of the runs; None before a run."""
        return None if self._directory is None else str(self._directory.parent.parent)

    @property
    def name(self) -> str | None:
        """The run's name; None before a run."""
        return None if self._directory is None else self._directory.parent.name

    @property
    def version(self) -> int | str | None:
        """N of `version_N`, or the folder's name; None before a run."""
        if self._directory is None:
            return None
        found = re.fullmatch(r"version_(\d+)", self._directory.name)
        return int(found[1]) if found else self._directory.name

    @property
    def log_dir(self) -> str | None:
        """The run directory; None before a run."""
        return None if self._directory is None else str(self._directory)

    @property
    def root_dir(self) -> str | None:
        """The folder of all versions of the run; None before a run."""
        return None if self._directory is None else str(self._directory.parent)

    @property
    def experiment(self) -> Any:
        """The underlying writer, for features without a method here."""
        return NoExperiment()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write values of one logging point; several calls for one step are merged."""

    def log_point(self, values: Mapping[str, float], step: int) -> None:
        """Take the values of one logging point from the trainer; `log_metrics` writes them."""
        self.log_metrics(values, step)

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Record hyperparameters and, at the end of a run, its final metrics."""

    def log_best(self, name: str, value: float) -> None:
        """Record, at the end of a run, the best value of the metric by which checkpoints are kept."""

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Write a text, which is shown as Markdown where the logger can."""
        self._say_unable("log_text")

    def log_image(self, tag: str, image: Any, step: int) -> None:
        """Write a picture: a tensor or array of shape (H, W), (C, H, W) or (H, W, C), of bytes or of 0.0 to 1.0."""
        self._say_unable("log_image")

    def log_figure(self, tag: str, figure: Any, step: int) -> None:
        """Write a figure of matplotlib's, and leave it open."""
        self._say_unable("log_figure")

    def log_histogram(self, tag: str, values: Any, step: int) -> None:
        """Write how the numbers in a tensor or array are distributed."""
        self._say_unable("log_histogram")

    def _say_unable(self, method: str) -> None:
        """Say, once, that this logger writes nothing of the kind; not on ranks on which it is not open."""
        if self._is_open and method not in self._said:
            self._said = (*self._said, method)
            log.info("%s has no %s: nothing is written. TensorBoardLogger has it.", type(self).__name__, method)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the graph of a model, where the logger was asked to."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Called on rank 0 after a Checkpoint callback has saved; with background saving it may not be whole yet."""

    def save(self) -> None:
        """Flush everything logged so far."""

    def finalize(self, status: str) -> None:
        """Close the log; `status` is "success" or one word for how the run ended."""
