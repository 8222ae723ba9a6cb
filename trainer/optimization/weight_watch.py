"""WeightWatch: detects weights that change between updates, during the first few steps of a run."""

from torch import Tensor, nn

from ...base.torch_private import version_of
from .drift import sums_of_bits

WATCHED_STEPS = 3


class WeightWatch:
    """Detector for weights that change between a step's first forward pass and its update.

    training_step and the hooks around it run once per replica, so any weights they change would depend on how replicas
    are assigned to processes. Version counters detect a write that does not yet change any values, such as the first
    update of a teacher model that starts as a copy. Comparing values detects a write through `.data`, which does not
    change the version counter. Values are compared only in the first step, because reading them synchronizes with the
    device.
    """

    def __init__(self, task: nn.Module) -> None:
        self.task, self.steps_left = task, WATCHED_STEPS
        self.before: dict[str, list[int]] = {}

    def begin_step(self) -> None:
        """Record the version counters and values of all weights."""
        self.before = self._marks()

    def end_step(self) -> tuple[list[str], list[str]]:
        """Return the names of the parameters and buffers that have changed since the step began."""
        changed = [name for name, mark in self._marks().items() if self.before.get(name, mark) != mark]
        # three steps find weights that change in every step; a teacher that changes every n steps may be missed
        self.steps_left -= 1
        parameters = dict(self.task.named_parameters())
        return [name for name in changed if name in parameters], [name for name in changed if name not in parameters]

    def _marks(self) -> dict[str, list[int]]:
        """Return version counters and values of parameters, and of floating-point buffers outside torch's modules."""
        # cuDNN's recurrent layers move their weights into one block of memory in the forward pass
        recurrent = [module for module in self.task.modules() if isinstance(module, nn.RNNBase)]
        moved = {id(parameter) for module in recurrent for parameter in module.parameters()}
        marks = {
            name: [0 if id(parameter) in moved else version_of(parameter), *self._values(parameter)]
            for name, parameter in self.task.named_parameters()
        }
        for path, module in self.task.named_modules():
            # buffers of torch's modules and running statistics change in each forward pass; the first replica's count
            if not (type(module).__module__.startswith("torch.") or hasattr(module, "running_mean")):
                for name, buffer in module.named_buffers(path, recurse=False):
                    if buffer.is_floating_point():
                        marks[name] = self._values(buffer)
        return marks

    def _values(self, tensor: Tensor) -> list[int]:
        return [int(number) for number in sums_of_bits(tensor)] if self.steps_left == WATCHED_STEPS else []
