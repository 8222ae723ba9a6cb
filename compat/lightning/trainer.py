"""Trainer, with Lightning's arguments, defaults and methods."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Literal

import torch

from ...base.errors import ConfigError
from ...base.place import find_place
from ...callbacks.callback import Callback
from ...tasks.task import Task
from ...trainer.hooks import check_hook_arguments, describe_misnomers, overrides
from .accelerators import KINDS
from .arguments import (
    AnyCallback,
    AnyLogger,
    AnyPlugin,
    AnyProfiler,
    AnyStrategy,
    read_arguments,
    set_benchmark,
)
from .attributes import TrainerAttributes
from .callbacks.callback import Callback as CallbackOfLightning
from .callbacks.callback import without_empty
from .callbacks.defaults import make_callbacks
from .callbacks.finders import Finder
from .callbacks.model_checkpoint import ModelCheckpoint
from .checkpoint import LightningFile, write_module
from .connectors import CallbackConnector, CheckpointConnector, LoggerConnector
from .evaluation_points import EvaluationPoints
from .exceptions import MisconfigurationException, require_checkpoint
from .launch import is_started, note_failure, shared_seed, start_ranks, starts_script
from .loggers import DummyLogger, TensorBoardLogger, folder_of_run, points_of
from .loops import EvaluationLoop, FitLoop, PredictionLoop
from .optimizers import SampleWeights
from .placeholders import UnsupportedError, refuse_overrides
from .requeue import forget_checkpoint, store_checkpoint, stored_checkpoint
from .states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from .strategies import Strategy, with_attributes
from .user_module import refuse_old_hooks, uncompiled

log = logging.getLogger("legato")


INNER_METHODS = (
    "_run",
    "_run_stage",
    "_run_sanity_check",
    "_fit_impl",
    "_validate_impl",
    "_test_impl",
    "_predict_impl",
)
"""Methods that Lightning's Trainer calls internally during fit, validate, test and predict."""


HIGHEST_SEED = 1 << 32
"""Upper bound for seeds that programs set. If no seed is set, torch draws a seed of at least 53 bits."""


