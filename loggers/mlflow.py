"""MLFlowLogger: writes to MLflow using the mlflow package."""

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
"""File in the run directory that stores the id of the MLflow run to continue after a resume."""


class MLFlowLogger(Logger):
    """Writes metrics and hyperparameters to an MLflow run.

    When training resumes, the same MLflow run continues, and no point is written twice. To log images and artifacts,
    use `run_id` with `experiment`, the `MlflowClient`.

    Args:
        experiment_name: Name of the experiment, which is created if it does not exist.
        run_name: Name of a new MLflow run.
        tracking_uri: Tracking server or store. None: MLFLOW_TRACKING_URI or, if it is not set, `save_dir/mlflow.db`.
        tags: Tags for a new MLflow run.
        save_dir: Folder for the local store.
        artifact_location: Artifact location for a new experiment.
        run_id: Id of an existing MLflow run to continue.
        synchronous: Whether logging calls wait for the server. None: MLflow's default.

    Raises ModuleNotFoundError if the mlflow package is not installed.
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
        # a database, since MLflow 3 no longer supports its file store
        self._folder = None if uri else Path(save_dir or ".")
        self._uri = uri or f"sqlite:///{Path(save_dir or '.', DATABASE)}"
        self._experiment_name, self._run_name, self.tags = experiment_name, run_name, dict(tags or {})
        self._artifact_location, self._run_id = artifact_location, run_id
        self._options = {} if synchronous is None else {"synchronous": synchronous}
        self._experiment_id: str | None = None
        self._client: Any = None
        # latest step of each metric from before the resume; None in a new run
        self._written: dict[str, int] | None = None

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run. The first access starts the run."""
        _ = self.experiment
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        """Id of the experiment. The first access creates it."""
        _ = self.experiment
        return self._experiment_id

    @property
    def experiment(self) -> Any:
        """The `MlflowClient`, or a no-op object on ranks other than 0. The first access starts the MLflow run."""
        if current_rank() != 0:
            return NoExperiment()
        if self._client is None:
            self._client = self._connect()
        return self._client

    def _connect(self) -> Any:
        import mlflow
        from mlflow.tracking.context.registry import resolve_tags

        # a database stores no files: without a location, MLflow would put them in the working directory
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
        # a deleted experiment keeps its name but accepts no runs
        if experiment is not None and experiment.lifecycle_stage != "deleted":
            self._experiment_id = experiment.experiment_id
        else:
            self._experiment_id = client.create_experiment(self._experiment_name, artifacts)
        tags = {**self.tags, **({} if self._run_name is None else {"mlflow.runName": self._run_name})}
        self._run_id = client.create_run(self._experiment_id, tags=resolve_tags(tags)).info.run_id
        return client

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Start an MLflow run, or continue the one recorded in the run directory."""
        super().open(run_dir, resume_step)
        if resume_step is not None:
            self.follow(run_dir)
        self._written = None if resume_step is None else {}
        Path(run_dir, ID_FILE).write_text(f"{self.run_id}\n")
        # before a resume the run may have ended as FINISHED or FAILED
        self.experiment.update_run(self._run_id, "RUNNING")

    def follow(self, run_dir: Path) -> None:
        """Read the MLflow run's id from the run directory."""
        super().follow(run_dir)
        id_file = Path(run_dir, ID_FILE)
        if self._run_id is None and id_file.exists():
            self._run_id = id_file.read_text().strip()

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write a step's metrics, except those that the MLflow run recorded before a resume."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [
            # MLflow rejects a batch if a name in it has any other character
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
        """Record hyperparameters. Existing values are left unchanged, because MLflow does not allow changes."""
        from mlflow.entities import Param

        recorded = self.experiment.get_run(self.run_id).data.params
        # all versions of MLflow accept 250 characters
        new = [Param(name, str(value)[:250]) for name, value in flat_params(params).items() if name not in recorded]
        for start in range(0, len(new), 100):  # MLflow's limit per call
            self.experiment.log_batch(self.run_id, params=new[start : start + 100], **self._options)

    def finalize(self, status: str = "success") -> None:
        """End the MLflow run."""
        if self._client is not None:
            self._client.set_terminated(self._run_id, "FINISHED" if status == "success" else "FAILED")

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the logger without its client. Another process continues the run using its id."""
        return {**super().__getstate__(), "_client": None}
