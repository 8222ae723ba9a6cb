"""Loggers, with Lightning's arguments."""

import os
import secrets
import warnings
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch

from ...base.environment import get_variable
from ...base.errors import ConfigError
from ...base.place import find_place
from ...loggers import csv_file, logger, mlflow, tensorboard, wandb
from ...loggers.hyperparameters import flat_params, write_hyperparameters
from ...loggers.logger import NoExperiment
from ...tasks.hyperparameters import plain_containers
from .aliases import alias
from .placeholders import UnsupportedAttributeError, UnsupportedError
from .rank_zero import rank_zero_only, rank_zero_warn
from .utilities import get_filesystem, move_data_to_device, package_available

LOCAL_FILE_URI_PREFIX = "file:"
WANDB_AVAILABLE = package_available("wandb")


def folder_below(root: str | Path, logger: Any) -> str:
    """Return the folder that Lightning uses for a logger with the given save_dir (or `root`), name and version."""
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return os.path.join(logger.save_dir or root, str(logger.name), version)


class WithoutFiles:
    """A logger that writes no files. Its name and version determine the checkpoint folder."""

    def make_version(self) -> None:
        """Choose the version before the run begins."""


def with_prefix(prefix: str, metrics: Mapping[str, Any], separator: str = "-") -> dict[str, Any]:
    """Return metrics with a prefix and a separator before each name. An empty prefix leaves the names unchanged."""
    return {f"{prefix}{separator}{name}": value for name, value in metrics.items()} if prefix else dict(metrics)


def refuse_uploads(logger: str, log_model: object) -> None:
    """Raise UnsupportedError if a logger is configured to upload checkpoints."""
    if log_model:
        raise UnsupportedError(
            f"{logger}(log_model={log_model!r}) is not supported. To upload checkpoint_callback.best_model_path, use "
            "logger.experiment in Callback.on_fit_end or after_save_checkpoint."
        )


class PlacesPoints:
    """A logger that selects the step at which it writes a Lightning Trainer's values."""

    trainer_of_points: Any = None
    """The running Lightning Trainer; None for other trainers."""

    def log_point(self, values: Mapping[str, float], step: int) -> None:
        """Write values at the logged "step" or, if there is none, at a step that the trainer chooses.

        In `fit`, the trainer uses the index of the latest step. In other stages, it uses the number of steps.
        """
        this: Any = self
        trainer, values = self.trainer_of_points, dict(values)
        # in Lightning, a logged "step" becomes the x-axis, and the epoch is omitted
        if "step" in values:
            step = int(values.pop("step"))
            values.pop("epoch")
        elif trainer is not None:
            step = max(0, trainer.state.global_step + trainer.logged_ahead - (trainer.stage == "fit"))
            logged = trainer.logged_metrics.get("epoch") if trainer.stage == "fit" else None
            values["epoch"] = trainer.current_epoch if logged is None else float(logged)
        this.log_metrics(values, step)


class FabricLogger(PlacesPoints, WithoutFiles, logger.Logger, ABC):
    """Base class for loggers, as in lightning.fabric. A logger may inherit from both this class and Logger."""

    @property
    @abstractmethod
    def name(self) -> str | None:
        """The name of the experiment."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """The version of the experiment."""

    @property
    def root_dir(self) -> str | None:
        """The folder for all versions; None if the logger saves no files."""
        return None

    @property
    def log_dir(self) -> str | None:
        """This version's folder; None if the logger saves no files."""
        return None

    @property
    def save_dir(self) -> str | None:
        """The folder for all experiments; None if the logger saves no files."""
        return None

    @property
    def group_separator(self) -> str:
        """Separator between a metric's group and its name."""
        return "/"

    @abstractmethod
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Write a step's metrics."""

    @abstractmethod
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Record hyperparameters."""

    def log_point(self, values: Mapping[str, float], step: int) -> None:
        """Write the values for a logging point and save the logger."""
        super().log_point(values, step)
        self.save()

    def finalize(self, status: str) -> None:
        """Save and close the logger."""
        self.save()


class Logger(FabricLogger):
    """Base class for loggers. A run calls `log_metrics`, `log_hyperparams`, `save` and `finalize` on rank 0."""


def rank_zero_experiment(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make a logger's `experiment` a no-op object on ranks other than 0."""

    @wraps(fn)
    def experiment(self: Any) -> Any:
        return fn(self) if rank_zero_only.rank == 0 else DummyExperiment()

    return experiment


