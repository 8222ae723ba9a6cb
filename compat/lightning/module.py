"""LightningModule and LightningDataModule: Task and DataModule with all the attributes of Lightning's classes."""

import copy
import inspect
import logging
import sys
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from ...base.errors import ConfigError
from ...tasks import hyperparameters
from ...tasks.data_module import DataModule
from ...tasks.hyperparameters import plain_containers
from ...tasks.optimizers import SchedulerConfig
from ...tasks.task import Task
from ...trainer.resume.rebuild import rebuild_data_module, rebuild_task
from .aliases import alias
from .checkpoint import is_omegaconf, read
from .exceptions import MisconfigurationException, require_checkpoint
from .instantiation import instantiate_module
from .optimizers import make_optimizers
from .placeholders import UnsupportedError
from .rank_zero import rank_zero_only

log = logging.getLogger("legato")

Self = TypeVar("Self", bound="LightningModule")
DataSelf = TypeVar("DataSelf", bound="LightningDataModule")


class OfClass(classmethod):  # type: ignore[type-arg]
    """A class method that raises an error if it is called on an instance, because it would not change the instance."""

    def __get__(self, instance: Any, kind: Any = None) -> Any:
        method = super().__get__(instance, kind)
        if instance is None:
            return method

        @wraps(method)
        def refuse(*arguments: Any, **options: Any) -> Any:
            raise TypeError(f"{type(instance).__name__}.{method.__name__} creates a new object. Call it on the class.")

        return refuse


INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
"""Name of the function that creates an object, in the hyperparameters from a LightningCLI."""
_cli_hparams: ContextVar[tuple[type, dict[str, Any]] | None] = ContextVar("LightningCLI hyperparameters", default=None)


@contextmanager
def hyperparameters_of(kind: type, values: dict[str, Any]) -> Iterator[None]:
    """Within this context, make new instances of the class save the given hyperparameters."""
    token = _cli_hparams.set((kind, values))
    try:
        yield
    finally:
        _cli_hparams.reset(token)


class AttributeDict(hyperparameters.AttributeDict):
    """A dict whose keys are also attributes. `str()` returns one line per key."""

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError as error:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{key}'") from error

    def __delattr__(self, item: str) -> None:
        del self[item]

    def __repr__(self) -> str:
        width = max((len(key) for key in self), default=0) + 3
        return "\n".join(f"{quoted:{width}s} {self[key]}" for key in sorted(self) for quoted in [f'"{key}":'])


def copied(value: Any) -> Any:
    """Return a copy of nested containers. Other values, such as modules, are not copied."""
    if is_omegaconf(value):
        return copy.deepcopy(value)
    if isinstance(value, dict):
        container = copy.copy(value)
        container.update((key, copied(item)) for key, item in value.items())
        return container
    return type(value)(map(copied, value)) if type(value) in (list, tuple, set) else value


def differ(first: Any, second: Any) -> bool:
    """Return whether two hyperparameters differ. Tensors are considered equal only if they are the same object."""
    if type(first) is not type(second) or isinstance(first, torch.Tensor):
        return first is not second
    return bool(first != second)


