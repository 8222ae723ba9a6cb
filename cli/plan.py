"""`legato plan`: shows the layout of a config's run and the memory per process, without starting the run."""

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..base.errors import ConfigError, DataError
from ..base.quantities import counted, format_bytes
from ..base.tensors import map_tensors
from ..base.torch_private import faking_tensors
from ..lab.sample_lookup import step_at, steps_of
from ..trainer.data.combined import combined
from ..trainer.data.dealing import DealtData
from ..trainer.data.loaders import MapLoader, is_dealable
from ..trainer.data.sampling import Layout
from ..trainer.data.steps import Dealing
from ..trainer.hooks import count_arguments
from ..trainer.optimization.kernels import recompute, restore_classes
from ..trainer.optimization.precision import Precision
from ..trainer.setup.data import distribute
from ..trainer.strategies.mesh.dtensors import replace
from .config.check import load_config
from .unstarted import UnstartedRun

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..tasks.task import Task

RESERVED = 0.1
"""Fraction of a device's memory reserved for the driver and for fragmentation in torch's allocator."""
UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20, "TB": 10**12}


def run_plan(options: Namespace) -> None:
    """Print the plan for a config. Raises DataError if an epoch has no steps."""
    memory = None if options.memory is None else parse_memory(options.memory)
    plan = Plan(load_config(options.words))
    print("\n".join(f"{name:<16}{value}" for name, value in plan.rows(memory)))
    if plan.steps == 0:
        raise DataError("An epoch would have no steps, so fit would fail. Use more samples or fewer replicas.")