class DummyExperiment(NoExperiment):
    """A no-op object that returns itself for any index."""

    def __getitem__(self, index: Any) -> "DummyExperiment":
        return self

    def __setitem__(self, *arguments: Any) -> None:
        return None


class DummyLogger(Logger):
    """A logger that writes nothing and accepts every call."""

    name = version = ""

    @property
    def experiment(self) -> DummyExperiment:
        """A no-op object."""
        return DummyExperiment()

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def __getitem__(self, index: int) -> "DummyLogger":
        return self

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look up special methods, which must not exist
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class FolderOfLogger:
    """A logger's folder: `save_dir/name/version_N`, or `save_dir/name/version` for a string version.

    The folder depends on the logger's attributes, which subclasses may override as properties. If no version is set,
    the first access chooses the next free `version_N`.

    Args:
        logger: The logger.
        kind: The logger's class in this module. It is used to detect whether a subclass overrides `log_dir`.
    """

    def __init__(
        self, logger: Any, kind: Any, save_dir: str | Path, name: str | None, version: int | str | None
    ) -> None:
        if "://" in str(save_dir):
            raise ConfigError(f"save_dir must be a local folder, got {str(save_dir)!r}. Mount the store as a folder.")
        self.logger, self.kind = logger, kind
        self.save_dir, self.name, self._version = os.fspath(save_dir), name, version
        self._start = os.getcwd()  # absolute, because the process may change its working directory

    @property
    def version(self) -> int | str:
        """The version that was set or that a subclass selects. The default is the next free version."""
        # on first access, so that an unused logger does not occupy a version
        if self._version is None:
            self._version = self.logger._get_next_version()
        return self._version

    @property
    def root_dir(self) -> str:
        """The folder for all versions."""
        name: str | None = self.logger.name
        return os.path.join(self.logger.save_dir, name) if name else str(self.logger.save_dir)

    @property
    def log_dir(self) -> str:
        """The folder of this version."""
        version = self.logger.version
        version = version if isinstance(version, str) else f"version_{version}"
        return os.path.expanduser(os.path.expandvars(os.path.join(self.logger.root_dir, version)))

    @property
    def path(self) -> Path:
        """The absolute path of this version's folder, or of `log_dir` if a subclass overrides `log_dir`."""
        is_overridden = type(self.logger).log_dir is not self.kind.log_dir
        return Path(self._start, self.logger.log_dir if is_overridden else self.log_dir)

    def choose(self, resume: bool) -> None:
        """If no version is set and the run is being resumed, select the latest version."""
        if self._version is None and resume:
            self._version = max(self.versions(), default=0)

    def follow(self, directory: Path) -> None:
        """Use the version of the folder that another process selected, if the folder belongs to this logger."""
        # a concurrent run may have created another version in the meantime
        if self._version is None and directory.parent == self._root:
            number = directory.name.removeprefix("version_")
            self._version = int(number) if number.isdigit() and number != directory.name else directory.name

    def versions(self) -> list[int]:
        """Return the existing version numbers."""
        return [int(path.name[8:]) for path in self._root.glob("version_*") if path.name[8:].isdigit()]

    @property
    def _root(self) -> Path:
        return Path(self._start, os.path.expanduser(os.path.expandvars(self.root_dir)))


