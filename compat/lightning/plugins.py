"""Plugins that programs pass to a Trainer: precision, process environment and synchronized batch norm."""

import signal
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import torch
from torch import nn

from ...base.errors import ConfigError
from ...base.place import Place, find_place
from ...trainer.strategies.strategy import SingleStrategy
from .placeholders import UnsupportedError, refuse_overrides

# --- precision --------------------------------------------------------------------------------------------------------
SHORT_WORDS = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}


def word_of(precision: str | int) -> str:
    """Return Lightning's long name for a precision."""
    return SHORT_WORDS.get(str(precision), str(precision))


class Precision:
    """A run's precision, selected by name. Legato implements the precision itself."""

    precision: str = "32-true"

    def __init__(self) -> None:
        self.scaler: Any = None

    def forward_context(self, device: str | torch.device = "cpu") -> AbstractContextManager[Any]:
        """Return the context for running a forward pass on a device."""
        # a strategy creates the precision of its run; a strategy for a single process is sufficient here
        strategy = SingleStrategy()
        strategy.join(Place(), [torch.device(device)], self.precision)
        return strategy.precision.forward_context()

    @staticmethod
    def main_params(optimizer: Any) -> Iterator[nn.Parameter]:
        """Yield an optimizer's parameters."""
        for group in optimizer.param_groups:
            yield from group["params"]

    def clip_gradients(
        self, optimizer: Any, clip_val: int | float = 0.0, gradient_clip_algorithm: str | Enum = "norm"
    ) -> None:
        """Clip the gradients of an optimizer's parameters. A value of 0 disables clipping."""
        # in Lightning, 0 disables clipping
        if clip_val > 0:
            word = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)
            clip = nn.utils.clip_grad_value_ if word == "value" else nn.utils.clip_grad_norm_
            clip(list(self.main_params(optimizer)), clip_val)


class MixedPrecision(Precision):
    """Mixed precision with autocast and, for float16, gradient scaling."""

    def __init__(self, precision: str, device: str, scaler: Any = None) -> None:
        super().__init__()
        if precision not in ("16-mixed", "bf16-mixed"):
            raise ConfigError(f"MixedPrecision(precision={precision!r}): expected '16-mixed' or 'bf16-mixed'.")
        if scaler is not None:
            raise UnsupportedError(
                "MixedPrecision(scaler=...) is not supported: the Trainer creates the GradScaler. To change its "
                "settings, use trainer.precision_plugin.scaler in a callback."
            )
        self.precision, self.device = precision, device


class DoublePrecision(Precision):
    """Uses float64 for all parameters and computations."""

    precision = "64-true"


class HalfPrecision(Precision):
    """Uses float16 or bfloat16 for all parameters and computations."""

    def __init__(self, precision: str = "16-true") -> None:
        super().__init__()
        if precision not in ("16-true", "bf16-true"):
            raise ConfigError(f"HalfPrecision(precision={precision!r}): expected '16-true' or 'bf16-true'.")
        self.precision = precision


class FSDPPrecision(Precision):
    """A precision for the `fsdp` strategy, selected by name."""

    def __init__(self, precision: str, scaler: Any = None) -> None:
        super().__init__()
        if scaler is not None:
            raise UnsupportedError("FSDPPrecision(scaler=...) is not supported: the Trainer creates the scaler.")
        self.precision = word_of(precision)


CALLED_BY_LIGHTNING = (
    *("backward", "optimizer_step", "pre_backward", "post_backward", "clip_gradients", "clip_grad_by_norm"),
    *("clip_grad_by_value", "convert_module", "convert_input", "convert_output", "forward_context"),
    *("train_step_context", "val_step_context", "test_step_context", "predict_step_context", "connect"),
)
"""Methods of a precision that a run calls in Lightning but not in Legato."""
OWN_PRECISION = (
    "precision is selected by name. Pass Trainer(precision=...), and override the module's backward, optimizer_step, "
    "configure_gradient_clipping or on_after_batch_transfer."
)


