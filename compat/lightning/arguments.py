"""Converts Lightning's Trainer arguments to Legato's."""

import os
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

import torch

from ...base.errors import ConfigError
from ...callbacks.callback import Callback
from ...loggers.logger import Logger
from ...trainer.processes.devices import find_devices
from .accelerators import KINDS, read_devices
from .callbacks.callback import Callback as CallbackOfLightning
from .loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from .placeholders import UnsupportedError
from .plugins import ClusterEnvironment, LayerSync, Precision, read_plugins, word_of
from .profilers import Profiler
from .rank_zero import rank_zero_info, rank_zero_warn
from .requeue import is_requeued_by_default
from .strategies import XLA, Strategy, StrategyOfLegato, read_strategy

AnyCallback = CallbackOfLightning | Callback
AnyLogger = TensorBoardLogger | CSVLogger | MLFlowLogger | WandbLogger | Logger
AnyPlugin = Precision | ClusterEnvironment | LayerSync | str
AnyProfiler = Profiler | str
AnyStrategy = str | Strategy | StrategyOfLegato
"""Unions in the order in which jsonargparse resolves a bare name, such as `class_path: EarlyStopping`."""

NEVER_LOG = sys.maxsize
"""A value of `log_every_n_steps` that disables logging."""
COUNTS = ("max_steps", "min_steps", "min_epochs", "accumulate_grad_batches", "log_every_n_steps")
"""Arguments that are counts but also accept floats such as 1e5."""
TAKEN_HERE = ("benchmark", "profiler", "barebones", "plugins", "enable_autolog_hparams", "model_registry")
"""Arguments that Legato's Trainer does not have."""
LIMITS = tuple(f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict"))
DEFAULTS = {
    "precision": "32-true",
    "val_check_interval": 1.0,
    "num_sanity_val_steps": 2,
    "log_every_n_steps": 50,
    **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), True),
    **dict.fromkeys(LIMITS, 1.0),
}
"""Values to use for arguments that are None."""
BAREBONES: dict[str, Any] = {
    "enable_checkpointing": False,
    "logger": False,
    "enable_progress_bar": False,
    "log_every_n_steps": NEVER_LOG,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
"""Values that barebones=True sets."""


def read_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert Lightning's Trainer arguments to Legato's. In the result, `logger=True` selects the default logger.

    Raises ValueError, TypeError or ConfigError as in Lightning, and UnsupportedError for features that Legato does
    not have.
    """
    _check(settings)
    log_ambiguous_limits(settings)
    converted = {name: value for name, value in settings.items() if name not in TAKEN_HERE}
    if settings["barebones"]:
        _check_barebones(settings)
        converted |= BAREBONES
    # first, because a strategy object may contain an accelerator, devices and plugins
    converted["strategy"] = read_strategy(settings["strategy"])
    converted |= getattr(converted["strategy"], "trainer_arguments", {})
    converted |= {"requeue": is_requeued_by_default(), **read_plugins(settings["plugins"])}
    converted |= {name: value for name, value in DEFAULTS.items() if converted[name] is None}
    if settings["val_check_interval"] is None and converted["check_val_every_n_epoch"] is None:
        converted["check_val_every_n_epoch"] = 1  # validate at the end of each epoch
    for name in (*LIMITS, *COUNTS, "val_check_interval"):
        value = converted[name]
        is_count = isinstance(value, float) and value.is_integer() and (value > 1 or name in COUNTS)
        if is_count or isinstance(value, bool):
            converted[name] = int(value)  # 10.0 becomes 10, and True becomes 1
    if isinstance(converted["val_check_interval"], float) and converted["val_check_interval"] == 0.0:
        converted["val_check_interval"] = 1  # the smallest interval is one batch
    # Lightning writes to the current folder, Legato to runs/
    root = os.fspath(settings["default_root_dir"] or os.getcwd())
    logger = converted["logger"]
    converted["logger"] = True if logger is None else list(logger) if is_collection(logger) else logger
    accelerator = _accelerator(converted["accelerator"])
    callbacks = [settings["callbacks"]] if isinstance(settings["callbacks"], Callback) else settings["callbacks"] or []
    converted["callbacks"] = [*callbacks, *callbacks_of_packages()] if isinstance(callbacks, Iterable) else callbacks
    return converted | {
        "accelerator": accelerator,
        "devices": read_devices(converted["devices"]),
        "precision": _precision(converted["precision"], settings["precision"], accelerator),
        "gradient_clip_algorithm": str(settings["gradient_clip_algorithm"] or "norm").rpartition(".")[2].lower(),
        "log_every_n_steps": converted["log_every_n_steps"] or NEVER_LOG,
        "default_root_dir": os.path.normpath(os.path.expanduser(root)),
        # the folder name for runs with loggers that write no files
        "run_name": "lightning_logs",
        # Lightning's sampler repeats samples, and training steps may gather from all ranks
        "use_distributed_sampler": "even" if settings["use_distributed_sampler"] else False,
        # Lightning continues after a non-finite loss
        "nan": "ignore",
    }


def callbacks_of_packages() -> list[Callback]:
    """Return the callbacks that installed packages add to every Trainer through Lightning's entry points."""
    callbacks: list[Callback] = []
    for point in entry_points(group="lightning.pytorch.callbacks_factory"):
        created = point.load()()
        callbacks += [created] if isinstance(created, Callback) else created
    return callbacks


def log_ambiguous_limits(settings: Mapping[str, Any]) -> None:
    """Log what a limit of 1 (one batch) or 1.0 (all batches) means."""
    for name in (*LIMITS, "val_check_interval"):
        value = settings[name]
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == 1:
            share = "1 batch" if isinstance(value, int) else "100% of the batches"
            meaning = f"{share} per epoch will be used"
            if name == "val_check_interval":
                meaning = "validation will run " + ("after every batch" if isinstance(value, int) else "once per epoch")
            rank_zero_info(f"`Trainer({name}={value})` was configured so {meaning}.")


def is_collection(logger: Any) -> bool:
    """Return whether the `logger` argument is a collection of loggers."""
    return isinstance(logger, Iterable) and not isinstance(logger, Logger)


def _check(settings: Mapping[str, Any]) -> None:
    clip, algorithm = settings["gradient_clip_val"], settings["gradient_clip_algorithm"]
    if clip is not None and not isinstance(clip, (int, float)):
        raise TypeError(f"gradient_clip_val should be an int or a float, got {clip!r}.")
    if algorithm is not None and str(algorithm).rpartition(".")[2].lower() not in ("norm", "value"):
        raise ConfigError(f"gradient_clip_algorithm={algorithm!r}: expected 'norm' or 'value'.")
    if isinstance(settings["val_check_interval"], float) and settings["check_val_every_n_epoch"] is None:
        raise ConfigError(
            "`val_check_interval` should be an integer when `check_val_every_n_epoch=None`: expected a number of "
            f"batches or a time, got {settings['val_check_interval']}."
        )
    if settings["model_registry"] is not None:
        raise UnsupportedError("model_registry is not supported. Use Callback.after_save_checkpoint.")
    fast_dev_run = settings["fast_dev_run"]
    if fast_dev_run is not False and (isinstance(fast_dev_run, float) or fast_dev_run < 0):
        raise ConfigError(f"fast_dev_run={fast_dev_run!r}: expected True, False or a number of batches.")


def _check_barebones(settings: Mapping[str, Any]) -> None:
    unwanted = {**dict.fromkeys(BAREBONES), "fast_dev_run": False, "detect_anomaly": False, "profiler": None}
    for name in unwanted:
        if settings[name] not in (None, False, 0):
            raise ValueError(f"barebones=True disables {name}={settings[name]!r}. Remove one of these arguments.")


def _accelerator(wanted: Any) -> Any:
    """Return the device type. Raises ConfigError if it is unknown."""
    # an Accelerator object is a string that names its device type
    word = wanted.lower() if isinstance(wanted, str) else wanted
    if word in ("tpu", "xla", "hpu", "ipu"):
        raise UnsupportedError(f"Trainer(accelerator={wanted!r}): {XLA}")
    if word not in ("auto", "gpu", *KINDS):
        raise ConfigError(f"Trainer(accelerator={wanted!r}): expected one of auto, gpu, {', '.join(KINDS)}. {XLA}")
    return str(word)


def _precision(wanted: Any, argument: Any, accelerator: str) -> Any:
    """Return Lightning's name for the precision `wanted`. `argument` is the value passed as `Trainer(precision=)`."""
    if str(argument) in ("16", "16-mixed") and find_devices(accelerator, "auto")[0].type == "cpu":
        # most float16 kernels for the CPU are much slower than float32 kernels
        rank_zero_warn(f"Trainer(precision={argument!r}) on the CPU uses 'bf16-mixed', as in Lightning.")
        return "bf16-mixed"
    if isinstance(wanted, Precision):
        return wanted.precision
    if str(wanted).startswith("transformer-engine"):
        raise UnsupportedError(
            "precision='transformer-engine' is not supported. Use transformer_engine's layers and fp8_autocast in the "
            "module, and pass precision='bf16-true'."
        )
    return word_of(wanted)


def set_benchmark(benchmark: bool | None, deterministic: Any) -> None:
    """Enable or disable cuDNN's search for the fastest kernels."""
    if benchmark is not None or deterministic:
        torch.backends.cudnn.benchmark = bool(benchmark)