class FolderParts(PlacesPoints, logger.Logger):
    """Base class for loggers with their own folder. Programs read parts of the path from the logger's attributes."""

    own_folder: FolderOfLogger | None = None
    """The logger's folder. None: the run directory."""
    prefix: str
    sub_dir: str | None = None
    # private in Lightning; programs that subclass a logger read and set it
    _save_dir, _name, _version, _root_dir, _prefix = map(
        alias, ("own_folder.save_dir", "own_folder.name", "own_folder._version", "own_folder.root_dir", "prefix")
    )

    @property
    def save_dir(self) -> str | None:
        """The folder for all experiments."""
        return self.own_folder.save_dir if self.own_folder else super().save_dir

    @property
    def name(self) -> str | None:
        """The name of the experiment."""
        return (self.own_folder.name or "") if self.own_folder else super().name

    @property
    def version(self) -> int | str | None:
        """The version of the experiment."""
        return self.own_folder.version if self.own_folder else super().version

    @property
    def root_dir(self) -> str | None:
        """The folder for all versions."""
        return self.own_folder.root_dir if self.own_folder else super().root_dir

    @property
    def log_dir(self) -> str | None:
        """The folder of this version."""
        if self.own_folder is None:
            return super().log_dir
        return os.path.join(self.own_folder.log_dir, self.sub_dir or "").rstrip("/")

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Open the logger in its own folder if it has one, otherwise in `run_dir`."""
        if self.own_folder is not None:
            self.own_folder.choose(resume_step is not None)
            run_dir = self.own_folder.path
        super().open(run_dir / (self.sub_dir or ""), resume_step)

    def follow(self, run_dir: Path) -> None:
        """Store the folder that rank 0 writes to."""
        if self.own_folder is not None:
            self.own_folder.follow(run_dir)
        else:
            super().follow(run_dir)

    @property
    def _fs(self) -> Any:
        return get_filesystem(self.own_folder.root_dir if self.own_folder else "")

    def _get_next_version(self) -> int:
        return max(self.own_folder.versions(), default=-1) + 1 if self.own_folder else 0


class TensorBoardLogger(FolderParts, tensorboard.TensorBoardLogger):
    """Writes event files and `hparams.yaml` to `save_dir/name/version/sub_dir`. The folder is created on first use."""

    LOGGER_JOIN_CHAR, NAME_HPARAMS_FILE = "-", "hparams.yaml"

    def __init__(
        self,
        save_dir: str | Path,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(own_metrics_last=False, **kwargs)
        self.sub_dir = None if sub_dir is None else os.fspath(sub_dir)
        self.prefix, self._default_hp_metric, self._log_graph = prefix, default_hp_metric, log_graph
        self._is_resumed = False
        if save_dir is not None:  # otherwise the folder of the run
            self.own_folder = FolderOfLogger(self, TensorBoardLogger, save_dir, name, version)
        self.hparams: dict[str, Any] = {}

    group_separator = "/"

    # private in Lightning; programs read it
    _experiment, _kwargs, _sub_dir = alias("_writer"), alias("_writer_options"), alias("sub_dir")

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Start a new event file."""
        super().open(run_dir, resume_step)
        self._is_resumed = resume_step is not None

    @property
    def experiment(self) -> Any:
        """torch's SummaryWriter, opened on first access on rank 0."""
        if self._writer is None and rank_zero_only.rank == 0 and self.own_folder is not None:
            self.open(self.own_folder.path, None)
        return super().experiment

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write scalars. If a value is a dict, its items are shown as curves in a single chart."""
        if rank_zero_only.rank != 0:
            return
        _ = self.experiment
        for name, values in metrics.items():
            if isinstance(values, Mapping):
                self.experiment.add_scalars(name, values, step)
        scalars = {name: value for name, value in metrics.items() if not isinstance(value, Mapping)}
        super().log_metrics(with_prefix(self.prefix, scalars), step or 0)

    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        """Record hyperparameters and their metrics. If `metrics` is a single value, record it as `hp_metric`."""
        hparams = as_dict(params)
        self.hparams.update(hparams)
        values = metrics if metrics is None or isinstance(metrics, Mapping) else {"hp_metric": metrics}
        if not values and self._default_hp_metric and not self._final and not self._is_resumed:
            values, step = {"hp_metric": -1.0}, 0
        if values:
            self.log_metrics(values, step)
        super().log_hyperparams(flat_params(sanitize_callables(hparams)), with_prefix(self.prefix, values or {}))

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record a model's graph by calling the model in evaluation mode with its `example_input_array`."""
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        if self._writer is None or not self._log_graph:
            return
        if example is None:
            rank_zero_warn("TensorBoardLogger(log_graph=True) wrote no graph. Set example_input_array in the module.")
            return
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.random.fork_rng(), warnings.catch_warnings():
                # torch 2.15 deprecates torch.jit.trace, but still uses it
                warnings.filterwarnings("ignore", message="`torch.jit.trace")
                self._writer.add_graph(model, move_data_to_device(example, device))
        finally:
            for module, mode in modes:
                module.training = mode

    def save(self) -> None:
        """Flush all events and write `hparams.yaml` if it does not exist yet."""
        super().save()
        folder = Path(self.log_dir or "")
        if self._writer is not None and not (folder / self.NAME_HPARAMS_FILE).exists():
            write_hyperparameters(folder, self.hparams)

    def finalize(self, status: str) -> None:
        """Close the logger."""
        if self._writer is not None:
            self.save()
        super().finalize(status)
        self._writer = None  # later calls open the folder again


