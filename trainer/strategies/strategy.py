"""Base class for all strategies, which are the interface between the training loop and the hardware."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...base import torch_private
from ...base.errors import ConfigError, TaskError, first_names
from ...base.place import Place
from ...base.quantities import counted
from ..accelerators import has_streams, make_current
from ..data.sampling import Layout
from ..data.transfer import align_in_place, to_device
from ..optimization.kernels import restore_classes
from ..optimization.outputs import describe_bad_loss
from ..optimization.precision import Precision
from ..processes.ranks import DEFAULT, SINGLE, Ranks, Timeouts
from .buffers import ReplicaBuffers
from .servers import build_remote_modules
from .state_dicts import StateDicts
from .tree import GradientTree, ReplicaTree

if TYPE_CHECKING:
    from ...tasks.task import Task


class Strategy:
    """Places the task's weights on devices and runs steps on them.

    The loop first calls `join`, `build_model`, `place_task` and `prepare`. In each step, it calls `training_step` and
    `backward` for every local batch, then `end_step`, then `optimizer_step` for every optimizer. At the end of the
    run, it calls `finish` and `teardown`. The loop never checks a strategy's type. Every strategy must follow
    five rules, which `legato.testing.check_strategy` tests:

    1. After `prepare`, the weights and buffers (or the shards of weights) on every rank have rank 0's values.
    2. The loop weights each loss by its number of samples. The sum of the weighted losses over all ranks, divided by
       `loss_scale`, is the step's mean loss.
    3. After `end_step`, `parameter.grad` is the gradient of that mean (or this rank's shard of the gradient), and the
       buffers are those of replica 0. This applies to the ranks in `weight_ranks`, which is empty for local SGD.
    4. All ranks call `end_step` and `optimizer_step` the same number of times, but the number of calls to
       `training_step` may differ. A rank without a batch or a loss calls `leave_out`.
    5. A strategy keeps no state between steps other than what `state_dicts` saves. The current step number is
       `task.global_step`.
    """

    name = ""
    """The name of the strategy in a config."""
    micro_batches = 1
    """Number of micro-batches that a training batch is split into for its forward pass."""
    tensor_shards: int | None = None
    """Number of shards per tensor-parallel layer, independent of the number of processes."""
    cuts_batches = False
    """True if training_step receives slices of a replica's batch."""
    needs_every_gradient = False
    """True if a step fails when any trained parameter receives no gradient on some rank."""
    finds_unused = False
    """True if batches may leave parameters unused (find_unused_parameters=true)."""
    takes_one_loss = False
    """True if a batch may have only one loss, even with multiple optimizers, because gradients cannot be separated."""
    queues_work = False
    """True if the device runs asynchronously on streams."""
    gradients_in_parts = False
    """True if each rank has its own shard of the gradients after `end_step`."""

    def __init__(self) -> None:
        self.place = Place()
        self.collectives: Ranks = SINGLE
        """All ranks of the run."""
        self.data_ranks: Ranks = SINGLE
        """The ranks that the replicas are divided among. Together, they process every batch once."""
        self.weight_ranks: Ranks = SINGLE
        """The ranks whose weights must be bitwise identical to this rank's; none by default."""
        self.loss_scale = 1.0
        """The sum of a step's loss weights over all ranks that makes the gradient a mean over samples."""
        self.state_dicts = StateDicts()
        self.elastic = False
        """True if processes may die and be replaced during a fit, under a Membership of `elastic/`."""
        self.meeting = ""
        """Rendezvous address of the processes: "host:port" or a file."""
        self.timeouts = Timeouts(DEFAULT)
        """The limits on how long ranks wait for each other."""
        self.lockstep = False
        """True if all processes must run the same number of batches, padded with masked batches of weight 0."""
        self.shard = 0
        """Index of the weights that this process updates. Processes with the same index update the same weights."""
        self.has_all_weights = True
        """True if this process has every weight, or its shard of every weight."""
        self.allows_inference_mode = True
        """True if evaluations may run in inference mode."""
        self.compiles_blocks = False
        """True if `place_task` compiles the task itself."""
        self.devices: list[torch.device] = []
        self.device = torch.device("cpu")
        self.parts: list[torch.device] = []
        """The devices in this process that the task spans, from its inputs to its loss; empty for a single device."""
        self.to_device: Callable[..., Any] = to_device
        """Moves a batch to a device. During a run, copies to an accelerator overlap with computation."""
        self.precision = Precision("32", "cpu")
        self.task: Task | None = None
        self.recomputed: list[tuple[nn.Module, type[nn.Module]]] = []
        """Blocks under activation checkpointing, with their original classes, until `teardown`."""
        self.buffers = ReplicaBuffers(None)
        self.layout = Layout(1, 1)
        self.one_order = False
        """True if gradients are summed in an order that does not depend on the number of processes."""
        self.by_replica = False
        """True if a step starts every replica from the same buffers and, with `one_order`, separates gradients."""
        self.replica: int | None = None
        """The replica whose batches are being processed; None between steps."""
        self.frozen: list[nn.Parameter] = []
        """Parameters that were not trainable at the last `regroup`, so the strategy is not attached to them."""
        self.tree: ReplicaTree | None = None
        """Sums gradients in a fixed order."""
        self.unit_gradient: Tensor | None = None
        """The gradient of a loss with respect to itself."""
        self.own_backward = self.plain_backward = False
        """Whether the task overrides `backward`; whether torch's backward suffices."""
        self.engine: Callable[..., Any] | None = None
        """The function that torch.autograd.backward calls; None if it cannot be called directly."""

    # --- placement --------------------------------------------------------------------------------------------------
    def local_processes(self, devices: Sequence[torch.device]) -> int:
        """Return the number of processes to start on this machine for the given devices."""
        return 1

    def serve(self, place: Place, task: "Task | None" = None, seed: int = 0) -> bool:
        """Return whether the process with the given rank serves the other processes instead of running the loop.

        If `task` is given, serve the other processes until their run ends.
        """
        return False

    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Join the run's other processes. Raises ConfigError if the strategy does not support the layout."""
        if place.world_size > 1:
            raise ConfigError(
                f"strategy={self.name} runs in one process, but this run has {place.world_size} processes. "
                f"Use strategy=ddp, or set trainer.cluster=off so that each process trains independently."
            )
        refuse_duplicates(devices)
        self.place, self.devices = place, list(devices)
        self._take_device(devices[0])
        self.precision = Precision(precision, self.device.type)

    def _take_device(self, device: torch.device) -> None:
        """Make `device` this process's device."""
        self.device, self.queues_work = device, has_streams(device)
        make_current(device)

    def build_model(self, task: "Task") -> None:
        """Call the task's configure_model before the task is placed."""
        task.configure_model()
        build_remote_modules(task, task.trainer.seed)

    def place_task(self, task: "Task") -> None:
        """Move the task to its device and convert it to the run's precision before the optimizers are created.

        Raises TaskError if a parameter has no values.
        """
        self.task = task
        self._sync_batch_norm(task)
        refuse_empty(task)
        self.precision.place(task)
        task.to(self.device)

    def _sync_batch_norm(self, task: "Task") -> None:
        """If `sync_batchnorm` is set, synchronize batch norm statistics over all replicas in a step.

        Raises ConfigError if the strategy does not support this.
        """
        trainer, replicas = task.trainer, self.layout.replicas
        if not trainer.sync_batchnorm or trainer.stage != "fit" or replicas == 1:
            return
        processes = self.data_ranks.size
        if trainer.reproducible == "bitwise":
            reason, remedy = "reproducible=bitwise uses a different summation order", "Set reproducible=order"
        elif processes != replicas:
            reason = f"this run has {replicas} replicas on {counted(processes, 'process')}"
            remedy = f"Start {replicas} processes under strategy=ddp, or start a new run with replicas={processes}"
        else:
            reason = f"strategy={self.name} does not support this"
            remedy = "Use ddp, zero1 or ddp_model_parallel, without elastic=true"
        raise ConfigError(
            f"sync_batchnorm=true computes statistics over the batches of all replicas at once, so each replica needs "
            f"a process for the whole run; {reason}. {remedy}, or leave sync_batchnorm out."
        )

    def prepare(self, task: "Task", optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Prepare the task for training on `layout` after it has been placed. Return the optimizers to use."""
        from ...tasks.task import Task

        trainer, self.replica = task.trainer, None
        in_order = (trainer.reproducible == "bitwise" or self.elastic) and trainer.stage == "fit"
        self.one_order = one_order = in_order and task.automatic_optimization
        self.own_backward = type(task).backward is not Task.backward
        self.plain_backward = not (self.own_backward or one_order or self.precision.scaler is not None)
        self.engine = torch_private.backward_engine()
        if one_order:
            # the bits of small matrix products depend on memory alignment (F.linear with narrow outputs: at 12 of 15
            # offsets)
            align_in_place([*task.parameters(), *task.buffers()])
        several = len(self.layout.owned(self.data_ranks.rank)) > 1
        self.by_replica = bool(optimizers) and task.automatic_optimization and (several or one_order)
        # a single replica needs no snapshots, which would copy all buffers in each step
        self.buffers = ReplicaBuffers(task if several or self.data_ranks.size > 1 or self.elastic else None)
        self.regroup(self.layout)
        return list(optimizers)

    def regroup(self, layout: Layout | None, place: Place | None = None) -> None:
        """Attach gradient reductions to the trainable parameters.

        All ranks must call this between steps.

        Args:
            layout: the layout of the replicas. If None, only release the process group and roll back an unfinished
                step.
            place: this process's rank and node in the new process group, if there is one.
        """
        # gloo closes its sockets once nothing refers to the group, and buckets hold the group and its works. Hooks on
        # a parameter accumulate, so two trees would both send.
        if self.tree is not None:
            self.tree.close()
        self.tree, self.replica = None, None
        if layout is None:
            self.buffers.rewind()
            return
        self.layout = layout
        if self.task is not None:
            self.frozen = [parameter for parameter in self.task.parameters() if not parameter.requires_grad]
        if place is not None:
            # modified in place, because metrics and agreement use the same object
            self.place = place
            self.collectives.move(place.rank, place.world_size)
        if self.one_order and self.task is not None:
            self.tree = self._make_tree(self.task)

    def _make_tree(self, task: "Task") -> ReplicaTree:
        ranks, hooks = self.data_ranks, task.trainer.current_run.hooks
        tree = GradientTree(task.parameters(), self.layout, ranks.rank, group=ranks.group)
        if not self.own_backward and not hooks["on_after_backward"]:
            tree.send_early()  # no hook reads the gradients of individual replicas
        return tree

    def finish(self) -> None:
        """Restore the task's full weights after a successful run. All ranks must call this before `teardown`."""

    def teardown(self) -> None:
        """Release everything that `prepare` created. The process group stays open, and the task can still be saved."""
        if self.tree is not None:
            self.tree.close()
        self.tree, self.to_device, self.engine = None, to_device, None  # none of these can be pickled
        restore_classes(self.recomputed)
        self.recomputed = []

    # --- the step ---------------------------------------------------------------------------------------------------
    def training_step(self, arguments: Sequence[Any], replica: int | None, last: bool) -> Any:
        """Call the task's training_step.

        Args:
            arguments: the batch and its index, which are the arguments of training_step.
            replica: index of the batch's replica, or None for a masked batch, which has weight 0.
            last: True if this is the last batch of the step on this process.
        """
        assert self.task is not None
        if self.by_replica:
            self._open_replica(replica)
        # not an empty context manager: tests/trainer/test_step_path.py counts the calls in a step
        if self.precision.forward_context is nullcontext:
            return self.task.training_step(*arguments)
        with self.precision.forward_context():
            return self.task.training_step(*arguments)

    def _open_replica(self, replica: int | None) -> None:
        """Start the batches of `replica`, unless it is already the current one."""
        if replica is None or replica == self.replica:
            return
        if self.tree is not None:
            self.tree.begin_replica(replica)
        self.buffers.open_replica(replica - self.layout.owned(self.data_ranks.rank).start)
        self.replica = replica

    def evaluation_step(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call the task's method `name`, such as "validation_step"."""
        with self.precision.forward_context():
            return getattr(self.task, name)(*arguments)

    def backward(
        self, loss: Tensor, last: bool = True, inputs: Sequence[Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        """Accumulate the gradients of `loss`. If `last` is True, reduce them over processes.

        If `inputs` are given, compute only the gradients of these tensors. Raises TaskError if the loss is not a scalar
        or does not require a gradient.
        """
        if loss.requires_grad is False or loss.numel() != 1:
            raise TaskError(describe_bad_loss(loss))
        if self.plain_backward and inputs is None and not retain_graph:
            engine, compiled = self.engine, self.device.type != "cpu" and "torch._dynamo" in sys.modules
            if engine is None or compiled or torch.overrides.has_torch_function_unary(loss):
                # without a gradient argument, because torch would import sympy to compare shapes (0.4 s); and not
                # torch.autograd.backward, which in torch 2.10 skips the overrides of Tensor subclasses
                loss.backward()
                return
            unit = self.unit_gradient  # torch would allocate it in each step, which takes 4 us
            if unit is None or unit.dtype is not loss.dtype or unit.shape != loss.shape or unit.device != loss.device:
                self.unit_gradient = unit = torch.ones_like(loss)
            engine((loss,), (unit,), False, False, (), allow_unreachable=True, accumulate_grad=True)
            return
        inputs = None if inputs is None else [tensor for tensor in inputs if tensor.requires_grad]
        # torch.autograd.backward raises for an empty list, and None would mean all parameters
        if inputs == []:
            return
        if self.precision.scaler is not None:
            loss = self.precision.scale(loss)
        # after retain_graph=True, another backward pass of the same step follows, so nothing may be sent yet
        if last and not retain_graph and self.tree is not None:
            self.tree.expect_last()
        if self.own_backward:
            assert self.task is not None
            options = {"inputs": inputs, "retain_graph": True} if retain_graph else {"inputs": inputs} if inputs else {}
            self.task.backward(loss, **options)
        else:
            loss.backward(inputs=inputs, retain_graph=retain_graph)

    def leave_out(self, last: bool, after_forward: bool) -> None:
        """Take part in a step without a gradient, because the batch is skipped or this process has no batches left."""

    def end_step(self) -> None:
        """Finalize the gradients and buffers after a step's last backward pass. All ranks must call this."""
        if self.tree is not None:
            self.tree.finish()
        if self.buffers.places:
            if self.by_replica and self.replica is None:  # no batch here, but the broadcast below overwrites buffers
                self.buffers.open_replica(0)
            # before the broadcast, whose result this call would overwrite
            self.buffers.close_step()
            if self.data_ranks.size > 1:
                self.align_buffers()
        self.replica = None

    def abandon_step(self) -> None:
        """Drop an unfinished step."""
        if self.tree is not None:
            self.tree.abandon()
        self.buffers.close_step()
        self.replica = None

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average gradients over ranks before an optimizer step in manual optimization.

        Repeated calls have no further effect.
        """

    def optimizer_step(self, optimizer: Optimizer, closure: Any = None, **options: Any) -> Any:
        """Update the weights unless a scaled gradient has overflowed. Return the result of `optimizer.step`."""
        if self.precision.scaler is None:
            return torch_private.step_of(optimizer)(closure, **options)
        self.precision.step(optimizer, **options)
        return None

    def clip(self, optimizer: Optimizer, limit: float, algorithm: str) -> Tensor | None:
        """Clip the gradients of `optimizer`'s parameters by value or norm.

        Return the norm before clipping, or None if `algorithm` is "value".
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if algorithm == "value":
            nn.utils.clip_grad_value_(parameters, limit)
            return None
        return nn.utils.clip_grad_norm_(parameters, limit)

    def align_buffers(self) -> None:
        """Copy replica 0's buffers to all ranks, so that evaluations produce the same results on every rank."""
        if self.task is not None:
            self.collectives.broadcast_tensors(self.task.buffers())


class SingleStrategy(Strategy):
    """One process on one device, which runs all replicas in turn."""

    name = "single"


def refuse_duplicates(devices: Sequence[torch.device]) -> None:
    """Raise ConfigError if a process would use the same device twice."""
    if devices[0].type != "cpu" and len(set(devices)) < len(devices):
        raise ConfigError(
            f"trainer.devices lists {first_names([*map(str, devices)])} for one process, which needs distinct devices. "
            f"To share a device, use several processes (strategy=ddp)."
        )


def refuse_empty(task: "Task") -> None:
    """Raise TaskError if a parameter of the task has no values."""
    for name, parameter in task.named_parameters():
        if parameter.is_meta:
            raise TaskError(
                f"Parameter {name} of {type(task).__name__} has no values: it is on the meta device, either because of "
                f"torch.device('meta') or because of a run with whole_at_end=false. Create a new task and load a "
                f"checkpoint, or build the module in configure_model and use strategy=fsdp with meta_init=true."
            )


def trainable(task: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that require a gradient."""
    return (parameter for parameter in task.parameters() if parameter.requires_grad)
