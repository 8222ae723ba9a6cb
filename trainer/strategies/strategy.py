"""Strategy: the contract between the training loop and the hardware."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...base import torch_private
from ...base.errors import ConfigError, TaskError
from ..accelerators import has_streams, make_current
from ..data.sampling import Layout
from ..data.transfer import CopyStream, align_in_place
from ..elastic.membership import Elasticity
from ..optimization.kernels import Recomputing
from ..optimization.outputs import describe_bad_loss
from ..optimization.precision import Precision, nothing
from ..processes.place import Place
from ..processes.ranks import DEFAULT, SINGLE, Ranks, Timeouts
from .bitwise.buffers import ReplicaBuffers
from .reducers import Reducer, TreeReducer
from .servers import Servers, build_remote_modules
from .state_dicts import StateDicts

if TYPE_CHECKING:
    from ...tasks.task import Task


class StateParts(NamedTuple):
    """How the processes of a run share its batches and its state, as far as their number tells."""

    batches: int
    """Number of processes, or groups of them, that have batches of their own."""
    weights: int | None = 1
    """Number of equal parts of the weights and of the gradients; None if the task decides."""
    optimizer: int = 1
    """Number of equal parts of the optimizer's state."""
    layers: int = 1
    """Number of processes that a batch's layers, and with them its activations, are spread over."""