# --- environments -----------------------------------------------------------------------------------------------------
class ClusterEnvironment:
    """A launcher's environment, which provides this process's rank and node through environment variables."""

    cluster = "auto"
    """The value of the Trainer argument `cluster`."""

    @property
    def place(self) -> Place:
        """This process's rank and node, as read from the launcher's environment variables."""
        return find_place(self.cluster) or Place()

    @property
    def creates_processes_externally(self) -> bool:
        """Whether a launcher started this process."""
        return find_place(self.cluster) is not None

    @staticmethod
    def detect() -> bool:
        """Return whether a launcher started this process."""
        return find_place("auto") is not None

    def world_size(self) -> int:
        """Return the number of processes."""
        return self.place.world_size

    def global_rank(self) -> int:
        """Return this process's rank."""
        return self.place.rank

    def local_rank(self) -> int:
        """Return this process's local rank."""
        return self.place.local_rank

    def node_rank(self) -> int:
        """Return the index of this machine."""
        return self.place.node_rank

    def teardown(self) -> None:
        """Do nothing."""


class LightningEnvironment(ClusterEnvironment):
    """Processes started by the trainer or described by environment variables."""


class SLURMEnvironment(ClusterEnvironment):
    """Processes started by srun. With `auto_requeue`, SLURM requeues a job that receives a signal."""

    def __init__(self, auto_requeue: bool = True, requeue_signal: Any = None) -> None:
        if requeue_signal not in (None, signal.SIGTERM, signal.SIGUSR1):
            raise UnsupportedError(
                "SLURMEnvironment(requeue_signal=...) is not supported: only SIGTERM and SIGUSR1 requeue a job. "
                "Request one of these signals: sbatch --signal=SIGUSR1@90."
            )
        self.auto_requeue, self.requeue_signal = auto_requeue, requeue_signal


class TorchElasticEnvironment(ClusterEnvironment):
    """Processes started by torchrun."""


class MPIEnvironment(ClusterEnvironment):
    """Processes started by mpirun."""


def find_free_network_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


# --- batch norm -------------------------------------------------------------------------------------------------------
class LayerSync:
    """Base class for plugins that synchronize layers across processes. A Trainer accepts only TorchSyncBatchNorm."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Return the model with synchronized layers."""
        raise NotImplementedError

    def revert(self, model: nn.Module) -> nn.Module:
        """Return the model with its original layers."""
        raise NotImplementedError


class TorchSyncBatchNorm(LayerSync):
    """Batch norm across all processes, equivalent to Trainer(sync_batchnorm=True)."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Return the model with its batch norm layers replaced by torch's SyncBatchNorm."""
        synchronized: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return synchronized

    def revert(self, model: nn.Module) -> nn.Module:
        """Return the model unchanged, because a run restores the layers that it replaced."""
        return model


def read_plugins(plugins: Any) -> dict[str, Any]:
    """Return the Legato Trainer arguments that replace the given plugins. Raises UnsupportedError for other plugins."""
    arguments: dict[str, Any] = {}
    requested = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins] if plugins is not None else []
    for plugin in requested:
        if isinstance(plugin, Precision):
            refuse_overrides(plugin, CALLED_BY_LIGHTNING, OWN_PRECISION)
            arguments["precision"] = plugin.precision
        elif isinstance(plugin, ClusterEnvironment):
            # a subclass's methods return the ranks of the process, but a run in Legato does not call them
            if type(plugin).__module__ != __name__:
                raise UnsupportedError(
                    f"plugins=[{type(plugin).__name__}()] is not supported. Legato reads environment variables: set "
                    "the ones that SLURM or MPI uses, or RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."
                )
            arguments["requeue"] = bool(getattr(plugin, "auto_requeue", False)) and plugin.place.world_size > 1
        elif isinstance(plugin, TorchSyncBatchNorm):
            arguments["sync_batchnorm"] = True
        elif isinstance(plugin, str):
            arguments["precision"] = plugin
        else:
            raise UnsupportedError(
                f"plugins=[{type(plugin).__name__}] is not supported: expected a precision plugin, an environment or "
                "TorchSyncBatchNorm. To change where checkpoints are written, subclass ModelCheckpoint."
            )
    return arguments