class InitialHyperparameters:
    """Hyperparameters as originally saved."""

    _log_hyperparams = False

    @property
    def hparams(self) -> AttributeDict:
        """The saved hyperparameters; empty if none were saved."""
        # in __dict__, because it may be accessed before nn.Module.__init__ has run
        hparams: AttributeDict = self.__dict__.setdefault("_hparams", AttributeDict())
        return hparams

    def _set_hparams(self, hp: Any) -> None:  # private in Lightning; many programs call it
        instance: Any = self
        instance.hparams.update(hp if isinstance(hp, Mapping) else vars(hp))

    def save_hyperparameters(self, *args: Any, ignore: Any = None, frame: Any = None, logger: bool = True) -> None:
        """Save the arguments of the calling `__init__`; see Task.save_hyperparameters."""
        parent: Any = super()
        kind, saved = _cli_hparams.get() or (None, None)
        if kind is not None and saved is not None and isinstance(self, kind):
            named = [name for name in args if isinstance(name, str) and name in saved]
            args = ({name: saved[name] for name in named} if named else saved,)
        if is_omegaconf(self.__dict__.get("_hparams")):  # replaced, not updated
            del self.__dict__["_hparams"]
        caller = inspect.currentframe()
        parent.save_hyperparameters(
            *args, ignore=ignore, frame=frame or (caller.f_back if caller else None), logger=logger
        )
        if len(args) == 1 and isinstance(args[0], Mapping) and is_omegaconf(args[0]):
            self.__dict__["_hparams"] = args[0]
        this: Any = self
        self.__dict__["_hparams_initial"] = copied(this.hparams)

    def logged_hyperparameters(self) -> dict[str, Any] | None:
        """Return the hyperparameters in their saved form, or None if hyperparameters are not logged.

        Raises RuntimeError if the module and the data module have saved different values under the same name.
        """
        this: Any = self
        is_wanted = getattr(this.trainer, "enable_autolog_hparams", True)  # not an attribute of Legato's Trainer
        if not self._log_hyperparams or not is_wanted:
            return None
        values = plain_containers({name: value for name, value in self.hparams_initial.items() if name[:1] != "_"})
        data: Any = this.trainer.datamodule
        if data is not None and data is not self and vars(data).get("_log_hyperparams"):
            saved = data.logged_hyperparameters() or {}
            differing = sorted(name for name in values.keys() & saved.keys() if differ(values[name], saved[name]))
            if differing:
                raise RuntimeError(
                    f"Error while merging hparams: the keys {differing} are present in both the LightningModule's and "
                    "LightningDataModule's hparams but have different values. Exclude them from one of these objects "
                    "with save_hyperparameters(ignore=...) or save_hyperparameters(logger=False)."
                )
        return values  # type: ignore[no-any-return]

    def remove_ignored_hparams(self, ignore_list: list[str]) -> None:
        """Remove hyperparameters by name."""
        this: Any = self
        for name in ignore_list:
            this.hparams.pop(name, None)
            self.__dict__.get("_hparams_initial", {}).pop(name, None)

    @property
    def hparams_initial(self) -> AttributeDict:
        """A copy of the hyperparameters as originally saved. Modules and other objects are not copied."""
        hparams: AttributeDict = copied(self.__dict__.get("_hparams_initial", AttributeDict()))
        return hparams