class Strategy:
    """Placement of replicas on devices and processes: puts the task there, and runs a step on it.

    The loop calls, in this order: `join`, `build_model`, `place_task`, `setup`; then for each step `training_step` and
    `backward` for every local batch and `optimizer_step` for every optimizer; `finish` and `teardown` at the end. The
    trainer never asks for a strategy's type. A strategy chooses the objects beside it: `collectives`, `reducer` (how
    gradients meet), `state_dicts` (what a checkpoint holds), `servers` and `elastic`.
    """

    name = ""
    """The word for it in a config."""
    micro_batches = 1
    """The number of pieces that a training batch is cut into for its forward."""
    cuts_batches = False
    """Whether a training step is called with a part of a replica's batch."""

    needs_every_gradient = False
    """Whether a step fails where a trained parameter gets no gradient on some rank."""
    finds_unused = False
    """Whether the config says that batches may leave parameters out (find_unused_parameters=true)."""
    leaves_default_group = False
    """Whether the default process group has no collectives but the script's."""

    def __init__(self) -> None:
        self.place = Place()
        self.collectives: Ranks = SINGLE
        """All ranks of the run."""
        self.data_ranks: Ranks = SINGLE
        """The ranks that share out the replicas: together they have every batch once."""
        self.weight_ranks: Ranks = SINGLE
        """The ranks that must hold the same weights as this one, bit for bit; none by default."""
        self.reducer = Reducer()
        self.state_dicts = StateDicts()
        self.servers = Servers()
        self.elastic = Elasticity()
        self.meeting = ""
        """Address at which the processes met, as "host:port" or a file."""
        self.timeouts = Timeouts(DEFAULT)
        """Times that ranks wait for each other."""
        self.lockstep = False
        """Whether all processes must run equally many batches, those with fewer some that do not count."""
        self.shard = 0
        """Index of the weights that this process updates; processes with the same index update the same weights."""
        self.has_all_weights = True
        """Whether this process has all weights, or its part of each."""
        self.allows_inference_mode = True
        """Whether evaluations may run in inference mode."""
        self.compiles_blocks = False
        """Whether `place_task` compiles the task, and nothing is left for later."""
        self.devices: list[torch.device] = []
        self.device = torch.device("cpu")
        self.copies: CopyStream | None = None
        """Copies batches to a CUDA device while it computes, during a run."""
        self.precision = Precision("32", "cpu")
        self.task: Task | None = None
        self.recomputing: Recomputing | None = None
        """The task's blocks that compute their forward again in backward, until `teardown`."""
        self.buffers = ReplicaBuffers(None)
        self.layout = Layout(1, 1)
        self.one_order = False
        """Whether gradients are added up in an order that does not depend on the number of processes."""
        self.one: Tensor | None = None
        """The gradient of a loss with respect to itself."""
        self.own_backward = self.plain_backward = False
        """Whether the task brings a `backward` of its own; whether there is nothing but torch's to do."""
        self.engine: Callable[..., Any] | None = None
        """The function behind torch.autograd.backward, where this torch has it as expected."""

    # --- placement --------------------------------------------------------------------------------------------------
    def local_processes(self, devices: Sequence[torch.device]) -> int:
        """Return how many processes this machine runs for these devices."""
        return 1

    def state_parts(self, world_size: int) -> StateParts:
        """Return how so many processes share a run, before any is started."""
        return StateParts(world_size)

    @property
    def task_devices(self) -> list[torch.device]:
        """The devices of this process over which the task may spread, from its inputs to its loss."""
        return [self.device]

    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Join the other processes of the run; raises ConfigError where that cannot be."""
        if place.world_size > 1:
            raise ConfigError(
                f"strategy {self.name!r} runs in one process, but this is one of {place.world_size}; use strategy ddp, "
                f"or set trainer.cluster=off so that each process runs by itself."
            )
        self.place, self.devices, self.device = place, list(devices), devices[0]
        make_current(self.device)
        self.precision = Precision(precision, self.device.type)

    def build_model(self, task: "Task") -> None:
        """Let the task build the modules that it has left for now, before it is placed."""
        task.configure_model()
        build_remote_modules(task, task.trainer.seed)

    def sync_batch_norm(self, task: "Task", replicas: int) -> Callable[[], None]:
        """Compute the statistics of batch norm over all replicas of a step; return what undoes it.

        Raises ConfigError where the strategy cannot.
        """
        if replicas == 1:
            return lambda: None
        if replicas > self.data_ranks.size:
            raise ConfigError(
                f"sync_batchnorm=true takes statistics over all {replicas} replicas of a step at once, but they take "
                f"turns on {self.data_ranks.size} processes. Start {replicas} processes (strategy ddp), or set "
                f"replicas to their number."
            )
        raise ConfigError(f"sync_batchnorm=true works under strategy ddp, not under {self.name!r}. Leave it out.")

    def place_task(self, task: "Task") -> None:
        """Move the task to its device and precision, before its optimizers are made.

        Raises TaskError where it has parameters without values.
        """
        self.task = task
        empty = next((name for name, parameter in task.named_parameters() if parameter.is_meta), None)
        if empty is not None:
            raise TaskError(
                f"{type(task).__name__} has no values in {empty}: it is on the device meta. Make its module outside of "
                f"torch.device('meta'), or in configure_model and with strategy fsdp and its meta_init=true."
            )
        self.precision.place(task)
        task.to(self.device)

    def copy_stream(self) -> CopyStream | None:
        """Return what copies batches to the device while that computes; None where it has no streams."""
        return CopyStream(self.device) if has_streams(self.device) else None

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer to use instead of one of the placed task's."""
        return optimizer

    def setup(self, task: "Task", optimizers: Sequence[Optimizer], layout: Layout, one_order: bool = False) -> None:
        """Prepare the placed task for training on this layout of replicas.

        `one_order`: add gradients up in an order that does not depend on the number of processes.
        """
        from ...tasks.task import Task

        self.layout, self.one_order = layout, one_order
        self.own_backward = type(task).backward is not Task.backward
        self.plain_backward = not (self.own_backward or one_order or self.precision.scaler is not None)
        self.engine = torch_private.backward_engine()
        if one_order:
            # small matrix kernels give other bits at another memory alignment (F.linear with narrow outputs in 12 of 15
            # offsets)
            align_in_place([*task.parameters(), *task.buffers()])
        local_replicas = len(layout.owned(self.data_ranks.rank))
        # one replica that nobody shares needs no snapshots of its buffers: a copy of all buffers in each step saved
        several = local_replicas > 1 or self.data_ranks.size > 1 or self.elastic.changes
        self.buffers = ReplicaBuffers(task if several else None)
        self.make_reducer()

    def make_reducer(self) -> None:
        """Make the reducer for the parameters that are trained now; every rank calls it, between two steps."""
        assert self.task is not None
        # First the old one goes: hooks on a parameter are called in the order of registration, so two trees would both
        # send, and DDP takes its hooks off only when its C++ reducer is destroyed.
        self.reducer.close()
        self.reducer = Reducer()
        self.reducer = self._reducer_for(self.task)

    def _reducer_for(self, task: "Task") -> Reducer:
        if not self.one_order:
            return Reducer(task.parameters())
        send_early = not self.own_backward and not task.trainer.current_run.hooks["on_after_backward"]
        return TreeReducer(task.parameters(), self.layout, self.data_ranks.rank, send_early, self.collectives.group)

    def finish(self) -> None:
        """Give the task all its weights after a run without an error; every rank calls it, before `teardown`."""

    def teardown(self) -> None:
        """Release what `setup` made; the process group stays, and the task may still be saved."""
        self.reducer.close()
        self.reducer, self.copies, self.engine = Reducer(), None, None  # which does not pickle
        if self.recomputing is not None:
            self.recomputing.undo()
        self.recomputing = None

    # --- the step ---------------------------------------------------------------------------------------------------
    def training_step(self, arguments: Sequence[Any], last: bool) -> Any:
        """Call the task's training_step; `last` says that no further batch of this process is in the step."""
        assert self.task is not None
        # not an empty context: entering and leaving one is calls in each step (tests/trainer/test_step_path.py counts
        # them)
        if self.precision.forward_context is nothing:
            return self.task.training_step(*arguments)
        with self.precision.forward_context():
            return self.task.training_step(*arguments)

    def repeat_step(self, arguments: Sequence[Any]) -> Any:
        """Re-run training_step on the whole task for diagnostics; gradients and logs are discarded."""
        return Strategy.evaluation_step(self, "training_step", arguments)

    def evaluation_step(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call the step `name` of the task."""
        with self.precision.forward_context():
            return getattr(self.task, name)(*arguments)

    def backward(
        self, loss: Tensor, last: bool = True, inputs: Sequence[Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        """Add the gradient of `loss`, for `inputs` only where given; with `last`, the gradients of all processes meet.

        Raises TaskError if the loss is no scalar or has no gradient.
        """
        if loss.requires_grad is False or loss.numel() != 1:
            raise TaskError(describe_bad_loss(loss))
        if self.plain_backward and inputs is None and not retain_graph:
            engine, compiled = self.engine, self.device.type != "cpu" and "torch._dynamo" in sys.modules
            if engine is None or compiled or torch.overrides.has_torch_function_unary(loss):
                # with no gradient for the loss: given one, torch imports sympy to compare its shape, for 0.4 s; and not
                # by torch.autograd.backward, which in torch 2.10 passes by what a subclass of Tensor overrides
                loss.backward()
                return
            one = self.one  # which torch would allocate in each step, for 4 us
            if one is None or one.dtype is not loss.dtype or one.shape != loss.shape or one.device != loss.device:
                self.one = one = torch.ones_like(loss)
            engine((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)
            return
        inputs = None if inputs is None else [tensor for tensor in inputs if tensor.requires_grad]
        # torch.autograd.backward raises for an empty list, and None would mean all parameters
        if inputs == []:
            return
        if self.precision.scaler is not None:
            loss = self.precision.scale(loss)
        # with retain_graph another backward of the same step follows, so nothing may be sent yet
        if last and not retain_graph:
            self.reducer.expect_last()
        if self.own_backward:
            assert self.task is not None
            options = {"inputs": inputs, "retain_graph": True} if retain_graph else {"inputs": inputs} if inputs else {}
            self.task.backward(loss, **options)
        else:
            loss.backward(inputs=inputs, retain_graph=retain_graph)

    def leave_out(self, last: bool, after_forward: bool) -> None:
        """Take part in a step without a gradient: for a batch that was skipped, or when this process has none left."""

    def abandon_step(self) -> None:
        """End a step before its last batch; it counts for nothing."""
        self.reducer.abandon()
        self.buffers.close_step()

    def open_replica(self, replica: int) -> None:
        """Begin with the batches of `replica` in this step."""
        self.reducer.begin_replica(replica)
        self.buffers.open_replica(replica - self.layout.owned(self.data_ranks.rank).start)

    def finish_backward(self) -> None:
        """Complete gradients and buffers after all local batches of a step that opened replicas."""
        aligns_buffers = self.reducer.finish()
        # first this process's own first replica, then that of rank 0: the other way round the broadcast would be
        # overwritten
        self.buffers.close_step()
        if aligns_buffers:
            self.buffers.await_others()
            self.align_buffers()

    def optimizer_step(self, optimizer: Optimizer, closure: Any = None, **options: Any) -> Any:
        """Update the weights from the gradients, but where a scaled gradient overflowed; return what `step` returns."""
        if self.precision.scaler is None:
            return torch_private.step_of(optimizer)(closure, **options)
        self.precision.step(optimizer, **options)
        return None

    def clip(self, optimizer: Optimizer, limit: float, algorithm: str) -> Tensor | None:
        """Clip the gradients of `optimizer`'s parameters; return their norm before, where that is what is clipped."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if algorithm == "value":
            nn.utils.clip_grad_value_(parameters, limit)
            return None
        return nn.utils.clip_grad_norm_(parameters, limit)

    def align_buffers(self) -> None:
        """Give every rank the buffers of replica 0, so that evaluation is the same everywhere."""
        if self.task is not None:
            self.collectives.broadcast_tensors(self.task.buffers())


def trainable(task: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that require a gradient."""
    return (parameter for parameter in task.parameters() if parameter.requires_grad)
