"""ModelCheckpoint, with Lightning's arguments, file names and retention rules."""

import logging
import os
import re
import time
import warnings
from collections.abc import Mapping
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from ....base.errors import ConfigError
from ....callbacks.checkpoint_callback import CheckpointCallback
from ..loggers import folder_below
from ..placeholders import UnsupportedError
from ..utilities import get_filesystem
from .callback import Callback

if TYPE_CHECKING:
    from .... import Trainer
    from ....tasks.task import Task

log = logging.getLogger("legato")


class Checkpoint(CheckpointCallback, Callback):
    """Base class for callbacks that save checkpoints."""


class ModelCheckpoint(Checkpoint):
    """Saves checkpoints whose names contain metrics. Keeps the `save_top_k` best checkpoints according to `monitor`.

    A checkpoint is a file in Lightning's format (`epoch=3-val_loss=0.12.ckpt`). Only files that this run wrote are
    removed. Subclasses may override the methods with a leading underscore, which have Lightning's names.

    Args:
        dirpath: Folder for checkpoints. None: `checkpoints` in the first logger's folder.
        filename: Template for file names, such as "{epoch}-{val_loss:.2f}".
        save_last: Also save the newest checkpoint as `last.ckpt`. "link": create a symbolic link with that name.
        save_on_exception: Save a checkpoint when the run ends with an exception.
        auto_insert_metric_name: Replace `{epoch}` with `epoch=3` rather than `3`.
        enable_version_counter: If `name.ckpt` exists, write `name-v1.ckpt` instead of replacing it.
    """

    CHECKPOINT_JOIN_CHAR: ClassVar[str] = "-"
    CHECKPOINT_EQUALS_CHAR: ClassVar[str] = "="
    CHECKPOINT_NAME_LAST: str = "last"
    FILE_EXTENSION: str = ".ckpt"
    STARTING_VERSION: int = 1
    best_model_path: str = ""
    last_model_path: str = ""

    def __init__(  # noqa: PLR0913 (Lightning's arguments)
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        super().__init__()
        if dirpath is not None and "://" in str(dirpath):
            raise UnsupportedError(
                f"ModelCheckpoint(dirpath={str(dirpath)!r}): dirpath must be a local folder. Mount the store as a "
                "folder, or copy the files in on_train_end."
            )
        self.monitor, self.verbose = monitor, verbose
        self.auto_insert_metric_name = auto_insert_metric_name
        self.save_last, self.save_top_k, self.save_on_exception = save_last, save_top_k, save_on_exception
        self.save_weights_only = save_weights_only
        self._save_on_train_epoch_end = save_on_train_epoch_end
        self._enable_version_counter = enable_version_counter
        self.__init_monitor_mode(mode)
        self.__init_ckpt_dir(dirpath, filename)
        self.__init_triggers(every_n_train_steps, every_n_epochs, train_time_interval)
        self.__validate_init_configuration()
        self.current_score: Tensor | None = None
        self.best_k_models: dict[str, Tensor] = {}
        self.kth_best_model_path = ""
        self.best_model_score: Tensor | None = None
        self._last_global_step_saved = 0
        self._last_checkpoint_saved = ""
        self._last_time_checked: float | None = None
        self._defer_save_until_validation = False
        self._has_validated = False
        self._error: BaseException | None = None
        """The error that ends the run, while `on_exception` saves."""

    # programs call and replace these five methods by their mangled names, such as _ModelCheckpoint__resolve_ckpt_dir
    def __init_monitor_mode(self, mode: str) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f"ModelCheckpoint: mode must be 'min' or 'max', got {mode!r}.")
        self.mode, self.kth_value = mode, torch.tensor(float("inf") if mode == "min" else -float("inf"))

    def __init_ckpt_dir(self, dirpath: str | Path | None, filename: str | None) -> None:
        self.dirpath = os.path.realpath(os.path.expanduser(dirpath)) if dirpath else None
        self.filename, self._dirpath_is_given = filename, bool(dirpath)

    def __init_triggers(
        self, every_n_train_steps: int | None, every_n_epochs: int | None, train_time_interval: timedelta | None
    ) -> None:
        if every_n_train_steps is None and every_n_epochs is None and train_time_interval is None:
            every_n_epochs = 1
        self._every_n_train_steps, self._every_n_epochs = every_n_train_steps or 0, every_n_epochs or 0
        self._train_time_interval = train_time_interval

    def __validate_init_configuration(self) -> None:
        if self.save_top_k < -1:
            raise ConfigError(f"ModelCheckpoint: save_top_k must be at least -1, got {self.save_top_k}.")
        for name, count in (
            ("every_n_train_steps", self._every_n_train_steps),
            ("every_n_epochs", self._every_n_epochs),
        ):
            if count < 0:
                raise ConfigError(f"ModelCheckpoint: {name} must be 0 (never) or more, got {count}.")
        triggers = (self._every_n_train_steps >= 1, self._every_n_epochs >= 1, self._train_time_interval is not None)
        if sum(triggers) > 1:
            raise ConfigError(
                "ModelCheckpoint: every_n_train_steps, every_n_epochs and train_time_interval are mutually exclusive. "
                "Pass one of them, or use several callbacks."
            )
        if self.monitor is None and self.save_top_k not in (-1, 0, 1):
            raise ConfigError(
                f"ModelCheckpoint: save_top_k={self.save_top_k} needs a metric to rank checkpoints by. Pass monitor, "
                "or save_top_k=-1 (all), 0 (none) or 1 (the newest)."
            )

    @property
    def every_n_epochs(self) -> int:
        """Number of epochs between checkpoints; 0 disables saving after epochs."""
        return self._every_n_epochs

    @property
    def _fs(self) -> Any:  # private in Lightning; subclasses use it
        return get_filesystem(self.dirpath or "")

    @property
    def is_elsewhere(self) -> bool:
        """Whether `dirpath` was passed."""
        return self._dirpath_is_given

    # --- state ------------------------------------------------------------------------------------------------------
    @property
    def state_key(self) -> str:
        """Key for this callback's state in a checkpoint, unique to its monitor, mode and intervals."""
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self._every_n_train_steps,
            every_n_epochs=self._every_n_epochs,
            train_time_interval=self._train_time_interval,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints' paths and scores."""
        return {
            "monitor": self.monitor,
            "best_model_score": self.best_model_score,
            "best_model_path": self.best_model_path,
            "current_score": self.current_score,
            "dirpath": self.dirpath,
            "best_k_models": dict(self.best_k_models),
            "kth_best_model_path": self.kth_best_model_path,
            "kth_value": self.kth_value,
            "last_model_path": self.last_model_path,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the paths and scores. If `dirpath` has changed, restore only the path of the best checkpoint."""
        saved = state_dict.get("dirpath", self.dirpath)
        if self.dirpath is None:  # the run was in other processes, so this process has not resolved the folder
            self.dirpath = saved
        if self.dirpath == saved:
            self.best_model_score = state_dict["best_model_score"]
            self.kth_best_model_path = state_dict.get("kth_best_model_path", self.kth_best_model_path)
            self.kth_value = state_dict.get("kth_value", self.kth_value)
            self.best_k_models = dict(state_dict.get("best_k_models", self.best_k_models))
            self.last_model_path = state_dict.get("last_model_path", self.last_model_path)
            self.current_score = state_dict.get("current_score", self.current_score)
        else:
            warnings.warn(
                f"The dirpath has changed from {saved!r} to {self.dirpath!r}, therefore `best_model_score`, "
                f"`kth_best_model_path`, `kth_value`, `last_model_path` and `best_k_models` won't be reloaded. Only "
                f"`best_model_path` will be reloaded.",
                stacklevel=2,
            )
        self.best_model_path = state_dict["best_model_path"]

    # --- when to save -----------------------------------------------------------------------------------------------
    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Determine the folder and warn if it is not empty."""
        self.find_folder(trainer)
        self._has_validated = False
        if stage == "fit" and trainer.is_global_zero:
            self.__warn_if_dir_not_empty(self.dirpath or "")

    def __warn_if_dir_not_empty(self, dirpath: str | Path) -> None:
        folder = Path(dirpath)
        if self.save_top_k != 0 and folder.is_dir() and any(entry.name[0] != "." for entry in folder.iterdir()):
            warnings.warn(f"Checkpoint directory {folder} exists and is not empty.", stacklevel=2)

    def find_folder(self, trainer: "Trainer") -> None:
        """If `dirpath` is not set, set it to the folder that rank 0 chooses."""
        if trainer.running:
            self.dirpath = trainer.broadcast(self.__resolve_ckpt_dir(trainer))

    def __resolve_ckpt_dir(self, trainer: "Trainer") -> str:
        if self.dirpath is not None:
            return str(self.dirpath)
        logger = trainer.loggers[0] if trainer.loggers else None
        if logger is not None and logger.version is not None and logger.name is not None:
            return os.path.join(folder_below(trainer.default_root_dir, logger), "checkpoints")
        folder = trainer.run_dir if logger is not None and trainer.run_dir is not None else trainer.default_root_dir
        return os.path.join(folder, "checkpoints")

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start the clock."""
        self._last_time_checked = time.monotonic()

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save a checkpoint every `every_n_train_steps` steps or once per `train_time_interval`."""
        if self._is_accumulating(trainer) or self._should_skip_saving_checkpoint(trainer):
            return
        by_steps = self._every_n_train_steps >= 1 and trainer.global_step % self._every_n_train_steps == 0
        # not `or`: the first reading starts the clock, so the clock must be read after each batch
        if not (by_steps | self._is_due_by_time(trainer)):
            return
        # read this step's values from the device only if a decision depends on them
        if self.monitor is not None:
            trainer.current_run.show_step()
        candidates = self._monitor_candidates(trainer)
        if self.monitor is not None and (self.monitor not in candidates or self._validates_next(trainer)):
            self._defer_save_until_validation = True
        else:
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    def _is_accumulating(self, trainer: "Trainer") -> bool:
        """Return whether an unfinished step has accumulated gradients, which checkpoints do not contain."""
        return trainer.training and trainer.metrics.step == trainer.global_step

    def _is_due_by_time(self, trainer: "Trainer") -> bool:
        if self._train_time_interval is None:
            return False
        # ranks agree on the time only at logging points, so the decision needs no extra communication
        now = time.monotonic() if trainer.world_size == 1 else trainer.elapsed
        then = self._last_time_checked if trainer.world_size == 1 else self.__dict__.setdefault("_agreed_time", now)
        if then is None or now - then < self._train_time_interval.total_seconds():
            return False
        self._last_time_checked = self.__dict__["_agreed_time"] = now
        return True

    def _validates_next(self, trainer: "Trainer") -> bool:
        """Return whether a later validation run will measure the monitored metric again."""
        if (
            self._should_save_on_train_epoch_end(trainer)
            or not trainer.is_last_batch
            or not sum(trainer.num_val_batches)
        ):
            return False
        every = trainer.check_val_every_n_epoch
        return every is None or (trainer.current_epoch + 1) % every == 0

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Save at the end of a training epoch."""
        if not self._should_skip_saving_checkpoint(trainer) and self._should_save_on_train_epoch_end(trainer):
            self._save_at_epoch_end(trainer)

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Save after validation."""
        self._has_validated |= not trainer.sanity_checking
        if self._should_skip_saving_checkpoint(trainer) or self._should_save_on_train_epoch_end(trainer):
            return
        if self._defer_save_until_validation:
            self._defer_save_until_validation = False
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)
        else:
            self._save_at_epoch_end(trainer)

    def _save_at_epoch_end(self, trainer: "Trainer") -> None:
        candidates = self._monitor_candidates(trainer)
        if self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0:
            self._save_topk_checkpoint(trainer, candidates)
        saved_now = self._last_global_step_saved == trainer.global_step
        if saved_now or (self.save_last == "link" and self._last_checkpoint_saved):
            self._save_last_checkpoint(trainer, candidates)

    def on_train_end(self, trainer: "Trainer", task: "Task") -> None:
        """Save `last.ckpt` if no checkpoint has been saved."""
        if self.save_last and not self._last_checkpoint_saved and not trainer.fast_dev_run:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_exception(self, trainer: "Trainer", task: "Task", exception: BaseException) -> None:
        """If `save_on_exception` is True, save a checkpoint when the run ends with an exception."""
        if not self._should_save_on_exception(trainer):
            return
        candidates, self._error = self._monitor_candidates(trainer), exception
        try:
            self._save_checkpoint(trainer, self.format_checkpoint_name(metrics=candidates))
            if self._last_global_step_saved == trainer.global_step:
                self._save_last_checkpoint(trainer, candidates)
        finally:
            self._error = None

    def _should_save_on_exception(self, trainer: "Trainer") -> bool:
        idle = bool(trainer.fast_dev_run) or trainer.stage != "fit" or trainer.sanity_checking
        return self.save_on_exception and not idle and self._last_global_step_saved != trainer.global_step

    def save(self, trainer: "Trainer", always: bool = False) -> None:
        """Save the state of a run that cannot continue. Called before the trainer ends the run."""
        self.find_folder(trainer)
        if not trainer.fast_dev_run and self._last_global_step_saved != trainer.global_step:
            self._save_checkpoint(trainer, self.format_checkpoint_name(self._monitor_candidates(trainer)))

    def _should_skip_saving_checkpoint(self, trainer: "Trainer") -> bool:
        idle = bool(trainer.fast_dev_run) or trainer.stage != "fit" or trainer.sanity_checking
        return idle or self._last_global_step_saved == trainer.global_step

    def _should_save_on_train_epoch_end(self, trainer: "Trainer") -> bool:
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        if trainer.check_val_every_n_epoch != 1:
            return False
        return sum(trainer.num_val_batches) == 0 or trainer.val_check_interval == 1.0

    # --- what to save and to keep -----------------------------------------------------------------------------------
    def _monitor_candidates(self, trainer: Any) -> dict[str, Tensor]:
        """Return the values that file names can contain: the metrics, the epoch and the step."""
        metrics = {name: deepcopy(value) for name, value in trainer.newest_agreed().items()}
        for name, count in (("epoch", trainer.current_epoch), ("step", trainer.global_step)):
            logged = metrics.get(name)
            metrics[name] = logged.int() if isinstance(logged, Tensor) else torch.tensor(count)
        return metrics

    def _save_topk_checkpoint(self, trainer: "Trainer", monitor_candidates: dict[str, Tensor]) -> None:
        if self.save_top_k == 0:
            return
        if self.monitor is None:
            self._save_none_monitor_checkpoint(trainer, monitor_candidates)
            return
        if self.monitor not in monitor_candidates:
            problem = (
                f"`ModelCheckpoint(monitor={self.monitor!r})` could not find the monitored key in the returned metrics:"
                f" {list(monitor_candidates)}. HINT: Did you call `log({self.monitor!r}, value)` in the "
                f"`LightningModule`?"
            )
            if self._has_validated:
                raise ConfigError(problem)
            warnings.warn(problem, stacklevel=2)
        self._save_monitor_checkpoint(trainer, monitor_candidates)

    def _save_monitor_checkpoint(self, trainer: "Trainer", monitor_candidates: dict[str, Tensor]) -> None:
        current = monitor_candidates.get(self.monitor or "")
        if current is not None and self.check_monitor_top_k(trainer, current):
            self._update_best_and_save(current, trainer, monitor_candidates)
        elif self.verbose and trainer.is_global_zero:
            epoch, step = int(monitor_candidates["epoch"]), int(monitor_candidates["step"])
            log.info("Epoch %d, global step %d: %r was not in top %s", epoch, step, self.monitor, self.save_top_k)

    def _save_none_monitor_checkpoint(self, trainer: "Trainer", monitor_candidates: dict[str, Tensor]) -> None:
        path = self._get_metric_interpolated_filepath_name(monitor_candidates, trainer, self.best_model_path)
        previous, self.best_model_path = self.best_model_path, path  # before the save, which stores it
        self._save_checkpoint(trainer, path)
        if self.save_top_k == 1 and previous and self._should_remove_checkpoint(trainer, previous, path):
            self._remove_checkpoint(trainer, previous)

    def check_monitor_top_k(self, trainer: "Trainer", current: Tensor | None = None) -> bool:
        """Return whether a score is one of the `save_top_k` best scores."""
        if current is None:
            return False
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return True
        worst = self.best_k_models[self.kth_best_model_path]
        return bool(current < worst if self.mode == "min" else current > worst)

    def _update_best_and_save(self, current: Tensor, trainer: "Trainer", monitor_candidates: dict[str, Tensor]) -> None:
        """Save a checkpoint that is among the best, and remove the one that it displaces."""
        count = len(self.best_k_models) + 1 if self.save_top_k == -1 else self.save_top_k
        surplus = None
        if len(self.best_k_models) == count and count > 0:
            surplus = self.kth_best_model_path
            self.best_k_models.pop(surplus)
        # NaN is treated as the worst value, so that any later value replaces it
        if torch.isnan(current):
            current = torch.tensor(float("inf" if self.mode == "min" else "-inf"), device=current.device)
        path = self._get_metric_interpolated_filepath_name(monitor_candidates, trainer, surplus)
        self.current_score = self.best_k_models[path] = current
        best, worst = (min, max) if self.mode == "min" else (max, min)
        if len(self.best_k_models) == count:
            self.kth_best_model_path = worst(self.best_k_models, key=lambda path: float(self.best_k_models[path]))
            self.kth_value = self.best_k_models[self.kth_best_model_path]
        self.best_model_path = best(self.best_k_models, key=lambda path: float(self.best_k_models[path]))
        self.best_model_score = self.best_k_models[self.best_model_path]
        if self.verbose and trainer.is_global_zero:
            log.info(
                "Epoch %d, global step %d: %r reached %.5f (best %.5f), saving model to %r as top %d",
                int(monitor_candidates["epoch"]), int(monitor_candidates["step"]), self.monitor, float(current),
                float(self.best_model_score), path, count,
            )  # fmt: skip
        self._save_checkpoint(trainer, path)
        # removed last, so that the older checkpoint still exists if a save fails
        if surplus and self._should_remove_checkpoint(trainer, surplus, path):
            self._remove_checkpoint(trainer, surplus)

    def _save_last_checkpoint(self, trainer: "Trainer", monitor_candidates: dict[str, Tensor]) -> None:
        if not self.save_last:
            return
        path = self.format_checkpoint_name(monitor_candidates, self.CHECKPOINT_NAME_LAST)
        version = self.STARTING_VERSION
        while self._enable_version_counter and path != self.last_model_path and self.file_exists(path, trainer):
            path = self.format_checkpoint_name(monitor_candidates, self.CHECKPOINT_NAME_LAST, ver=version)
            version += 1
        previous, self.last_model_path = self.last_model_path, path
        if self.save_last == "link" and self._last_checkpoint_saved and self.save_top_k != 0:
            self._link_checkpoint(trainer, self._last_checkpoint_saved, path)
        else:
            self._save_checkpoint(trainer, path)
        if previous and self._should_remove_checkpoint(trainer, previous, path):
            self._remove_checkpoint(trainer, previous)

    def _save_checkpoint(self, trainer: "Trainer", filepath: str) -> None:
        """Write a checkpoint and notify the loggers. Every rank must call this method."""
        if self._error is None:
            trainer.save_checkpoint(filepath, self.save_weights_only)
        elif not trainer.saver.save_after_error(Path(filepath), self.save_weights_only):
            return
        else:
            log.info("%s: %s. Checkpoint %s was saved.", type(self._error).__name__, self._error, filepath)
        self._last_global_step_saved, self._last_checkpoint_saved = trainer.global_step, filepath
        for logger in trainer.loggers if trainer.is_global_zero else ():
            tell = getattr(logger, "after_save_checkpoint", None)
            if tell is not None:
                tell(self)

    @staticmethod
    def _link_checkpoint(trainer: "Trainer", filepath: str, linkpath: str) -> None:
        """Create a symbolic link to a checkpoint. A link or checkpoint from this run at `linkpath` is replaced."""
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            if os.path.islink(linkpath):
                os.remove(linkpath)
            elif os.path.lexists(linkpath):
                trainer.remove_checkpoint(linkpath)
            os.symlink(os.path.relpath(filepath, os.path.dirname(linkpath)), linkpath)
        trainer.strategy.collectives.barrier()

    def _should_remove_checkpoint(self, trainer: "Trainer", previous: str, current: str) -> bool:
        """Return whether to remove a checkpoint. Keep it if it was just written or if the run resumed from it."""
        source = trainer.current_run.source
        if previous == current or (source is not None and Path(previous).absolute() == Path(source).absolute()):
            return False
        return Path(str(self.dirpath)).absolute() in Path(previous).absolute().parents

    def _remove_checkpoint(self, trainer: "Trainer", filepath: str) -> None:
        """Remove one of this run's checkpoints or a link to a checkpoint."""
        if not os.path.islink(filepath):
            trainer.saver.discard(Path(filepath))
        elif trainer.is_global_zero:
            os.remove(filepath)

    # --- names ------------------------------------------------------------------------------------------------------
    def format_checkpoint_name(
        self,
        metrics: dict[str, Tensor],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Return the path for a checkpoint with the given metrics. Missing metrics are written as 0."""
        name = self._format_checkpoint_name(
            filename or self.filename, metrics, prefix=prefix, auto_insert_metric_name=self.auto_insert_metric_name
        )
        if ver is not None:
            name = self.CHECKPOINT_JOIN_CHAR.join((name, f"v{ver}"))
        name += self.FILE_EXTENSION
        return os.path.join(self.dirpath, name) if self.dirpath else name

    def _format_checkpoint_name(
        self,
        filename: str | None,
        metrics: dict[str, Tensor],
        prefix: str | None = None,
        auto_insert_metric_name: bool = True,
    ) -> str:
        def shown(field: re.Match[str]) -> str:
            name, spec = field[1], field[2] or ""
            text = format(metrics.setdefault(name, torch.tensor(0)), spec)
            return f"{name}{self.CHECKPOINT_EQUALS_CHAR}{text}" if auto_insert_metric_name else text

        template = filename or f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"
        filled = re.sub(r"\{([^{}:]*)(?::([^{}]*))?\}", shown, template)
        return filled if prefix is None else self.CHECKPOINT_JOIN_CHAR.join((prefix, filled))

    def _get_metric_interpolated_filepath_name(
        self, monitor_candidates: dict[str, Tensor], trainer: "Trainer", del_filepath: str | None = None
    ) -> str:
        """Return an unused path for a new checkpoint, or `del_filepath` if the checkpoint there will be replaced."""
        path, version = self.format_checkpoint_name(monitor_candidates), self.STARTING_VERSION
        while self._enable_version_counter and path != del_filepath and self.file_exists(path, trainer):
            path = self.format_checkpoint_name(monitor_candidates, ver=version)
            version += 1
        return path

    def file_exists(self, filepath: str | Path, trainer: "Trainer") -> bool:
        """Return whether a path exists on rank 0. Every rank must call this method."""
        return bool(trainer.broadcast(os.path.lexists(filepath) if trainer.is_global_zero else None))

    def _find_last_checkpoints(self, trainer: "Trainer") -> set[str]:
        """Return the paths of all `last` checkpoints in the folder."""
        folder = Path(self.__resolve_ckpt_dir(trainer))
        pattern = re.compile(rf"{re.escape(self.CHECKPOINT_NAME_LAST)}(-(\d+))?")
        paths = folder.iterdir() if folder.is_dir() else ()
        return {str(path) for path in paths if path.suffix == self.FILE_EXTENSION and pattern.match(path.stem)}

    def to_yaml(self, filepath: str | Path | None = None) -> None:
        """Write the paths and scores of the best checkpoints to a file (default: `best_k_models.yaml`)."""
        import yaml

        best = {path: float(value) for path, value in self.best_k_models.items()}
        path = Path(filepath) if filepath is not None else Path(str(self.dirpath)) / "best_k_models.yaml"
        path.write_text(yaml.dump(best), encoding="utf-8")
