"""WeightWatch: finds weights that change between two updates, in the first steps of a run."""

from torch import Tensor, nn

from ...base.torch_private import version_of
from .drift import sums_of_bits

WATCHED_STEPS = 3


class WeightWatch:
    """Compares weights before the first forward of a step with those before its update.

    training_step, and the hooks around it, run once for each replica: what they write to weights would depend on how
    the replicas are shared out. Version counters show a write that changes nothing yet, as of a teacher that begins as
    a copy; values one through `.data`, which has no version. Values are read in the first step alone: that waits for
    the device.
    """

    def __init__(self, task: nn.Module) -> None:
        self.task, self.steps_left = task, WATCHED_STEPS
        self.parameters: dict[str, list[int]] = {}
        self.buffers: dict[str, list[int]] = {}

    def begin_step(self) -> None:
        """Take the marks of all weights."""
        self.parameters, self.buffers = self._marks_of_parameters(), self._marks_of_buffers()

    def end_step(self) -> tuple[list[str], list[str]]:
        """Return the names of the parameters and of the buffers that have changed since the step began."""
        parameters, buffers = self._marks_of_parameters(), self._marks_of_buffers()
        # a teacher that changes every n steps is missed; three steps find what is updated in each
        self.steps_left -= 1
        return (
            [name for name, mark in parameters.items() if self.parameters.get(name, mark) != mark],
            [name for name, mark in buffers.items() if self.buffers.get(name, mark) != mark],
        )

    def _marks_of_parameters(self) -> dict[str, list[int]]:
        # cuDNN's recurrent layers put their weights into one block of memory within forward
        recurrent = [module for module in self.task.modules() if isinstance(module, nn.RNNBase)]
        moved = {id(parameter) for module in recurrent for parameter in module.parameters()}
        return {
            name: [0 if id(parameter) in moved else version_of(parameter), *self._values(parameter)]
            for name, parameter in self.task.named_parameters()
        }

    def _marks_of_buffers(self) -> dict[str, list[int]]:
        """Return marks of floating point buffers, but for running statistics and buffers of torch's modules."""
        return {
            f"{path}.{name}".lstrip("."): self._values(buffer)
            for path, module in self.task.named_modules()
            # these write buffers in each forward on purpose, and those of the first replica count
            if not (type(module).__module__.startswith("torch.") or hasattr(module, "running_mean"))
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point()
        }

    def _values(self, tensor: Tensor) -> list[int]:
        return [int(number) for number in sums_of_bits(tensor)] if self.steps_left == WATCHED_STEPS else []
