"""MLFlowLogger: writes to MLflow, by its own package."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.environment import get_variable
from ..base.place import current_rank
from .hyperparameters import flat_params
from .logger import Logger, NoExperiment

DATABASE = "mlflow.db"
ID_FILE = "mlflow-id.txt"
"""File of a run directory that keeps MLflow's id of the run, so that a resume goes on in it."""


class MLFlowLogger(Logger):
    """Writes metrics and hyperparameters to a run of MLflow; `experiment` is the `MlflowClient`.

    A resume of the run directory goes on in the same MLflow run, and writes no point twice. The package is imported
    when the logger is made. Pictures and files are logged by `experiment`, for `run_id`.

    Args:
        experiment_name: the experiment, made if there is none of this name.
        run_name: the name of a new run.
        tracking_uri: the server or store; None: the variable MLFLOW_TRACKING_URI, else `mlflow.db` in `save_dir`.
        tags: tags of a new run.
        save_dir: the folder of a local store.
        artifact_location: where a new experiment keeps artifacts.
        run_id: a run to go on in.
        synchronous: whether calls wait for the server.

    Raises ModuleNotFoundError where the package is not installed.
    """

    def __init__(
        self,
        experiment_name: str = "default",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | None = "./mlruns",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        import mlflow  # noqa: F401

        uri = tracking_uri or get_variable("MLFLOW_TRACKING_URI")
        # MLflow 3 refuses its store of plain files
        self._folder = None if uri else Path(save_dir or ".")
        self._uri = uri or f"sqlite:///{Path(save_dir or '.', DATABASE)}"
        self._experiment_name, self._run_name, self.tags = experiment_name, run_name, dict(tags or {})
        self._artifact_location, self._run_id = artifact_location, run_id
        self._options = {} if synchronous is None else {"synchronous": synchronous}
        self._experiment_id: str | None = None
        self._client: Any = None
        # The newest step of each metric that the run has from before a resume; None: it is no resume
        self._written: dict[str, int] | None = None

    @property
    def run_id(self) -> str | None:
        """The id of the run, which is begun if there is none."""
        _ = self.experiment
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        """The id of the experiment, which is made if there is none."""
        _ = self.experiment
        return self._experiment_id

    @property
    def experiment(self) -> Any:
        """The `MlflowClient`, with the run begun when it is first asked for on rank 0; a no-op object on the others."""
        if current_rank() != 0:
            return NoExperiment()
        if self._client is None:
            self._client = self._connect()
        return self._client

    def _connect(self) -> Any:
        import mlflow
        from mlflow.tracking.context.registry import resolve_tags

        # a database keeps no files, for which MLflow would make a folder where the process happens to run
        artifacts = self._artifact_location
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            artifacts = artifacts or (self._folder.absolute() / "artifacts").as_uri()
        mlflow.set_tracking_uri(self._uri)
        client = mlflow.MlflowClient(self._uri)
        if self._run_id is not None:
            self._experiment_id = client.get_run(self._run_id).info.experiment_id
            return client
        experiment = client.get_experiment_by_name(self._experiment_name)
        # a deleted experiment keeps its name, and takes no runs
        if experiment is not None and experiment.lifecycle_stage != "deleted":
            self._experiment_id = experiment.experiment_id
        else:
            self._experiment_id = client.create_experiment(self._experiment_name, artifacts)
        tags = {**self.tags, **({} if self._run_name is None else {"mlflow.runName": self._run_name})}
        self._run_id = client.create_run(self._experiment_id, tags=resolve_tags(tags)).info.run_id
        return client

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Begin the run, or go on in that of the run directory."""
        super().open(run_dir, resume_step)
        if resume_step is not None:
            self.follow(run_dir)
        self._written = None if resume_step is None else {}
        Path(run_dir, ID_FILE).write_text(f"{self.run_id}\n")
        # a run that goes on may be FINISHED or FAILED there since its last end
        self.experiment.update_run(self._run_id, "RUNNING")

    def follow(self, run_dir: Path) -> None:
        """Take the id of the run that another process has begun, or one before a resume."""
        super().follow(run_dir)
        kept = Path(run_dir, ID_FILE)
        if self._run_id is None and kept.exists():
            self._run_id = kept.read_text().strip()

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write the metrics of a step, unless the run has them from before a resume."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [
            # MLflow refuses a point with any other character in a name, and all points beside it
            Metric(re.sub(r"[^a-zA-Z0-9_/. -]+", "", name), float(value), now, int(step))
            for name, value in metrics.items()
            if not isinstance(value, str)
        ]
        values = [value for value in values if step > self._last_step(value.key)]
        if values:
            self.experiment.log_batch(self.run_id, metrics=values, **self._options)

    def _last_step(self, name: str) -> int:
        if self._written is None:
            return -1
        if name not in self._written:
            history = self.experiment.get_metric_history(self._run_id, name)
            self._written[name] = max((point.step for point in history), default=-1)
        return self._written[name]

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Record hyperparameters; those that a run has from before cannot change, and are left as they are."""
        from mlflow.entities import Param

        kept = self.experiment.get_run(self.run_id).data.params
        # 250 letters are what each version of MLflow takes
        new = [Param(name, str(value)[:250]) for name, value in flat_params(params).items() if name not in kept]
        for start in range(0, len(new), 100):  # as many as MLflow takes at once
            self.experiment.log_batch(self.run_id, params=new[start : start + 100], **self._options)

    def finalize(self, status: str = "success") -> None:
        """End the run."""
        if self._client is not None:
            self._client.set_terminated(self._run_id, "FINISHED" if status == "success" else "FAILED")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the client when the logger is pickled to another process, which goes on in the run by its id."""
        return {**super().__getstate__(), "_client": None}
