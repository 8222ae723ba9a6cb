"""MLFlowLogger: writes to MLflow, by its own package."""

import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from .hyperparameters import flat_params
from .logger import Logger, NoExperiment
from .pixels import finite_values, to_pixels
from .remote import CheckpointUploads, kept_id, read_id, with_prefix

FILE_PREFIX, SQLITE_PREFIX = "file:", "sqlite:///"
DATABASE = "mlflow.db"


class MLFlowLogger(Logger):
    """Writes metrics and hyperparameters to a run of MLflow; `experiment` is the `MlflowClient`.

    A resume of the run directory goes on in the same MLflow run, and writes no point twice. The package is imported
    when the logger is made.

    Args:
        experiment_name: the experiment, made if there is none of this name.
        run_name: the name of a new run.
        tracking_uri: the server or store; None: the variable MLFLOW_TRACKING_URI, else `mlflow.db` in `save_dir`.
        tags: tags of a new run.
        save_dir: the folder of a local store.
        log_model: send checkpoints: "all" as they are saved, True the best and the last at the end.
        prefix: is put before the name of each metric: `prefix-name`.
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
        log_model: bool | Literal["all"] = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        import mlflow  # noqa: F401

        from ..base.environment import get_variable

        # MLflow 3 refuses its store of plain files
        local = f"{SQLITE_PREFIX}{Path(save_dir or '.', DATABASE)}"
        self._uri = tracking_uri or get_variable("MLFLOW_TRACKING_URI") or local
        self._experiment_name, self._run_name, self.tags = experiment_name, run_name, dict(tags or {})
        self._artifact_location, self._run_id, self.prefix = artifact_location, run_id, prefix
        self._options = {} if synchronous is None else {"synchronous": synchronous}
        self._experiment_id: str | None = None
        self._client: Any = None
        self._uploads = CheckpointUploads(log_model, self._upload)
        self._resume_step: int | None = None
        self._written: dict[str, int] = {}

    @property
    def save_dir(self) -> str | None:
        """The folder of a local store; None for a server."""
        if self._uri.startswith(SQLITE_PREFIX) and self._uri.endswith(DATABASE):
            return str(Path(self._uri.removeprefix(SQLITE_PREFIX)).parent)
        return self._uri.removeprefix(FILE_PREFIX) if self._uri.startswith(FILE_PREFIX) else None

    @property
    def name(self) -> str | None:
        """The id of the experiment."""
        return self.experiment_id

    @property
    def version(self) -> str | None:
        """The id of the run."""
        return self.run_id

    @property
    def log_dir(self) -> str | None:
        """None: where the run's files are is MLflow's."""
        return None

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
        from ..trainer.processes.place import current_rank

        if current_rank() != 0:
            return NoExperiment()
        if self._client is None:
            self._client = self._connect()
        return self._client

    def _connect(self) -> Any:
        import mlflow
        from mlflow.tracking.context.registry import resolve_tags

        artifacts = self._artifact_location
        if self.save_dir is not None and self._uri.startswith(SQLITE_PREFIX):
            folder = Path(self.save_dir).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            artifacts = artifacts or (folder / "artifacts").as_uri()
        mlflow.set_tracking_uri(self._uri)
        client = mlflow.MlflowClient(self._uri)
        if self._run_id is not None:
            self._experiment_id = client.get_run(self._run_id).info.experiment_id
            return client
        found = client.get_experiment_by_name(self._experiment_name)
        if found is not None and found.lifecycle_stage != "deleted":
            self._experiment_id = found.experiment_id
        else:
            self._experiment_id = client.create_experiment(self._experiment_name, artifacts)
        tags = {**self.tags, **({} if self._run_name is None else {"mlflow.runName": self._run_name})}
        self._run_id = client.create_run(self._experiment_id, tags=resolve_tags(tags)).info.run_id
        return client

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Begin the run, or go on in that of the run directory."""
        super().open(run_dir, resume_step)
        self._resume_step = resume_step
        if resume_step is not None:
            self.follow(run_dir)
        kept_id(Path(run_dir), "mlflow").write_text(f"{self.run_id}\n")
        self._written = {}
        self.experiment.update_run(self._run_id, "RUNNING")

    def follow(self, run_dir: Path) -> None:
        """Take the id of the run that another process has begun, or one before a resume."""
        super().follow(run_dir)
        self._run_id = self._run_id or read_id(Path(run_dir), "mlflow")

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write the metrics of a step, unless the run has them from before a resume."""
        from mlflow.entities import Metric

        at, now = int(step or 0), int(time.time() * 1000)
        values = [
            Metric(re.sub(r"[^a-zA-Z0-9_/. -]+", "", name), float(value), now, at)
            for name, value in with_prefix(self.prefix, metrics).items()
            if not isinstance(value, str)
        ]
        values = [value for value in values if at > self._last_step(value.key)]
        if values:
            self.experiment.log_batch(self.run_id, metrics=values, **self._options)

    def _last_step(self, name: str) -> int:
        """Return the newest step of a metric that was written before a resume; -1 if there is none."""
        if self._resume_step is None:
            return -1
        if name not in self._written:
            history = self.experiment.get_metric_history(self._run_id, name)
            self._written[name] = max((point.step for point in history), default=-1)
        return self._written[name]

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Record hyperparameters; those that a run has from before cannot change, and are left as they are."""
        from mlflow.entities import Param

        run = self.experiment.get_run(self.run_id)
        known = run.data.params
        found = [Param(name, str(value)[:250]) for name, value in flat_params(params).items() if name not in known]
        for start in range(0, len(found), 100):  # as many as MLflow takes at once
            self.experiment.log_batch(self.run_id, params=found[start : start + 100], **self._options)

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Keep a text as a file of the run, `TAG-STEP.md`."""
        self.experiment.log_text(self.run_id, text, f"{tag}-{step}.md")

    def log_image(self, tag: str, image: Any, step: int) -> None:
        """Keep a picture as a file of the run, `TAG-STEP.png`; see Logger."""
        self.experiment.log_image(self.run_id, to_pixels(image), f"{tag}-{step}.png")

    def log_figure(self, tag: str, figure: Any, step: int) -> None:
        """Keep a figure of matplotlib's as a file of the run, `TAG-STEP.png`."""
        self.experiment.log_figure(self.run_id, figure, f"{tag}-{step}.png")

    def log_histogram(self, tag: str, values: Any, step: int) -> None:
        """Keep how the finite numbers in a tensor or array are distributed as a file of the run, `TAG-STEP.json`."""
        import numpy

        counts, edges = numpy.histogram(finite_values(values), bins=64)
        found = {"counts": counts.tolist(), "edges": edges.tolist()}
        self.experiment.log_dict(self.run_id, found, f"{tag}-{step}.json")

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Send checkpoints, if that is wished."""
        self._uploads.after_save(checkpoint_callback)

    def _upload(self, path: Path, details: dict[str, Any]) -> None:
        import yaml

        place, aliases = path.stem, details.pop("aliases")
        if path.is_dir():
            self.experiment.log_artifacts(self.run_id, str(path), place)
        else:
            self.experiment.log_artifact(self.run_id, str(path), place)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "metadata.yaml").write_text(yaml.safe_dump(details))
            Path(folder, "aliases.txt").write_text(str(aliases))
            self.experiment.log_artifacts(self.run_id, folder, place)

    def finalize(self, status: str = "success") -> None:
        """Send what is left, and end the run."""
        if self._client is None:
            return
        if status == "success":
            self._uploads.finish()
        ended = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED"}.get(status, status)
        self._client.set_terminated(self._run_id, ended)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the client when the logger is pickled to another process, which goes on in the run by its id."""
        return {**self.__dict__, "_client": None}
