"""WandbLogger: writes to Weights & Biases using the wandb package."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.place import current_rank, find_place
from .hyperparameters import plain
from .logger import Logger, NoExperiment

ID_FILE = "wandb-id.txt"
"""File in the run directory that stores the id of the W&B run to continue after a resume."""
STEP = "trainer/global_step"
"""Name of the x-axis of all metrics."""


class WandbLogger(Logger):
    """Writes metrics to a Weights & Biases run, with `trainer/global_step` on the x-axis.

    When training resumes, the same W&B run continues, and steps that W&B already has are skipped. To log images, tables
    and files, use `experiment`, which is the W&B run.

    Args:
        experiment: Existing W&B run to write to.
        init_options: Arguments for `wandb.init`, such as project, name, id and mode="offline".

    Raises ModuleNotFoundError if the wandb package is not installed.
    """

    def __init__(self, *, experiment: Any = None, **init_options: Any) -> None:
        import wandb  # noqa: F401

        self._run = experiment
        self._init: dict[str, Any] = {"resume": "allow"}
        self._init.update(**init_options)  # this form lets jsonargparse find the arguments of wandb.init
        if experiment is not None:
            self._init["id"] = experiment.id
        # latest step that W&B already has from before a resume
        self._written = -1
        # whether the run is open in the process that started this worker
        self._is_elsewhere = False

    @property
    def experiment(self) -> Any:
        """The W&B run, or a no-op object on ranks other than 0. The first access starts the run."""
        if current_rank() != 0:
            return NoExperiment()
        if self._run is None:
            import wandb

            if self._init.get("dir") is not None:
                os.makedirs(self._init["dir"], exist_ok=True)
            # W&B rejects a second `init` for a run in progress
            open_run = wandb.run or (wandb.attach(self._init["id"]) if self._is_elsewhere else None)
            self._run = open_run or wandb.init(**self._init)
            self._init["id"] = str(self._run.id)
            self._run.define_metric(STEP)
            # W&B's default step counts calls to log, and a training step may make several
            self._run.define_metric("*", step_metric=STEP, step_sync=True)
        return self._run

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Start a W&B run, or continue the one recorded in the run directory."""
        super().open(run_dir, resume_step)
        self._init["dir"] = self._init.get("dir") or str(run_dir)
        if resume_step is not None:
            self.follow(run_dir)
        Path(run_dir, ID_FILE).write_text(f"{self.experiment.id}\n")
        # the summary holds the latest value of each metric, including the last step that W&B has
        self._written = -1 if resume_step is None else int(self.experiment.summary.get(STEP, -1))

    def follow(self, run_dir: Path) -> None:
        """Read the W&B run's id from the run directory."""
        super().follow(run_dir)
        id_file = Path(run_dir, ID_FILE)
        if not self._init.get("id") and id_file.exists():
            self._init["id"] = id_file.read_text().strip()

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write a step's metrics, unless W&B recorded that step before a resume."""
        if step > self._written:
            self.experiment.log({**metrics, STEP: int(step)})

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Record hyperparameters as the run's config."""
        # values may change when a run is resumed, which W&B rejects without allow_val_change
        self.experiment.config.update(plain(params), allow_val_change=True)

    def watch(self, model: Any, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Record histograms of a model's gradients or parameters. Takes the same arguments as `wandb.watch`."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def finalize(self, status: str) -> None:
        """In a worker, finish the W&B run. Elsewhere, leave this to `wandb.finish()` or to W&B's exit hook."""
        place = find_place()
        # a worker does not call W&B's exit hook, and another process may continue the run
        is_worker = place is not None and place.origin == "legato"
        if self._run is not None and is_worker and not self._is_elsewhere:
            self._run.finish(exit_code=int(status != "success"))
            self._run = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the logger without its W&B run. Another process continues the run using its id."""
        import wandb

        is_elsewhere = self._run is not None and self._run is wandb.run
        return {**super().__getstate__(), "_run": None, "_is_elsewhere": is_elsewhere}
