"""ExponentialMovingAverage: averages the weights exponentially, and evaluates with the averages."""

from typing import TYPE_CHECKING

from ..base.errors import ConfigError
from .weight_averaging import WeightAveraging

if TYPE_CHECKING:
    import torch


class ExponentialMovingAverage(WeightAveraging):
    """Keeps average = decay * average + (1 - decay) * weights, updated after optimizer steps.

    The first update copies the weights. What is evaluated, left in the task and taken from checkpoints are the
    averages, as for every `WeightAveraging`. Equal to torch.optim.swa_utils.AveragedModel with get_ema_avg_fn.
    """

    def __init__(
        self, decay: float = 0.999, *, every_n_steps: int = 1, start_step: int = 0, use_buffers: bool = False
    ) -> None:
        """Average every `every_n_steps` steps from `start_step` on; with `use_buffers` also floating point buffers."""
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"ExponentialMovingAverage: decay={decay!r}: expected a number from 0 to less than 1.")
        if every_n_steps < 1 or start_step < 0:
            raise ConfigError(
                f"ExponentialMovingAverage: every_n_steps={every_n_steps!r} must be at least 1, start_step="
                f"{start_step!r} at least 0."
            )
        super().__init__(use_buffers)
        self.decay, self.every_n_steps, self.start_step = decay, every_n_steps, start_step

    def should_update(self, step: int, epoch: int) -> bool:
        """Return whether the weights after this optimizer step are averaged."""
        return step >= self.start_step and step % self.every_n_steps == 0

    def average(self, averages: "torch.Tensor", weights: "torch.Tensor") -> None:
        """Update averages in place by new weights."""
        averages.lerp_(weights, 1.0 - self.decay)