class ExperimentWriter:
    """Writes `metrics.csv` and `hparams.yaml` to a folder."""

    NAME_HPARAMS_FILE, NAME_METRICS_FILE = "hparams.yaml", "metrics.csv"

    def __init__(self, log_dir: str, writer: csv_file.CSVLogger | None = None) -> None:
        self.log_dir = log_dir
        self.metrics_file_path = str(Path(log_dir, self.NAME_METRICS_FILE))
        self._writer = writer or csv_file.CSVLogger()
        if writer is None:
            self._writer.open(Path(log_dir), None)
        self._rows = 0

    @property
    def metrics_keys(self) -> list[str]:
        """The columns of the file."""
        return self._writer.columns

    @property
    def hparams(self) -> dict[str, Any]:
        """The recorded hyperparameters."""
        return self._writer.hparams

    def log_hparams(self, params: Mapping[str, Any]) -> None:
        """Record hyperparameters."""
        self._writer.log_hyperparams(params)

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Write a row. If `step` is None, use the number of rows written so far as the step."""
        # Lightning's CSVLogger calls this method
        csv_file.CSVLogger.log_metrics(self._writer, metrics_dict, self._rows if step is None else step)
        self._rows += 1

    def save(self) -> None:
        """Sync the file to disk."""
        csv_file.CSVLogger.save(self._writer)


class CSVLogger(FolderParts, csv_file.CSVLogger):
    """Writes `metrics.csv` and `hparams.yaml` to `save_dir/name/version`. The folder is created on first use."""

    LOGGER_JOIN_CHAR, group_separator = "-", "/"

    def __init__(
        self,
        save_dir: str | Path,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__()
        self.prefix, self.flush_logs_every_n_steps = prefix, flush_logs_every_n_steps
        if save_dir is not None:
            self.own_folder = FolderOfLogger(self, CSVLogger, save_dir, name, version)
        self._experiment: ExperimentWriter | None = None
        self._has_written = False

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Open the file. If another run already wrote a file for this version, rename that file first."""
        super().open(run_dir, resume_step)
        path, begins = self._path, resume_step is None and not self._has_written
        self._has_written = True
        if begins and path is not None and path.exists():
            backup = next(name for name in (path.with_name(f"metrics.{n}.csv") for n in count(1)) if not name.exists())
            path.rename(backup)
            self.columns = []
            rank_zero_warn(f"{path.parent} contained metrics from another run, which were moved to {backup.name}.")

    def follow(self, run_dir: Path) -> None:
        """Store rank 0's folder. A later run in the parent process then appends to the same file."""
        super().follow(run_dir)
        self._has_written = True

    @property
    def experiment(self) -> Any:
        """The writer, opened on first access on rank 0."""
        if rank_zero_only.rank != 0:
            return DummyExperiment()
        if self._path is None and self.own_folder is not None:
            self.open(self.own_folder.path, None)
        if self._experiment is None:
            self._experiment = ExperimentWriter(self.log_dir or "", self)
        return self._experiment

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write a row."""
        self.experiment.log_metrics(with_prefix(self.prefix, metrics), step)
        if step is not None and (step + 1) % self.flush_logs_every_n_steps == 0:
            self.save()

    def log_hyperparams(self, params: Any = None, metrics: Any = None) -> None:
        """Record hyperparameters."""
        _ = self.experiment
        super().log_hyperparams(as_dict(params))

    def save(self) -> None:
        """Sync the file to disk. Create the folder even if nothing was logged."""
        if rank_zero_only.rank == 0 and self.log_dir is not None:
            Path(self.log_dir).mkdir(parents=True, exist_ok=True)
        super().save()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the open writer and its path, because another process opens the folder itself."""
        return {**self.__dict__, "_experiment": None, "_path": None}


