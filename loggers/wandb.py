"""WandbLogger: writes to Weights & Biases, by its own package."""

import html
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from ..base.errors import ConfigError
from ..base.run_names import require_local
from ..trainer.processes.place import current_rank, find_place
from .hyperparameters import plain
from .logger import Logger, NoExperiment
from .pixels import finite_values, to_pixels
from .remote import CheckpointUploads, kept_id, read_id, with_prefix

STEP = "trainer/global_step"
"""The metric that is the x-axis of all others."""


class WandbLogger(Logger):
    """Writes metrics against `trainer/global_step` to a run of Weights & Biases; `experiment` is that run.

    A resume of the run directory goes on in the same W&B run, and writes no step twice that W&B knows of. The package
    is imported when the logger is first used.

    Args:
        name: the name that is shown of the run.
        save_dir: the folder of the files; the run directory by default.
        version: the id of the run, to go on in one.
        offline: write files only, to be sent by `wandb sync`.
        project: the project.
        log_model: send checkpoints: "all" as they are saved, True the best and the last at the end.
        experiment: a run that was made already.
        prefix: is put before the name of each metric: `prefix-name`.
        checkpoint_name: the name of the artifact that checkpoints are; model-ID by default.
        init_options: further arguments of `wandb.init`.

    Raises ModuleNotFoundError where the package is not installed, ConfigError for log_model offline.
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | Path | None = None,
        version: str | None = None,
        offline: bool = False,
        project: str | None = None,
        log_model: bool | Literal["all"] = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        **init_options: Any,
    ) -> None:
        import wandb  # noqa: F401

        if offline and log_model:
            raise ConfigError(
                f"WandbLogger(log_model={log_model!r}, offline=True): checkpoints cannot be sent offline; leave one."
            )
        require_local(save_dir, "WandbLogger's save_dir")
        self.prefix, self.checkpoint_name, self._run = prefix, checkpoint_name, experiment
        self._init: dict[str, Any] = {
            "name": name,
            "project": project,
            "id": version,
            "dir": None if save_dir is None else os.fspath(save_dir),
            "resume": "allow",
            **({"mode": "offline"} if offline else {}),
        }
        self._init.update(**init_options)  # jsonargparse follows a call to wandb.init, and so knows its arguments
        self._uploads = CheckpointUploads(log_model, self._upload)
        self._written, self._runs_elsewhere = -1, False

    @property
    def save_dir(self) -> str | None:
        """The folder of the files, if one was given."""
        given: str | None = self._init["dir"]
        return given or super().save_dir

    @property
    def name(self) -> str | None:
        """The project."""
        project: str | None = self._init["project"]
        return project

    @property
    def version(self) -> str | None:
        """The id of the run; None before there is one, unless given."""
        given: str | None = self._init["id"]
        return given if self._run is None else str(self._run.id)

    @property
    def experiment(self) -> Any:
        """The run of W&B, begun when it is first asked for on rank 0; a no-op object on the others."""
        if current_rank() != 0:
            return NoExperiment()
        if self._run is None:
            import wandb

            if self._init["dir"] is not None:
                os.makedirs(self._init["dir"], exist_ok=True)
            self._run, attach = wandb.run, getattr(wandb, "attach", None)
            if self._run is None and self._runs_elsewhere and attach is not None:
                with suppress(wandb.Error):  # it has been finished there
                    self._run = attach(self._init["id"])
            self._run = self._run or wandb.init(**self._init)
            self._run.define_metric(STEP)
            self._run.define_metric("*", step_metric=STEP, step_sync=True)
        return self._run

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Begin the run, or go on in that of the run directory."""
        super().open(run_dir, resume_step)
        if self._run is None:
            self._init["dir"] = self._init["dir"] or str(run_dir)
        if resume_step is not None:
            self.follow(run_dir)
        run = self.experiment
        kept_id(Path(run_dir), "wandb").write_text(f"{run.id}\n")
        self._written = -1
        if resume_step is not None:
            self._written = int(run.summary.get(STEP, -1))

    def follow(self, run_dir: Path) -> None:
        """Take the id of the run that another process has begun, or one before a resume."""
        super().follow(run_dir)
        self._init["id"] = self._init["id"] or read_id(Path(run_dir), "wandb")

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write the metrics of a step, unless W&B has them from before a resume."""
        named = with_prefix(self.prefix, metrics)
        if step is None:
            self.experiment.log(named)
        elif step > self._written:
            self.experiment.log({**named, STEP: int(step)})

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Record hyperparameters as the run's config."""
        self.experiment.config.update(plain(params), allow_val_change=True)

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Write a text, which W&B shows as it is, in letters of one width."""
        import wandb

        self._write_media(tag, wandb.Html(f"<pre>{html.escape(text)}</pre>"), step)

    def log_image(self, tag: str, image: Any, step: int) -> None:
        """Write a picture; see Logger."""
        import wandb

        self._write_media(tag, wandb.Image(to_pixels(image)), step)

    def log_figure(self, tag: str, figure: Any, step: int) -> None:
        """Write a figure of matplotlib's as a picture."""
        import wandb

        self._write_media(tag, wandb.Image(figure), step)

    def log_histogram(self, tag: str, values: Any, step: int) -> None:
        """Write how the numbers in a tensor or array are distributed."""
        import wandb

        found = finite_values(values)
        if found.size:
            self._write_media(tag, wandb.Histogram(found), step)

    def _write_media(self, tag: str, value: Any, step: int) -> None:
        if step > self._written:
            self.experiment.log({tag: value, STEP: int(step)})

    def watch(self, model: Any, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Record histograms of a model's gradients or parameters."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Send checkpoints, if that is wished."""
        self._uploads.after_save(checkpoint_callback)

    def _upload(self, path: Path, details: dict[str, Any]) -> None:
        import wandb

        aliases = details.pop("aliases")
        name = self.checkpoint_name or f"model-{self.experiment.id}"
        artifact = wandb.Artifact(name=name, type="model", metadata=details)
        if path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path), name="model.ckpt")
        self.experiment.log_artifact(artifact, aliases=aliases)

    def finalize(self, status: str) -> None:
        """Send what is left; the run goes on until `wandb.finish()` or the end of the process.

        A worker ends a run that it has begun: W&B's hook at exit is not called there, and another may go on in it.
        """
        if self._run is None:
            return
        if status == "success":
            self._uploads.finish()
        place = find_place()
        if place is not None and place.origin == "legato" and not self._runs_elsewhere:
            self._run.finish(exit_code=int(status != "success"))
            self._run = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the run when the logger is pickled to another process, which goes on in it by its id."""
        init, runs = {**self._init, "id": self.version}, self._run is not None and not self._run.disabled
        return {**self.__dict__, "_run": None, "_init": init, "_runs_elsewhere": runs or self._runs_elsewhere}