# --- sizes ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class StateSize:
    """Size in bytes of a run's unsharded state."""

    parameters: int
    """Number of parameters, trainable or not."""
    weights: int
    buffers: int
    gradients: int
    optimizer: int | None
    """Bytes of the optimizer state, or None if unknown."""
    optimizer_name: str
    """Name of the optimizer, or the reason why the size of its state is unknown."""

    def of_rank(self, weight_parts: int, optimizer_parts: int) -> "StateSize":
        """Return the size of each rank's share of the state, rounded up. All shares are assumed to be equal."""
        optimizer = None if self.optimizer is None else -(-self.optimizer // optimizer_parts)
        weights, gradients = -(-self.weights // weight_parts), -(-self.gradients // weight_parts)
        return StateSize(self.parameters, weights, self.buffers, gradients, optimizer, self.optimizer_name)

    @property
    def total(self) -> int:
        """Total bytes, excluding optimizer state of unknown size."""
        return self.weights + self.buffers + self.gradients + (self.optimizer or 0)

    @property
    def checkpoint(self) -> int:
        """Size of a checkpoint in bytes, accurate to within a few kB."""
        return self.weights + self.buffers + (self.optimizer or 0)

    def describe(self) -> str:
        """Return the total size and its components as one line of text."""
        unknown = "" if self.optimizer is not None else " plus the optimizer's"
        optimizer = "unknown" if self.optimizer is None else format_bytes(self.optimizer)
        parts = [f"parameters {format_bytes(self.weights)}", f"gradients {format_bytes(self.gradients)}"]
        parts += [f"buffers {format_bytes(self.buffers)}"] if self.buffers else []
        parts += [f"optimizer {optimizer} ({self.optimizer_name})"]
        return f"{format_bytes(self.total)}{unknown}: {', '.join(parts)}"


def measure_state(task: nn.Module, make_optimizers: "Callable[[], Sequence[Optimizer]]") -> StateSize:
    """Return the size of a task's state. The task must be on the meta device, where its optimizers take one step."""
    parameters = list(task.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        # optimizers create their state in their first step, and skip parameters without a gradient
        parameter.grad = torch.empty_like(parameter)
    optimizers: Sequence[Optimizer] = ()
    unknown = ""
    try:
        optimizers = make_optimizers()
    except Exception as error:  # without a run and on the meta device, user code may fail in any way
        unknown = f"configure_optimizers: {type(error).__name__}"
    name = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers)) or "no optimizer"
    for optimizer in optimizers:
        try:
            optimizer.step()
        except Exception as error:  # some optimizers read values, usually after creating their state
            # the state is complete if every parameter has an entry, wherever the step failed
            params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
            if not all(optimizer.state.get(param) for param in params):
                unknown = f"{name} cannot be measured without data: {type(error).__name__}"
    values = chain.from_iterable(state.values() for optimizer in optimizers for state in optimizer.state.values())
    size = _sum_bytes([value for value in values if isinstance(value, Tensor)])
    sizes = _sum_bytes(parameters), _sum_bytes(list(task.buffers())), _sum_bytes(trained)
    count = sum(parameter.numel() for parameter in parameters)
    return StateSize(count, *sizes, None if unknown else size, unknown or name)


def _sum_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def parse_memory(text: str) -> int:
    """Convert a size such as 80GB to bytes. Raises ConfigError for any other format."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(\w+)", text)
    if match is None or match[2] not in UNITS:
        raise ConfigError(f"--memory {text}: expected a size such as 80GB or 40GiB.")
    return int(float(match[1]) * UNITS[match[2]])


# --- activations ------------------------------------------------------------------------------------------------------
def measure_activations(task: "Task", batch: Any, recomputed: Sequence[str], precision: Precision) -> int:
    """Return the number of bytes that autograd saves during a training_step, plus the size of the batch.

    The weights and the batch are fake tensors, which have shapes and dtypes but use no memory.

    Args:
        task: A task on the meta device. Its weights become fake tensors.
        batch: A batch with the same shapes as the run's batches.
        recomputed: Classes of blocks that only save their inputs, since the backward pass recomputes the other tensors.

    Raises ConfigError if training_step needs the values of tensors or a running trainer.
    """
    of_batch: list[Tensor] = []
    batch = precision.convert_batch(batch)
    # log() would need a run
    task.__dict__["log"] = task.__dict__["log_dict"] = lambda *_, **__: None
    with faking_tensors() as device, torch.enable_grad():

        def fake(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

        def fake_in_batch(tensor: Tensor) -> Tensor:
            of_batch.append(fake(tensor))
            return of_batch[-1]

        replace(task, fake)
        arguments = (map_tensors(batch, fake_in_batch), 0)[: count_arguments(task, "training_step")]
        # references keep the ids of storages unique; storages of weights and batch are not activations
        seen = {id(s): s for s in map(Tensor.untyped_storage, [*task.parameters(), *task.buffers(), *of_batch])}
        sizes = [storage.nbytes() for storage in map(Tensor.untyped_storage, of_batch)]

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if id(storage) not in seen:
                seen[id(storage)] = storage
                sizes.append(storage.nbytes())
            return tensor

        before = recompute(task, tuple(recomputed))
        try:
            with precision.forward_context(), saved_tensors_hooks(pack, lambda tensor: tensor):
                task.training_step(*arguments)
        except Exception as error:  # such as reading values or using the run
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"training_step fails on fake tensors: {type(error).__name__}: {reason:.100}") from error
        finally:
            restore_classes(before)
        return sum(sizes)


# --- the plan ---------------------------------------------------------------------------------------------------------
class Plan:
    """Process count, step count and sizes for the run that a config describes.

    Raises ConfigError for an invalid process layout.
    """

    def __init__(self, config: Any) -> None:
        self.values = config.values["trainer"]
        if not self.values["use_distributed_sampler"]:
            raise ConfigError(
                "legato plan cannot count steps when use_distributed_sampler=False: the loaders already shard the data."
            )
        self.run = run = UnstartedRun(config)
        self.replicas: int = self.values["replicas"] or run.parts.batches
        Layout(self.replicas, run.parts.batches)  # raises for more processes than replicas
        self.loader, trainer = combined(run.load_loader()), run.task.trainer
        self.quick = int(self.values["fast_dev_run"])
        if self.quick:
            trainer.limit_train_batches, trainer.overfit_batches = self.quick, 0
        dealing = Dealing(Layout(self.replicas, 1), 0, self.values["accumulate_grad_batches"], run.seed)
        self.data = distribute(self.loader, dealing, trainer, run.task)
        self.steps = steps_of(self.data, 0)
        self.state = measure_state(run.task, lambda: run.make_optimizers(self.data.rounds or 0))

    @property
    def total_steps(self) -> int | None:
        """Number of optimizer steps in the run, or None if it is unknown or unlimited."""
        limits = [] if self.values["max_steps"] == -1 else [self.values["max_steps"]]
        epochs = self.values["max_epochs"]
        if epochs is None and not limits and self.values["max_time"] is None:
            epochs = 1000  # the Trainer's default
        if epochs not in (None, -1) and self.steps is not None:
            limits.append(epochs * self.steps)
        return min([*limits, *([self.quick] if self.quick else [])], default=None)

    def rows(self, memory: int | None) -> Iterator[tuple[str, str]]:
        """Yield the title and text of each row of the plan. `memory` is a device's memory in bytes."""
        run, parts = self.run, self.run.parts
        nodes = f" on {run.nodes:,} nodes, {run.processes // run.nodes:,} each" if run.nodes > 1 else ""
        yield "Processes", f"{run.processes:,}{nodes}"
        each, longer = divmod(self.replicas, parts.batches)
        share = counted(each, "replica") if not longer else f"{each:,} or {each + 1:,} replicas"
        together = run.processes // parts.batches
        group = f"each group of {together:,} processes" if together > 1 else "each process"
        yield "Replicas", f"{self.replicas:,}: {group} has {share}"
        yield "A step", self._describe_step()
        yield "Steps per epoch", "unknown: the loader has no length" if self.steps is None else f"{self.steps:,}"
        total = self.total_steps
        yield "Total steps", "unknown" if total is None else f"{total:,}"
        yield "Parameters", f"{self.state.parameters:,}"
        if parts.weights is None:
            yield "State", f"{self.state.describe()}; the task decides how to split it among processes"
            rank = None
        else:
            rank = self.state.of_rank(parts.weights, parts.optimizer)
            about = "about " if parts.weights * parts.optimizer > 1 else ""
            yield "State per rank", f"{about}{rank.describe()}"
        yield (
            "A checkpoint",
            format_bytes(self.state.checkpoint) + ("" if self.state.optimizer is not None else " and more"),
        )
        activations = self.measure_activations()
        if isinstance(activations, str):
            yield "Activations", f"unknown: {activations}"
        else:
            cut = f", about 1/{parts.layers} of it in each of {parts.layers:,} processes" if parts.layers > 1 else ""
            yield "Activations", f"{format_bytes(activations)} for a batch{cut}"
        if memory is not None:
            yield "Memory", self._describe_memory(rank, activations, memory)

    def _describe_step(self) -> str:
        accumulate = self.values["accumulate_grad_batches"]
        batches = f" x {accumulate:,} batches" if accumulate > 1 else ""
        if not isinstance(self.data, DealtData):
            return f"{counted(self.replicas, 'replica')}{batches}, each with one batch of the stream"
        if not self.steps:
            return f"{counted(self.replicas, 'replica')}{batches}"
        first, last = (step_at(self.data, 0, number).samples for number in (0, self.steps - 1))
        shorter = "" if first == last else f"; the last step of an epoch has {last:,}"
        return f"{counted(first, 'sample')}: {counted(self.replicas, 'replica')}{batches}{shorter}"

    def measure_activations(self) -> int | str:
        """Return the size of a batch's activations in bytes, or the reason it is unknown."""
        loader = self.loader
        if not is_dealable(loader) or MapLoader(loader, 0).own_batches:
            return "the loader creates its own batches"
        # repeating one sample gives the shapes of a batch but reads only one file
        batch = loader.collate_fn([loader.dataset[0]] * MapLoader(loader, 0).batch_size)
        recomputed = self.values["activation_checkpointing"] or ()
        try:
            return measure_activations(self.run.task, batch, recomputed, self.run.precision)
        except ConfigError as error:
            return str(error)

    def _describe_memory(self, rank: StateSize | None, activations: int | str, memory: int) -> str:
        """Report whether a rank's state and activations fit on a device."""
        missing = ["the state"] if rank is None else [] if rank.optimizer is not None else ["the optimizer's state"]
        used = rank.total if rank is not None else 0
        if isinstance(activations, str):
            missing.append("activations")
        else:
            used += activations // self.run.parts.layers
        share = used / memory
        # the sum excludes temporary tensors and fragmentation
        verdict = "does not fit" if share > 1 else "fits" if share <= 1 - RESERVED else "may not fit: drivers use some"
        without = f", without {' and '.join(missing)}" if missing else ""
        return f"{format_bytes(used)} of {format_bytes(memory)}{without}: {verdict}"