class MLFlowLogger(PlacesPoints, WithoutFiles, mlflow.MLFlowLogger):
    """Logs to MLflow using the mlflow package."""

    LOGGER_JOIN_CHAR, group_separator = "-", "/"

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | None = "./mlruns",
        log_model: bool | Literal["all"] = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        refuse_uploads("MLFlowLogger", log_model)
        super().__init__(
            experiment_name, run_name, tracking_uri, tags, save_dir, artifact_location, run_id, synchronous
        )
        self.prefix = prefix

    @property
    def save_dir(self) -> str | None:
        """The local store's folder; None if the store is on a server."""
        if self._folder is not None:
            return str(self._folder)
        return self._uri.removeprefix(LOCAL_FILE_URI_PREFIX) if self._uri.startswith(LOCAL_FILE_URI_PREFIX) else None

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
        """None, because MLflow determines where a run's files are stored."""
        return None

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """On rank 0, write the metrics of a step."""
        if rank_zero_only.rank == 0:
            super().log_metrics(with_prefix(self.prefix, metrics), step or 0)

    def log_hyperparams(self, params: Any, metrics: Any = None) -> None:
        """On rank 0, record hyperparameters."""
        if rank_zero_only.rank == 0:
            super().log_hyperparams(as_dict(params))


LOG_OBJECTS = (
    "WandbLogger: for tables, texts, audio, videos and artifacts, use the wandb package: "
    "logger.experiment.log({key: wandb.Table(...)}), logger.experiment.use_artifact(...)."
)


