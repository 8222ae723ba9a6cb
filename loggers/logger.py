"""Logger: the interface of loggers."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PICTURES = " Call its experiment's: TensorBoard's add_image, add_figure and add_histogram, or log of Weights & Biases."


class NoExperiment:
    """No-op writer: any method may be called and does nothing."""

    # so that a task may draw and write by `self.logger.experiment` without asking for its rank
    def __getattr__(self, name: str) -> "NoExperiment":
        # these are protocols: copy.deepcopy would call a __deepcopy__ that is none
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
        # Lightning's programs count with the number: f"version_{logger.version}"
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
        """Write a text, such as the config, which is shown as Markdown where the logger can."""

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the graph of a model, where the logger was asked to."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Called on rank 0 after a Checkpoint callback has saved; with background saving it may not be whole yet."""

    def save(self) -> None:
        """Flush everything logged so far."""

    def finalize(self, status: str) -> None:
        """Close the log; `status` is "success" or one word for how the run ended."""

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError; for a method of one service alone it says where that is."""
        # methods that programs call by Lightning's and Legato's older names
        instead = PICTURES if name in ("log_image", "log_figure", "log_histogram") else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.{instead}")

    def __getstate__(self) -> dict[str, Any]:
        """Travel closed: the process that becomes rank 0 opens the logger itself."""
        return {**vars(self), "_is_open": False}