class LightningModule(InitialHyperparameters, Task):
    """A Task with all the attributes of a LightningModule."""

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_type"
    prepare_data_per_node = True
    allow_zero_length_dataloader_with_multiple_devices = False

    # --- the run ----------------------------------------------------------------------------------------------------
    @property
    def trainer(self) -> Any:
        """The run's trainer; None during export. Raises RuntimeError if the module has no trainer."""
        return None if self.__dict__.get("_is_exported") else Task.trainer.fget(self)  # type: ignore[attr-defined]

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self.__dict__["_trainer"] = trainer
        if trainer is not None:
            rank_zero_only.rank = trainer.global_rank  # for rank-0 functions, even in the first hook
        for module in self.children():
            if isinstance(module, LightningModule):
                module.trainer = trainer

    @property
    def fabric(self) -> Any:
        """None, because a Trainer runs the module."""
        return None

    @fabric.setter
    def fabric(self, fabric: Any) -> None:
        if fabric is not None:
            raise UnsupportedError("LightningModule.fabric: Legato has no Fabric. Run the module with a Trainer.")

    @property
    def on_gpu(self) -> bool:
        """Whether the module is on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter, or the dtype that was set."""
        dtype: torch.dtype = self.__dict__.get("_dtype") or super().dtype
        return dtype

    @dtype.setter
    def dtype(self, new_dtype: torch.dtype) -> None:
        self.__dict__["_dtype"] = new_dtype

    @property
    def device_mesh(self) -> Any:
        """The device mesh; None if the strategy does not use a mesh."""
        trainer = self.__dict__.get("_trainer")
        return None if trainer is None else getattr(trainer.strategy, "mesh", None)

    _automatic_optimization = alias("automatic_optimization")  # private in Lightning; programs set it

    def _apply_batch_transfer_handler(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Apply the three transfer hooks to a batch. This method is private in Lightning, but programs call it."""
        batch = self.on_before_batch_transfer(batch, dataloader_idx)
        batch = self.transfer_batch_to_device(batch, device or self.device, dataloader_idx)
        return self.on_after_batch_transfer(batch, dataloader_idx)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, above the progress bar if there is one."""
        if self.trainer.is_global_zero:
            bar = self.trainer.progress_bar_callback
            shown = bar is not None and getattr(bar, "is_enabled", True)
            (getattr(bar, "print", print) if shown else print)(*args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather `data` from all ranks as stacked tensors. With a single process, only convert numbers to tensors."""
        if self.trainer.world_size == 1:
            return apply_to_collection(data, (int, float), torch.as_tensor, device=self.device)
        return super().all_gather(data, group, sync_grads)

    # --- logged values ----------------------------------------------------------------------------------------------
    def log(  # noqa: PLR0913 (Lightning's signature)
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: Any = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a value. In evaluation steps, `on_step=True` also writes the value for each batch."""
        trainer: Any = self.__dict__.get("_trainer")
        if trainer is None:
            log.warning("self.log(%r) was ignored because the module has no trainer.", name)
        if trainer is None or getattr(trainer, "barebones", False):  # not an attribute of Legato's Trainer
            return
        metrics = None if trainer.run is None else trainer.run.metrics
        # Legato reduces values over the whole evaluation; Lightning also writes a point per batch
        if on_step and metrics is not None and metrics.in_step and metrics.stage != "train" and not metrics.muted:
            shown = name if on_epoch is False else f"{name}_step"
            full = shown + metrics.suffix if add_dataloader_idx else shown
            trainer.evaluation_points.note(full, value, prog_bar, logger is not False)
            if on_epoch is False:
                return
        super().log(
            name,
            value,
            prog_bar,
            logger,
            on_step,
            on_epoch,
            reduce_fx,
            sync_dist=sync_dist,
            add_dataloader_idx=add_dataloader_idx,
            batch_size=batch_size,
            rank_zero_only=rank_zero_only,
        )

    def count_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch, which is the length of its first tensor, as in Lightning."""
        lengths: list[int] = []
        apply_to_collection(batch, torch.Tensor, lambda tensor: lengths.extend(tensor.shape[:1]))
        return lengths[0] if lengths else super().count_samples(batch)

    # --- optimization -----------------------------------------------------------------------------------------------
    def make_optimizers(self) -> tuple[list[Optimizer], list[SchedulerConfig]]:
        """Return the optimizers and schedulers for fit. Warn about any that Legato would reject in a task."""
        return make_optimizers(self)

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        """Clip the gradients of `optimizer`'s parameters. The defaults are the values set on the Trainer.

        Raises MisconfigurationException for values that differ from those set on the Trainer.
        """
        algorithm = gradient_clip_algorithm and str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
        if algorithm not in (None, "norm", "value"):
            raise MisconfigurationException(f"gradient_clip_algorithm={algorithm!r}: expected 'norm' or 'value'.")
        of_trainer = self.trainer.gradient_clip_val
        if None not in (gradient_clip_val, of_trainer) and gradient_clip_val != of_trainer:
            raise MisconfigurationException(
                f"clip_gradients(gradient_clip_val={gradient_clip_val!r}) differs from "
                f"Trainer(gradient_clip_val={of_trainer!r}). Set only one of them."
            )
        super().clip_gradients(optimizer, gradient_clip_val, algorithm)

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Within this context, enable gradients only for `optimizer`'s parameters."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def __init_subclass__(cls, **options: Any) -> None:
        """Use a subclass's `configure_sharded_model`, the old name for the hook, as its `configure_model`."""
        super().__init_subclass__(**options)
        if "configure_sharded_model" in vars(cls):
            if "configure_model" in vars(cls):
                raise ConfigError(f"{cls.__name__} also defines configure_model. Remove configure_sharded_model.")
            cls.configure_model = cls.configure_sharded_model  # type: ignore[assignment]

    def configure_sharded_model(self) -> None:
        """Old name for the `configure_model` hook."""

    def on_validation_model_zero_grad(self) -> None:
        """Called to clear the gradients before validation during training."""
        self.zero_grad()

    def freeze(self: Self) -> Self:  # type: ignore[override]
        """Freeze all parameters, switch to evaluation mode, and return the module."""
        super().freeze()
        return self

    def unfreeze(self: Self) -> Self:  # type: ignore[override]
        """Unfreeze all parameters, switch to training mode, and return the module."""
        super().unfreeze()
        return self

    # --- other forms ------------------------------------------------------------------------------------------------
    def to_onnx(self, file_path: Any = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """Export `forward` with torch.onnx.export. The default input sample is `example_input_array`.

        Raises ValueError if there is no input sample.
        """
        sample = self._input_sample(input_sample, "to_onnx")
        with self._evaluating():
            target = file_path if file_path is None or hasattr(file_path, "write") else str(file_path)
            arguments = sample if isinstance(sample, (tuple, dict)) else (sample,)
            if isinstance(arguments, dict):
                return torch.onnx.export(self, (), target, kwargs=arguments, **kwargs)
            return torch.onnx.export(self, arguments, target, **kwargs)

    def to_torchscript(
        self, file_path: Any = None, method: str | None = "script", example_inputs: Any = None, **kwargs: Any
    ) -> Any:
        """Script or trace the module with torch.jit and return the result. If `file_path` is set, also save the result.

        Raises ValueError if `method` is not "script" or "trace", or if there are no inputs for tracing.
        """
        with self._evaluating():
            if method == "script":
                script = torch.jit.script(self, **kwargs)
            elif method == "trace":
                sample = self._input_sample(example_inputs, "to_torchscript")
                script = torch.jit.trace(self, example_inputs=sample, **kwargs)
            else:
                raise ValueError(f"to_torchscript(method={method!r}): expected 'script' or 'trace'.")
        if file_path is not None:
            torch.jit.save(script, file_path)
        return script

    def to_tensorrt(
        self,
        file_path: Any = None,
        input_sample: Any = None,
        ir: str = "default",
        output_format: str = "exported_program",
        retrace: bool = False,
        default_device: Any = "cuda",
        **compile_kwargs: Any,
    ) -> Any:
        """Raise UnsupportedError."""
        raise UnsupportedError("to_tensorrt is not supported. Use torch_tensorrt.compile(module.eval(), ...).")

    def _input_sample(self, inputs: Any, method: str) -> Any:
        sample = self.example_input_array if inputs is None else inputs
        if sample is None:
            raise ValueError(f"{method} requires an input sample. Pass a sample, or set example_input_array.")
        return self.transfer_batch_to_device(sample, self.device, 0)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Within this context, use evaluation mode and hide the trainer so that torch does not traverse it."""
        # torch.jit and the exporter traverse every attribute, and the trainer refers to loggers and files
        modes, trainer = [(module, module.training) for module in self.modules()], self.__dict__.pop("_trainer", None)
        self.eval()
        for module, _ in modes:
            module.__dict__["_is_exported"] = True  # torch.jit reads every attribute; `trainer` would raise
        try:
            with torch.no_grad():
                yield
        finally:
            self.__dict__["_trainer"] = trainer
            for module, mode in modes:
                module.training = mode
                del module.__dict__["_is_exported"]

    # --- checkpoints ------------------------------------------------------------------------------------------------
    @OfClass
    def load_from_checkpoint(
        cls: type[Self],
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build the module from a checkpoint, which is read with weights_only=True unless the program passes False."""
        if not hasattr(checkpoint_path, "read"):
            require_checkpoint(checkpoint_path)
        saved = read(checkpoint_path, "cpu" if map_location is None else map_location, weights_only)
        kwargs = with_config(cls, saved, kwargs)
        kind: type[Self] = builder(cls, saved.get("hyper_parameters") or {})
        return rebuild_task(kind, saved, map_location, hparams_file, strict, kwargs)


def builder(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return the callable that creates an object: its class, or a function if a LightningCLI saved the hyperparameters.

    Raises ValueError if the class has not been imported, because loading a checkpoint must not import code.
    """
    if values.get("_instantiator") != INSTANTIATOR:
        return kind
    module, _, name = str(values.get("_class_path", "")).rpartition(".")
    named = getattr(sys.modules.get(module), name, None) if "_class_path" in values else kind
    if not (isinstance(named, type) and issubclass(named, kind)):
        raise ValueError(
            f"The checkpoint requires the class {values['_class_path']!r}, which is not an imported subclass of "
            f"{kind.__name__}. Import the module that defines this class before loading the checkpoint."
        )

    def build(_instantiator: str, **arguments: Any) -> Any:
        return instantiate_module(kind, arguments)

    build.__name__ = kind.__name__
    return build


def with_config(kind: type, saved: Mapping[str, Any], updates: Mapping[str, Any]) -> dict[str, Any]:
    """Return constructor arguments: `updates`, plus the module's OmegaConf hyperparameter config if it has one."""
    config: Any = saved.get("hyper_parameters")
    parameters = inspect.signature(kind).parameters
    name = str(saved.get("hparams_name"))
    if not is_omegaconf(config) or name not in parameters:
        return dict(updates)
    changes = {key: value for key, value in updates.items() if key not in parameters}
    arguments = {key: value for key, value in updates.items() if key in parameters}
    return {name: type(config)({**config, **changes}), **arguments}


# torch.jit.script compiles every other property
LightningModule.__jit_unused_properties__ = [  # type: ignore[attr-defined]
    name for name, _ in inspect.getmembers(LightningModule, lambda member: isinstance(member, property))
]


class LightningDataModule(InitialHyperparameters, DataModule):
    """A DataModule with all the attributes of a LightningDataModule."""

    name: str | None = None
    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "datamodule_hparams_type"
    allow_zero_length_dataloader_with_multiple_devices = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def from_datasets(
        cls: type[DataSelf],
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> DataSelf:
        """Create a data module with one loader per dataset. Each dataset argument may be a list or dict of datasets."""
        wanted = {"batch_size": batch_size, "num_workers": num_workers}
        parameters = inspect.signature(cls.__init__).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        named = {name: value for name, value in wanted.items() if takes_all or name in parameters}
        module = cls(**datamodule_kwargs, **named)
        datasets = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for stage, data in datasets.items():
            if data is not None:
                setattr(module, f"{stage}_dataloader", _Loaders(data, stage == "train", wanted))
        return module

    def __str__(self) -> str:
        return "\n".join(
            f"{{{stage} dataloader: {_sizes(getattr(self, f'{method}_dataloader', None))}}}"
            for stage, method in (("Train", "train"), ("Validation", "val"), ("Test", "test"), ("Predict", "predict"))
        )

    @OfClass
    def load_from_checkpoint(
        cls: type[DataSelf],
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> DataSelf:
        """Build the data module from the hyperparameters in a checkpoint, updated with `kwargs`, and load its state."""
        require_checkpoint(checkpoint_path)
        saved = read(checkpoint_path, "cpu", weights_only)
        contents = {**saved, "datamodule": saved.get(cls.__qualname__)}  # Lightning stores its state there
        kind: type[DataSelf] = builder(cls, contents.get("datamodule_hyper_parameters") or {})
        return rebuild_data_module(kind, contents, hparams_file, with_config(cls, contents, kwargs))


def _sizes(make_loaders: Any) -> str:
    """Return the dataset sizes of the loaders that a method creates, or "None" if there are no loaders yet."""

    def size(loader: Any) -> str:
        return f"size={len(loader.dataset) if isinstance(loader.dataset, Sized) else 'NA'}"

    try:
        loaders = make_loaders()
        if isinstance(loaders, DataLoader):
            return size(loaders)
        return " ; ".join(f"{number}. {size(loader)}" for number, loader in enumerate(loaders, start=1))
    except Exception:  # any error that the method raises before `setup`
        return "None"


class _Loaders:
    """Creates loaders for datasets. It is a class, not a function, so that the data module can be pickled."""

    def __init__(self, data: Any, shuffle: bool, options: dict[str, Any]) -> None:
        self.data, self.shuffle, self.options = data, shuffle, options

    def __call__(self) -> Any:
        return self._of(self.data)

    def _of(self, data: Any) -> Any:
        if isinstance(data, Mapping):
            return {name: self._of(dataset) for name, dataset in data.items()}
        if isinstance(data, (list, tuple)):
            return [self._of(dataset) for dataset in data]
        shuffle = self.shuffle and not isinstance(data, IterableDataset)
        return DataLoader(data, shuffle=shuffle, **self.options)