class WandbLogger(PlacesPoints, WithoutFiles, wandb.WandbLogger):
    """Logs to Weights & Biases using the wandb package."""

    LOGGER_JOIN_CHAR, group_separator = "-", "/"

    def __init__(  # noqa: PLR0913
        self,
        name: str | None = None,
        save_dir: str | Path = ".",
        version: str | None = None,
        offline: bool = False,
        dir: str | Path | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: bool | Literal["all"] = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable",
        **kwargs: Any,
    ) -> None:
        refuse_uploads("WandbLogger", log_model)
        project = project or get_variable("WANDB_PROJECT") or "lightning_logs"
        super().__init__(experiment=experiment, **kwargs)
        # arguments of the caller for wandb.init take precedence
        mode = {"mode": "offline"} if offline else {}
        where = {
            "name": name,
            "project": project,
            "id": version or id,
            "dir": os.fspath(save_dir or dir or "."),
            **mode,
        }
        self._init = {**where, **self._init}
        if anonymous:
            self._init.setdefault("anonymous", "allow")
        self.prefix = prefix

    @property
    def save_dir(self) -> str | None:
        """The folder of the files."""
        folder: str | None = self._init["dir"]
        return folder

    @property
    def name(self) -> str | None:
        """The project."""
        project: str | None = self._init["project"]
        return project

    @property
    def version(self) -> str | None:
        """The W&B run's id; None if the run does not exist yet and no id was passed."""
        identity: str | None = self._init["id"]
        return identity

    @property
    def log_dir(self) -> str | None:
        """None, because W&B determines where a run's files are stored."""
        return None

    def make_version(self) -> None:
        """Choose an id for the W&B run if none is set. W&B starts the run later, possibly in another process."""
        import wandb

        if wandb.run is not None:
            _ = self.experiment  # resumes that run
        self._init["id"] = self.version or get_variable("WANDB_RUN_ID") or secrets.token_hex(6)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """On rank 0, write the metrics of a step."""
        if rank_zero_only.rank != 0:
            return
        if step is None:
            self.experiment.log(with_prefix(self.prefix, metrics))
        else:
            super().log_metrics(with_prefix(self.prefix, metrics), step)

    def log_hyperparams(self, params: Any, metrics: Any = None) -> None:
        """On rank 0, record hyperparameters."""
        if rank_zero_only.rank == 0:
            super().log_hyperparams(sanitize_callables(as_dict(params)))

    def log_text(self, key: str, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Ignore the config that a run logs as text. Raises UnsupportedError if called with Lightning's arguments."""
        if kwargs or not isinstance(args[0], str):
            raise UnsupportedError(f"WandbLogger.log_text: {LOG_OBJECTS}")

    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images. Other arguments, such as `caption`, must be lists with one value per image."""
        import wandb

        each = [{name: values[index] for name, values in kwargs.items()} for index in range(len(images))]
        shown = [wandb.Image(image, **options) for image, options in zip(images, each, strict=True)]
        self.log_metrics({key: shown}, step)

    def __getattr__(self, name: str) -> Any:
        if name in ("log_table", "log_audio", "log_video", "use_artifact", "download_artifact"):
            raise UnsupportedAttributeError(f"WandbLogger.{name}: {LOG_OBJECTS}")
        return super().__getattr__(name)


for kind in (TensorBoardLogger, CSVLogger, MLFlowLogger, WandbLogger):
    Logger.register(kind)


def scan_checkpoints(
    checkpoint_callback: Any, logged_model_time: Mapping[str, float]
) -> list[tuple[float, str, Any, str]]:
    """Return the time, path, score and kind of each checkpoint that has changed since it was logged."""
    scores = {
        checkpoint_callback.last_model_path: (checkpoint_callback.current_score, "latest"),
        checkpoint_callback.best_model_path: (checkpoint_callback.best_model_score, "best"),
        **{path: (score, "best_k") for path, score in checkpoint_callback.best_k_models.items()},
    }
    saved = ((Path(path).stat().st_mtime, path, *rest) for path, rest in scores.items() if path and Path(path).exists())
    return sorted(item for item in saved if logged_model_time.get(item[1], 0.0) < item[0])


def folder_of_run(trainer: Any) -> Path | None:
    """Return the first logger's folder, or the next lightning_logs/version_N; None if there are no loggers.

    Ranks other than 0 always return None, because they receive the folder from rank 0.
    """
    place = find_place(trainer.cluster)
    if trainer.fast_dev_run or not trainer.loggers or (place is not None and place.rank > 0):
        return None
    first = trainer.loggers[0]
    log_dir = getattr(first, "log_dir", None)
    if log_dir is None and isinstance(first, WithoutFiles):
        first.make_version()
        log_dir = folder_below(trainer.default_root_dir, first)  # where ModelCheckpoint writes
    if log_dir is None:  # without a `run.json`, the folder is not a run directory
        folders = (Path(trainer.default_root_dir, trainer.run_name, f"version_{number}") for number in count())
        log_dir = next(folder for folder in folders if not folder.exists())
        log_dir.mkdir(parents=True)
    return Path(log_dir)


@contextmanager
def points_of(trainer: Any) -> Iterator[None]:
    """Within this context, let the loggers select the steps at which a trainer's values are written."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, PlacesPoints)]
    for placing in loggers:
        placing.trainer_of_points = trainer
    try:
        yield
    finally:
        for placing in loggers:
            placing.trainer_of_points = None


# --- hyperparameters ------------------------------------------------------------------------------------------------


def as_dict(params: Any) -> dict[str, Any]:
    """Convert hyperparameters (a mapping, a namespace or None) to a dict."""
    if isinstance(params, Namespace):
        return dict(vars(params))
    return {} if params is None else {name: plain_containers(value) for name, value in params.items()}


def add_prefix(metrics: Mapping[str, Any], prefix: str, separator: str) -> Mapping[str, Any]:
    """Return metrics with a prefix and a separator before each name. An empty prefix leaves the names unchanged."""
    return with_prefix(prefix, metrics, separator)


def sanitize_callables(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with classes and functions replaced by their names."""
    return {
        name: getattr(value, "__name__", str(value)) if callable(value) else value for name, value in params.items()
    }
