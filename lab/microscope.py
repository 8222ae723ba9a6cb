"""Microscope: logs norms of weights, gradients and updates, and statistics of activations, by module."""

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError
from ..callbacks.callback import Callback, MonitoringCallback

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from ..tasks.task import Task
    from ..trainer.trainer import Trainer


class Microscope(MonitoringCallback):
    """Logs norms and activation statistics of each module every n-th step.

    * `weights/NAME`, `gradients/NAME` and `updates/NAME`: norms of the module's own parameters (excluding those of
      submodules), their gradients after clipping, and their changes during the step.
    * `activations/NAME.mean`, `.std`, `.largest` (by absolute value) and `.kurtosis`: statistics of the output of each
      module without submodules, over all batches of the step.

    Other steps run without hooks. An observed step needs memory for a copy of the weights. To measure the cost,
    run `python -m benchmarks.replay`. With `trainer.compile`, steps with observed activations run eagerly, because a
    compiled graph does not call module hooks.

    Args:
        every_n_steps: Observe every n-th optimizer step.
        modules: Regular expression; observe only modules whose names match it from the start (`re.match`).
        activations: Also observe activations.
    """

    def __init__(self, every_n_steps: int = 100, modules: str = "", activations: bool = True) -> None:
        self.every_n_steps, self.modules, self.activations = every_n_steps, modules, activations
        self.newest: tuple[int, dict[str, float]] | None = None
        """The latest observed step and its values, on every rank."""
        self._wanted = re.compile(modules)
        self._before: dict[str, list[Tensor]] = {}
        self._moments: dict[str, list[Tensor]] = {}
        self._handles: list[Any] = []
        self._eagerly = ExitStack()

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Raise ConfigError if this process does not have all modules."""
        refuse_parts(self, trainer, stage)

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Attach hooks if the first step should be observed."""
        self._attach_if_due(trainer, task)

    def on_step_end(self, trainer: "Trainer", task: "Task") -> None:
        """Log the step if it was observed, and attach hooks if the next step should be observed."""
        if self._before or self._handles:
            self._log(trainer, task)
        self._detach()
        self._attach_if_due(trainer, task)

    def on_processes_changed(self, trainer: "Trainer", task: "Task") -> None:
        """Restart the observation if an elastic run repeats the step after its processes change."""
        self._detach()
        self._attach_if_due(trainer, task)

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Remove the hooks, even after an error."""
        self._detach()

    def _attach_if_due(self, trainer: "Trainer", task: "Task") -> None:
        if (trainer.global_step + 1) % self.every_n_steps:
            return
        for name, module in self._chosen(task):
            parameters = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
            if parameters:
                # the update is the difference from this copy
                self._before[name] = [parameter.detach().clone() for parameter in parameters]
            if self.activations and not any(True for _ in module.children()):
                # the output of a module with submodules is usually that of a submodule
                self._handles.append(module.register_forward_hook(self._hook(trainer, name)))
        if self._handles and trainer.compile:
            import torch

            self._eagerly.enter_context(torch.compiler.set_stance("force_eager"))

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._before, self._moments = [], {}, {}
        self._eagerly.close()

    def _chosen(self, task: "Task") -> "Iterator[tuple[str, nn.Module]]":
        return (item for item in task.named_modules() if self._wanted.match(item[0]))

    def _hook(self, trainer: "Trainer", name: str) -> Any:
        import torch

        def look(module: "nn.Module", inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, (tuple, list)) and output else output
            if trainer.training and hasattr(tensor, "is_floating_point") and tensor.is_floating_point():
                self._moments.setdefault(name, []).append(moments(tensor.detach()))

        # in a compiled task this runs outside its graphs, since it appends to a Python list
        return torch.compiler.disable(look)

    def _log(self, trainer: "Trainer", task: "Task") -> None:
        """Collect the values from all ranks and write them on rank 0."""
        values = {}
        for name, module in self._chosen(task):
            if name not in self._before:
                continue
            parameters = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
            changes = [now.detach() - before for now, before in zip(parameters, self._before[name], strict=True)]
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            for word, tensors in (("weights", parameters), ("gradients", gradients), ("updates", changes)):
                # collective for sharded tensors, so every rank must call it in the same order
                values[f"{word}/{name}"] = float(total_norm(tensors))
        moments_here = {name: [row.tolist() for row in rows] for name, rows in self._moments.items()}
        # moments are additive, so ranks exchange sums rather than batches
        by_rank = trainer.strategy.data_ranks.gather_objects(moments_here)
        for name in dict.fromkeys(name for named in by_rank for name in named):
            rows = [row for named in by_rank for row in named.get(name, ())]
            for statistic, value in zip(("mean", "std", "largest", "kurtosis"), summary_of(rows), strict=True):
                values[f"activations/{name}.{statistic}"] = value
        self.newest = trainer.global_step, values
        if trainer.is_global_zero:
            trainer.current_run.write(trainer.global_step, values)


def refuse_parts(callback: Callback, trainer: "Trainer", stage: str) -> None:
    """Raise ConfigError if each of a training run's processes has only some of the modules."""
    if stage == "fit" and not trainer.strategy.has_all_weights:
        raise ConfigError(
            f"{type(callback).__name__} needs all modules in each process, but with strategy={trainer.strategy.name}, "
            f"some are in other processes (pipeline stages or remote modules). Remove the callback, set pipeline to 1, "
            f"or keep the modules local."
        )


def total_norm(tensors: "list[Any]") -> "Tensor":
    """Return the total norm of multiple tensors. For sharded tensors, this is a collective over all shards."""
    import torch

    # torch can combine norms only of tensors on the same mesh; sparse gradients contribute their values
    by_mesh: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
        by_mesh.setdefault(getattr(tensor, "device_mesh", None), []).append(values)
    norms = [torch.nn.utils.get_total_norm(group) for group in by_mesh.values()]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(norms).float()) if norms else torch.zeros(())


def moments(tensor: "Tensor") -> "Tensor":
    """Return (count, sum of x, of x^2, x^3, x^4, largest |x|) of a tensor in float64, on its device."""
    import torch

    # a fourth power in bfloat16 loses all digits
    values = tensor.reshape(-1).to(torch.float32)
    squares = values * values
    terms = values, squares, squares * values, squares * squares
    count = torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device)
    largest = values.abs().max() if values.numel() else torch.zeros((), device=values.device)
    return torch.stack([count, *(term.sum(dtype=torch.float64) for term in terms), largest.double()])


def summary_of(rows: "list[list[float]]") -> tuple[float, float, float, float]:
    """Return the mean, standard deviation, largest absolute value and kurtosis (3 for a normal distribution)."""
    count, *sums = (sum(row[index] for row in rows) for index in range(5))
    if not count:
        return (0.0,) * 4
    mean, second, third, fourth = (total / count for total in sums)
    variance = max(second - mean**2, 0.0)
    central = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
    kurtosis = central / variance**2 if variance > 1e-12 * second else float("nan")
    return mean, variance**0.5, max(row[5] for row in rows), kurtosis