def without_defaults(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not None. Legato's defaults apply to the others."""
    # check_val_every_n_epoch=None means that batches are counted across epochs
    return {name: value for name, value in arguments.items() if value is not None or name == "check_val_every_n_epoch"}


class FitAsLightning(Callback):
    """Adds hooks that reproduce Lightning's behavior in fit. It removes itself from the callbacks in `setup`."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Add the hooks to those of the run."""
        trainer.callbacks.remove(self)  # programs search the list for their callbacks
        hooks = trainer.current_run.hooks
        for group in (hooks.of_callbacks, hooks.late, hooks):
            group.update({name: without_empty(calls) for name, calls in group.items()})
        # a sanity check, which runs between the two hooks and training, evaluates each module in its current mode
        hooks["on_fit_start"] += (trainer.disable_checks, trainer.hide_modes)
        hooks["on_sanity_check_start"] = (trainer.show_modes, *hooks["on_sanity_check_start"])
        hooks["on_sanity_check_end"] += (trainer.hide_modes,)
        hooks["on_train_start"] = (trainer.show_modes, *hooks["on_train_start"])
        # before the hooks of the program, which may read the epoch's progress
        hooks["on_train_epoch_start"] = (trainer.enter_epoch, *hooks["on_train_epoch_start"])


class Trainer(TrainerAttributes):
    """A Legato Trainer with the arguments and behavior of Lightning's Trainer."""

    evaluation_points: EvaluationPoints | None = None
    """Values that evaluation steps log with `on_step`."""
    fit_as_lightning = FitAsLightning()
    """Added to each run as a callback, because a run collects hooks only once, from its callbacks and task."""

    def __init__(  # noqa: PLR0913 (Lightning's arguments)
        self,
        *,
        accelerator: Any = "auto",
        strategy: AnyStrategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        logger: AnyLogger | list[AnyLogger] | bool | None = None,
        callbacks: list[AnyCallback] | AnyCallback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: AnyProfiler | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: AnyPlugin | list[AnyPlugin] | None = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
    ) -> None:
        arguments = read_arguments({name: item for name, item in locals().items() if name not in ("self", "__class__")})
        if arguments["logger"] is True:
            arguments["logger"] = TensorBoardLogger(arguments["default_root_dir"], "lightning_logs")
        set_benchmark(benchmark, deterministic)
        refuse_overrides(self, INNER_METHODS, "use hooks of a callback or of the module to change a run.")
        self.barebones, self.enable_autolog_hparams, self.predictions = barebones, enable_autolog_hparams, []
        converted = without_defaults({**arguments, "callbacks": None})
        super().__init__(**converted, **self._arguments_of_files_and_ranks(strategy, devices))
        # after the devices are known, because they determine the strategy for "auto"
        self.strategy = with_attributes(self.strategy, arguments["strategy"])
        self.callbacks = make_callbacks(self, arguments, profiler)
        self._show_arguments(arguments, gradient_clip_algorithm)
        # also a str, so that Legato's comparisons with "cpu" work
        self.accelerator = KINDS[self.device_list[0].type]()
        self._make_loops()

    def _arguments_of_files_and_ranks(self, strategy: Any, devices: Any) -> dict[str, Any]:
        """Return Legato's Trainer arguments for the checkpoint format and a script's ranks."""
        self.files, self.starts_script = LightningFile(self), starts_script(strategy)
        is_alone = devices in (1, "1") or (isinstance(devices, list) and len(devices) == 1)
        # for a Trainer with a single process, each rank of a script is independent
        place = {"cluster": "off"} if is_started() and is_alone else {}
        return {"checkpoint_format": self.files, **place}

    def _show_arguments(self, arguments: dict[str, Any], algorithm: str | None) -> None:
        """Set the attributes that a program may read before a run, such as limits and fast_dev_run's logger."""
        if algorithm is None:  # hooks then receive None, as in Lightning
            self.gradient_clip_algorithm = None  # type: ignore[assignment]
        if not self.fast_dev_run:
            self.max_epochs = arguments["max_epochs"]
            if self.num_sanity_val_steps == -1:
                self.num_sanity_val_steps = inf  # type: ignore[assignment]
        # Lightning sets both limits to that fraction, and programs read them
        if self.overfit_batches:
            self.limit_train_batches = self.limit_val_batches = self.overfit_batches
        # a program may call methods of its logger, but fast_dev_run must not write anything
        if self.fast_dev_run and arguments["logger"]:
            self.loggers = [DummyLogger()]

    def _make_loops(self) -> None:
        self.fit_loop, self.predict_loop = FitLoop(self), PredictionLoop(self)
        self.validate_loop = EvaluationLoop(self, TrainerFn.VALIDATING, RunningStage.VALIDATING)
        self.test_loop = EvaluationLoop(self, TrainerFn.TESTING, RunningStage.TESTING)
        self._checkpoint_connector, self._logger_connector = CheckpointConnector(self), LoggerConnector(self)
        self._callback_connector = CallbackConnector(self)

    # --- choices of this Trainer ------------------------------------------------------------------------------------
    def new_state(self) -> TrainerState:
        """Return the initial state for fit. Its counts continue from where the previous fit ended."""
        last = self.state
        # in Lightning, a second fit continues the counts of the first; in Legato, it starts from zero
        fields = ("global_step", "optimizer_steps", "rounds", "samples_seen", "replicas", "seed")
        state = TrainerState(**{name: getattr(last, name) for name in fields}, epoch=self.current_epoch)
        state.fn, state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
        self.epoch_is_cut, self.in_epoch = False, False
        return state

    def check(self, *owners: Any) -> None:
        """Warn about methods whose names resemble hook names. Raises TaskError if a hook has the wrong arguments.

        Until the Trainer method returns, Lightning callbacks also have the module's `log` and `log_dict` methods.
        """
        if self.fit_as_lightning not in self.callbacks:  # the last run's `setup` removed it
            self.callbacks.insert(0, self.fit_as_lightning)
        for owner in owners:
            if isinstance(owner, CallbackOfLightning):
                owner.__dict__.update(log=self.task.log, log_dict=self.task.log_dict)
            check_hook_arguments(owner)
            for warning in describe_misnomers(owner):
                log.warning(warning)

    # --- the loop ---------------------------------------------------------------------------------------------------
    def disable_checks(self) -> None:
        """Disable checks and batch weights that are incompatible with programs written for Lightning.

        Raises MisconfigurationException if max_epochs is less than the number of epochs in the checkpoint.
        """
        run = self.current_run
        # Lightning raises an error; Legato would train nothing and report success
        if run.source is not None and 0 <= (self.max_epochs or 0) < self.state.epoch:
            raise MisconfigurationException(
                f"max_epochs={self.max_epochs} is below the checkpoint's {self.state.epoch} epochs. Raise max_epochs."
            )
        # a dict with "weight" is an ordinary result in programs for Lightning
        run.optimization.weights = SampleWeights(self)  # type: ignore[assignment]
        run.optimization.watch = None  # modules may update the weights of a teacher in training_step

    def enter_epoch(self) -> None:
        """Record that an epoch is running."""
        self.epoch_is_cut, self.in_epoch = False, True

    def hide_modes(self) -> None:
        """Set all modules to training mode until `show_modes` is called so that the loop does not change any modes."""
        # by name, because on_fit_start may have replaced a submodule
        self.modes_before = {name: submodule.training for name, submodule in self.lightning_module.named_modules()}
        if self.current_run.training_data.rounds:  # otherwise on_train_start does not run and restore the modes
            for submodule in self.lightning_module.modules():
                submodule.training = True

    def show_modes(self) -> None:
        """Restore each module's mode. As in Lightning, training does not change the modes."""
        for name, submodule in self.lightning_module.named_modules():
            submodule.training = self.modes_before.get(name, submodule.training)

    def end_epoch(self) -> None:
        """End an epoch. If a run stops during an epoch, that epoch counts too, even if no steps were completed."""
        run, state = self.current_run, self.state
        epoch = state.epoch
        # the last step is a logging point only if log_every_n_steps is due
        run.show_step()
        state.logged_at = state.global_step
        super().end_epoch()
        is_cut = state.epoch == epoch
        # reduced again: end_epoch writes nothing for an epoch that a resumed run continues, but Lightning does
        if is_cut:
            values = run.metrics.reduce_epoch(keep=True)
            self.logged_metrics.update(values.loggers)
            if values.loggers:
                run.write_point(values.loggers)
        self.epoch_is_cut, self.in_epoch = is_cut, False

    def evaluate(self, stage: str, limit: int | None = None, keep_outputs: bool = False) -> None:
        """Evaluate all loaders once.

        Validation during fit uses no_grad instead of inference mode, so that steps can enable gradients. Before
        validation during training, the gradients are cleared, and the values of the latest step are published for
        callbacks that use them when validation ends. If on_train_batch_start skipped the rest of an epoch, the epoch
        ends without validation.
        """
        run = self.current_run
        if run.stage == "fit" and run.loop.doing == "validation":
            if run.loop.epoch_skipped:
                return
            run.show_step()
            self.lightning_module.on_validation_model_zero_grad()
        if self.evaluation_points is None or self.evaluation_points.run is not self.current_run:
            self.evaluation_points = EvaluationPoints(self, self.current_run)
        self.evaluation_points.follow(stage)
        if self.current_run.stage != "fit" and self.current_run.source is not None:
            self.files.load_states()
        # inference tensors stored by a step would break the next training step
        inference_mode = self.inference_mode
        self.inference_mode = inference_mode and self.current_run.stage != "fit"
        try:
            super().evaluate(stage, limit, keep_outputs)
        finally:
            self.inference_mode = inference_mode

    # --- methods ----------------------------------------------------------------------------------------------------
    def fit(  # type: ignore[override]
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train a module. A checkpoint is read with weights_only=True unless the program passes False."""
        with self._status(TrainerFn.FITTING):
            self._choose_limits()
            model, source = uncompiled(model), self._checkpoint(ckpt_path, weights_only)
            source = stored_checkpoint(self.default_root_dir) or source  # before ckpt_path, as in Lightning
            if (
                val_dataloaders is not None
                and isinstance(model, Task)
                and not overrides(model, Task, "validation_step")
            ):
                log.warning("fit ignores val_dataloaders because %s has no validation_step.", type(model).__name__)
                val_dataloaders = None
            data = {"train_dataloaders": train_dataloaders, "val_dataloaders": val_dataloaders}
            self._prepare("fit", model, **data, datamodule=datamodule)
            super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path=source)
            if self.is_global_zero:
                forget_checkpoint(self.default_root_dir)
            if self.current_run.is_complete:  # otherwise the run was in worker processes
                self.fitted = list(self.optimizers), self.lr_scheduler_configs

    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the validation data and return the metrics for each loader."""
        with self._status(TrainerFn.VALIDATING):
            self._prepare("validate", model, dataloaders=dataloaders, datamodule=datamodule)
            run = partial(super().validate, uncompiled(model), dataloaders, self._checkpoint(ckpt_path, weights_only))
            return self.validate_loop.show_results_of(lambda: run(False, datamodule), verbose)

    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the test data and return the metrics for each loader."""
        with self._status(TrainerFn.TESTING):
            self._prepare("test", model, dataloaders=dataloaders, datamodule=datamodule)
            run = partial(super().test, uncompiled(model), dataloaders, self._checkpoint(ckpt_path, weights_only))
            return self.test_loop.show_results_of(lambda: run(False, datamodule), verbose)

    def predict(  # type: ignore[override]
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """Return all ranks' predictions in dataset order, or None if return_predictions is False."""
        with self._status(TrainerFn.PREDICTING):
            self._prepare("predict", model, dataloaders=dataloaders, datamodule=datamodule)
            keep = return_predictions is not False
            predictions = super().predict(
                uncompiled(model), dataloaders, datamodule, self._checkpoint(ckpt_path, weights_only), keep
            )
            self.predictions = predictions
            return predictions if keep and not self.predict_loop.skip else None

    def save_checkpoint(  # type: ignore[override]
        self,
        filepath: str | Path,
        weights_only: bool | None = None,
        storage_options: Any = None,
        asynchronous: bool = False,
    ) -> None:
        """Write a checkpoint of the current state. Every rank must call this method.

        Raises AttributeError before a run.
        """
        if storage_options is not None:
            raise UnsupportedError("save_checkpoint does not support storage_options. Checkpoints are local files.")
        module = vars(self.strategy).get("_lightning_module")  # published packages set a module before a run
        if self.run is None and module is not None:
            write_module(Path(filepath), module)
            return
        if self.run is None:
            raise AttributeError("Saving a checkpoint needs a module. Call fit, validate, test or predict first.")
        super().save_checkpoint(filepath, bool(weights_only), asynchronous)
        if self.run.agreement.signal and not weights_only and self.is_global_zero:
            store_checkpoint(self.default_root_dir, filepath)

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Within this context, create tensors on the run's device and in its precision."""
        device = self.device_list[0]
        with self.precision_plugin.forward_context(device), device:
            yield

    @contextmanager
    def _status(self, function: TrainerFn) -> Iterator[None]:
        """Record in `state` which method is running and whether it succeeded, and apply the seed."""
        place, seed = find_place(self.cluster), torch.initial_seed()
        if not self.running and (place is None or place.origin != "legato"):  # not in worker processes
            count = self.strategy.local_processes(self.device_list)
            if place is None and count > 1 and self.num_nodes == 1 and self.starts_script:
                start_ranks(count, seed & 0xFFFFFFFF)
            # if the script sets no seed, each of its ranks has a different one
            self.seed = shared_seed() if is_started() and seed >= HIGHEST_SEED else seed & 0xFFFFFFFF
        self.state.fn, self.state.status = function, TrainerStatus.RUNNING
        # a worker process has the seed of its parent
        makes_folder = self.assigned_dir is None and (function is TrainerFn.FITTING or self.run_dir is None)
        if makes_folder:
            self.assigned_dir = folder_of_run(self)
        self.run_dir = self.run_dir or self.assigned_dir
        try:
            with points_of(self):
                yield
        except BaseException:
            self.state.status = TrainerStatus.INTERRUPTED
            note_failure()
            raise
        finally:
            if makes_folder:
                self.assigned_dir = None
            for callback in self.callbacks:
                if isinstance(callback, CallbackOfLightning):
                    callback.__dict__.pop("log", None)
                    callback.__dict__.pop("log_dict", None)
        self.state.status = TrainerStatus.FINISHED

    def _choose_limits(self) -> None:
        """Set default values for the epoch limits that were not passed."""
        if self.max_epochs is None:
            self.max_epochs = 1000 if self.max_steps == -1 and self.max_time is None else -1
        if self.min_epochs is None:
            self.min_epochs = int(self.min_steps is not None)

    def _prepare(self, method: str, model: Any, **data: Any) -> None:
        """Set the strategy's module and let callbacks search for settings before the run."""
        module = self.lightning_module if model is None else model
        refuse_old_hooks(method, module)
        if isinstance(self.strategy, Strategy):
            self.strategy.connect(module)
        for callback in [callback for callback in self.callbacks if isinstance(callback, Finder)]:
            if callback.searches_before(method):
                callback.search(self, module, method, **data)
                callback.has_searched = True

    def _checkpoint(self, path: Any, weights_only: bool | None) -> Any:
        """Return the checkpoint specified by a name or path. The default is the `ckpt_path` that was set, or None."""
        self.files.weights_only = weights_only
        path = self.__dict__.get("_ckpt_path") if path is None else path
        if path == "":  # such as the best_model_path of a callback that has saved no checkpoint
            raise ConfigError("ckpt_path='' is not a checkpoint. Pass a path, 'last', 'best' or None.")
        if path == "hpc" or str(path).startswith("registry"):
            raise UnsupportedError(
                f"ckpt_path={str(path)!r} is not supported: a requeued SLURM job resumes automatically "
                "(SLURMEnvironment(auto_requeue=True)). Legato has no model registry. Pass a path, 'last' or 'best'."
            )
        if path not in (None, "best", "last", "auto"):
            require_checkpoint(path)
        # "last" is the checkpoint that the first callback stores. If another process wrote the files, search the
        # folders.
        callback = self.checkpoint_callback
        if path != "last" or (callback is not None and callback.last_model_path):
            return path
        savers = [item for item in self.checkpoint_callbacks if isinstance(item, ModelCheckpoint) and item.dirpath]
        paths = [path for saver in savers for path in saver._find_last_checkpoints(self)]
        if not paths:
            log.warning("ckpt_path='last', but there is no checkpoint yet. The module keeps its current weights.")
        return max(paths, key=os.path.getmtime, default=None)
