"""WandbLogger: writes to Weights & Biases, by its own package."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.place import current_rank, find_place
from .hyperparameters import plain
from .logger import Logger, NoExperiment

ID_FILE = "wandb-id.txt"
"""File of a run directory that keeps W&B's id of the run, so that a resume goes on in it."""
STEP = "trainer/global_step"
"""The metric that is the x-axis of all others."""


class WandbLogger(Logger):
    """Writes metrics against `trainer/global_step` to a run of Weights & Biases; `experiment` is that run.

    A resume of the run directory goes on in the same W&B run, and writes no step twice that W&B knows of. The package
    is imported when the logger is made. Pictures, tables and files are logged by `experiment`.

    Args:
        experiment: a run that was made already.
        init_options: arguments of `wandb.init`: project, name, id, mode="offline" and the rest.

    Raises ModuleNotFoundError where the package is not installed.
    """

    def __init__(self, *, experiment: Any = None, **init_options: Any) -> None:
        import wandb  # noqa: F401

        self._run = experiment
        self._init: dict[str, Any] = {"resume": "allow"}
        self._init.update(**init_options)  # jsonargparse follows a call to wandb.init, and so knows its arguments
        if experiment is not None:
            self._init["id"] = experiment.id
        # The newest step that W&B has from before a resume
        self._written = -1
        # Whether the run is under way in the process that started this worker
        self._is_elsewhere = False

    @property
    def experiment(self) -> Any:
        """The run of W&B, begun when it is first asked for on rank 0; a no-op object on the others."""
        if current_rank() != 0:
            return NoExperiment()
        if self._run is None:
            import wandb

            if self._init.get("dir") is not None:
                os.makedirs(self._init["dir"], exist_ok=True)
            # W&B refuses a second `init` of a run that is under way
            begun = wandb.run or (wandb.attach(self._init["id"]) if self._is_elsewhere else None)
            self._run = begun or wandb.init(**self._init)
            self._init["id"] = str(self._run.id)
            self._run.define_metric(STEP)
            # W&B's own step counts calls of log, of which one step of training may have several
            self._run.define_metric("*", step_metric=STEP, step_sync=True)
        return self._run

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Begin the run, or go on in that of the run directory."""
        super().open(run_dir, resume_step)
        self._init["dir"] = self._init.get("dir") or str(run_dir)
        if resume_step is not None:
            self.follow(run_dir)
        Path(run_dir, ID_FILE).write_text(f"{self.experiment.id}\n")
        # a summary has the newest value of each metric: of this one, the last step that W&B knows of
        self._written = -1 if resume_step is None else int(self.experiment.summary.get(STEP, -1))

    def follow(self, run_dir: Path) -> None:
        """Take the id of the run that another process has begun, or one before a resume."""
        super().follow(run_dir)
        kept = Path(run_dir, ID_FILE)
        if not self._init.get("id") and kept.exists():
            self._init["id"] = kept.read_text().strip()

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write the metrics of a step, unless W&B has them from before a resume."""
        if step > self._written:
            self.experiment.log({**metrics, STEP: int(step)})

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Record hyperparameters as the run's config."""
        # a resume may bring other values, which W&B refuses without allow_val_change
        self.experiment.config.update(plain(params), allow_val_change=True)

    def watch(self, model: Any, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Record histograms of a model's gradients or parameters."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def finalize(self, status: str) -> None:
        """End the run in a worker; elsewhere it goes on until `wandb.finish()` or the end of the process."""
        place = find_place()
        # W&B's hook at exit is not called in a worker, and another process may go on in the run
        is_worker = place is not None and place.origin == "legato"
        if self._run is not None and is_worker and not self._is_elsewhere:
            self._run.finish(exit_code=int(status != "success"))
            self._run = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the run when the logger is pickled to another process, which goes on in it by its id."""
        import wandb

        is_elsewhere = self._run is not None and self._run is wandb.run
        return {**super().__getstate__(), "_run": None, "_is_elsewhere": is_elsewhere}
