"""DeviceStatsMonitor: logs the device's memory statistics and the CPU's load and memory use."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError
from .callback import Callback

if TYPE_CHECKING:
    from ..base.contracts import Task, Trainer

PREFIX = "DeviceStatsMonitor"


class DeviceStatsMonitor(Callback):
    """Logs statistics of rank 0's device at logging points, before and after a batch.

    On accelerators such as CUDA, it logs all values from torch.cuda.memory_stats or its equivalent. On MPS, it logs the
    number of allocated bytes. On CPU, it logs load and memory use as percentages, which requires psutil. Names
    have the form `DeviceStatsMonitor.on_train_batch_end/NAME`.

    Args:
        cpu_stats: When to log CPU statistics. True: always; None: only if the device is the CPU; False: never.

    Raises ConfigError if the run has no logger, or if `cpu_stats` is True and psutil is not installed.
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self._cpu_stats = cpu_stats
        self._logged: set[str] = set()

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Raise ConfigError if the run has no logger, or if `cpu_stats` is True and psutil is not installed."""
        if stage == "fit" and not trainer.loggers:
            raise ConfigError("DeviceStatsMonitor needs a logger. Set trainer.logger to True or to a logger.")
        if self._cpu_stats and find_spec("psutil") is None:
            raise ConfigError("DeviceStatsMonitor(cpu_stats=True) needs the psutil package: pip install psutil.")

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Log before a batch."""
        # the step that this batch belongs to, so that both hooks log at the same step
        self._log(trainer, "on_train_batch_start", trainer.state.global_step + 1)

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log after a step."""
        self._log(trainer, "on_train_batch_end", trainer.state.global_step)

    def _log(self, trainer: "Trainer", hook: str, step: int) -> None:
        # only once per step, although the hooks run for each batch of each replica
        mark = f"{hook} {step}"
        if not trainer.is_global_zero or step == 0 or step % trainer.log_every_n_steps or mark in self._logged:
            return
        self._logged = {logged for logged in self._logged if logged.endswith(f" {step}")} | {mark}
        values = {f"{PREFIX}.{hook}/{name}": value for name, value in self.stats(trainer).items()}
        if values:
            trainer.current_run.write(step, values)

    def stats(self, trainer: "Trainer") -> dict[str, float]:
        """Return the current statistics by name."""
        import torch

        device, values = trainer.strategy.device, dict[str, float]()
        module: Any = getattr(torch, device.type, None)
        if hasattr(module, "current_allocated_memory"):  # device types with a single device, such as MPS
            values = {f"{device.type}_current_allocated_bytes": float(module.current_allocated_memory())}
        elif hasattr(module, "memory_stats"):
            values = {name: float(value) for name, value in module.memory_stats(device).items()}
        wanted = device.type == "cpu" if self._cpu_stats is None else self._cpu_stats
        # with cpu_stats=None psutil is optional; with True, setup has raised an error if it is missing
        if wanted and find_spec("psutil") is not None:
            import psutil

            values["cpu_percent"] = psutil.cpu_percent()
            values["cpu_vm_percent"] = psutil.virtual_memory().percent
            values["cpu_swap_percent"] = psutil.swap_memory().percent
        return values
