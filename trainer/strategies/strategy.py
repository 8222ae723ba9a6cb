"""Strategy: the contract between the training loop and the hardware."""

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
    """Where the task's weights are, and how a step runs on them.

    The loop calls, in this order: `join`, `build_model`, `place_task`, `prepare`; then for each step `training_step`
    and `backward` for every local batch, `end_step`, and `optimizer_step` for every optimizer; `finish` and `teardown`
    at the end. It never asks for a strategy's type. Five rules hold, which `legato.testing.check_strategy` tries:

    1. After `prepare`, all ranks that hold a weight or buffer hold the same values, those of rank 0.
    2. The loop weights losses by samples: their sum over ranks, divided by `loss_scale`, is the mean of the step.
    3. After `end_step`, `parameter.grad` is the gradient of that mean (all of it, or this rank's part), and buffers
       are those of replica 0. `weight_ranks` are the ranks for which that holds; local SGD has none.
    4. All ranks call `end_step` and `optimizer_step` equally often, `training_step` not: a rank whose batch has no
       loss, or that has none in a step, calls `leave_out`.
    5. A strategy keeps no state between steps but what `state_dicts` saves; `task.global_step` counts steps.
    """

    name = ""
    """The word for it in a config."""
    micro_batches = 1
    """The number of pieces that a training batch is cut into for its forward."""
    tensor_shards: int | None = None
    """The number of parts that layers are cut into, whatever the number of processes."""
    cuts_batches = False
    """Whether a training step is called with a part of a replica's batch."""
    needs_every_gradient = False
    """Whether a step fails where a trained parameter gets no gradient on some rank."""
    finds_unused = False
    """Whether the config says that batches may leave parameters out (find_unused_parameters=true)."""
    takes_one_loss = False
    """Whether a batch has one loss, also for several optimizers, whose parameters cannot be told apart."""
    queues_work = False
    """Whether the device does its work behind the program, on streams."""
    gradients_in_parts = False
    """Whether ranks have different gradients after `end_step`, each its part."""

    def __init__(self) -> None:
        self.place = Place()
        self.collectives: Ranks = SINGLE
        """All ranks of the run."""
        self.data_ranks: Ranks = SINGLE
        """The ranks that share out the replicas: together they have every batch once."""
        self.weight_ranks: Ranks = SINGLE
        """The ranks that must hold the same weights as this one, bit for bit; none by default."""
        self.loss_scale = 1.0
        """Sum of a step's loss weights over all ranks that makes the gradient a mean over samples."""
        self.state_dicts = StateDicts()
        self.elastic = False
        """Whether processes may die and be replaced while a fit goes on, which a Membership of `elastic/` is for."""
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
        self.parts: list[torch.device] = []
        """The devices over which a task spreads within this process, from its inputs to its loss; empty: one."""
        self.to_device: Callable[..., Any] = to_device
        """Moves a batch to a device; during a run it copies to an accelerator while that computes."""
        self.precision = Precision("32", "cpu")
        self.task: Task | None = None
        self.recomputed: list[tuple[nn.Module, type[nn.Module]]] = []
        """The task's blocks that compute their forward again in backward, with their own class, until `teardown`."""
        self.buffers = ReplicaBuffers(None)
        self.layout = Layout(1, 1)
        self.one_order = False
        """Whether gradients are added up in an order that does not depend on the number of processes."""
        self.by_replica = False
        """Whether each replica begins with the step's buffers and, in one order, has a gradient of its own."""
        self.replica: int | None = None
        """The replica whose batches are under way; None between two steps."""
        self.frozen: list[nn.Parameter] = []
        """The parameters of the task to which it is not attached: they were not trained."""
        self.tree: ReplicaTree | None = None
        """What adds gradients up in one order."""
        self.one: Tensor | None = None
        """The gradient of a loss with respect to itself."""
        self.own_backward = self.plain_backward = False
        """Whether the task brings a `backward` of its own; whether there is nothing but torch's to do."""
        self.engine: Callable[..., Any] | None = None
        """The function behind torch.autograd.backward, where this torch has it as expected."""

    # --- placement --------------------------------------------------------------------------------------------------
    def local_processes(self, devices: Sequence[torch.device]) -> int:
        """Return how many processes this machine runs for these devices, before any is started."""
        return 1

    def serve(self, place: Place, task: "Task | None" = None, seed: int = 0) -> bool:
        """Return whether the process at this place takes no part in the loop but serves others.

        With a task: serve them, until their run is over.
        """
        return False

    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Join the other processes of the run; raises ConfigError where that cannot be."""
        if place.world_size > 1:
            raise ConfigError(
                f"strategy {self.name!r} runs in one process, but this is one of {place.world_size}; use strategy ddp, "
                f"or set trainer.cluster=off so that each process runs by itself."
            )
        refuse_twice(devices)
        self.place, self.devices = place, list(devices)
        self._take_device(devices[0])
        self.precision = Precision(precision, self.device.type)

    def _take_device(self, device: torch.device) -> None:
        """Make a device that of this process."""
        self.device, self.queues_work = device, has_streams(device)
        make_current(device)

    def build_model(self, task: "Task") -> None:
        """Let the task build the modules that it has left for now, before it is placed."""
        task.configure_model()
        build_remote_modules(task, task.trainer.seed)

    def place_task(self, task: "Task") -> None:
        """Move the task to its device and precision, before its optimizers are made.

        Raises TaskError where it has parameters without values.
        """
        self.task = task
        self._sync_batch_norm(task)
        refuse_empty(task)
        self.precision.place(task)
        task.to(self.device)

    def _sync_batch_norm(self, task: "Task") -> None:
        """Have batch norm take statistics over all replicas of a step. Raises ConfigError where it cannot."""
        trainer, replicas = task.trainer, self.layout.replicas
        if not trainer.sync_batchnorm or trainer.stage != "fit" or replicas == 1:
            return
        processes = self.data_ranks.size
        if trainer.reproducible == "bitwise":
            here, remedy = "reproducible: bitwise, whose sums have another order", "Set reproducible: order"
        elif processes != replicas:
            here = f"{replicas} replicas on {processes}"
            remedy = f"Start {replicas} processes under strategy ddp, or begin a new run with replicas={processes}"
        else:
            here, remedy = f"strategy {self.name!r}", "Take strategy ddp, zero1 or ddp_model_parallel, without elastic"
        raise ConfigError(
            f"sync_batchnorm=true takes statistics over the batches of all replicas at once, each on a process of its "
            f"own, which stays; here is {here}. {remedy}, or leave sync_batchnorm out."
        )

    def prepare(self, task: "Task", optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Prepare the placed task for training on the layout of replicas; return the optimizers to use."""
        from ...tasks.task import Task

        trainer, self.replica = task.trainer, None
        in_order = (trainer.reproducible == "bitwise" or self.elastic) and trainer.stage == "fit"
        self.one_order = one_order = in_order and task.automatic_optimization
        self.own_backward = type(task).backward is not Task.backward
        self.plain_backward = not (self.own_backward or one_order or self.precision.scaler is not None)
        self.engine = torch_private.backward_engine()
        if one_order:
            # small matrix kernels give other bits at another memory alignment (F.linear with narrow outputs in 12 of 15
            # offsets)
            align_in_place([*task.parameters(), *task.buffers()])
        several = len(self.layout.owned(self.data_ranks.rank)) > 1
        self.by_replica = bool(optimizers) and task.automatic_optimization and (several or one_order)
        # one replica that nobody shares needs no snapshots of its buffers: a copy of all buffers in each step saved
        self.buffers = ReplicaBuffers(task if several or self.data_ranks.size > 1 or self.elastic else None)
        self.regroup(self.layout)
        return list(optimizers)

    def regroup(self, layout: Layout | None, place: Place | None = None) -> None:
        """Attach to the parameters that are trained now, on this layout; every rank calls it, between two steps.

        With a `place`, in a new process group. Without a layout only let go of the group, perhaps in the middle of a
        step, which then counts as not begun.
        """
        # gloo closes its sockets only when the last reference to the group goes, and buckets hold the group and its
        # works. Hooks on a parameter are called in the order of registration, so of two trees both would send.
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
            # the object stays and moves: metrics and agreement hold it, too
            self.place = place
            self.collectives.move(place.rank, place.world_size)
        if self.one_order and self.task is not None:
            self.tree = self._make_tree(self.task)

    def _make_tree(self, task: "Task") -> ReplicaTree:
        ranks, hooks = self.data_ranks, task.trainer.current_run.hooks
        tree = GradientTree(task.parameters(), self.layout, ranks.rank, group=ranks.group)
        if not self.own_backward and not hooks["on_after_backward"]:
            tree.send_early()  # no hook looks at the gradients of a single replica
        return tree

    def finish(self) -> None:
        """Give the task all its weights after a run without an error; every rank calls it, before `teardown`."""

    def teardown(self) -> None:
        """Release what `prepare` made; the process group stays, and the task may still be saved."""
        if self.tree is not None:
            self.tree.close()
        self.tree, self.to_device, self.engine = None, to_device, None  # which do not pickle
        restore_classes(self.recomputed)
        self.recomputed = []

    # --- the step ---------------------------------------------------------------------------------------------------
    def training_step(self, arguments: Sequence[Any], replica: int | None, last: bool) -> Any:
        """Call the task's training_step.

        Args:
            arguments: what it takes: the batch and its index.
            replica: whose batch it is; None for a masked batch, which counts for nothing.
            last: no further batch of this process is in the step.
        """
        assert self.task is not None
        if self.by_replica:
            self._open_replica(replica)
        # not an empty context: entering and leaving one is calls in each step (tests/trainer/test_step_path.py counts
        # them)
        if self.precision.forward_context is nullcontext:
            return self.task.training_step(*arguments)
        with self.precision.forward_context():
            return self.task.training_step(*arguments)

    def _open_replica(self, replica: int | None) -> None:
        """Begin with the batches of a replica, where it is another one than before."""
        if replica is None or replica == self.replica:
            return
        if self.tree is not None:
            self.tree.begin_replica(replica)
        self.buffers.open_replica(replica - self.layout.owned(self.data_ranks.rank).start)
        self.replica = replica

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
        if last and not retain_graph and self.tree is not None:
            self.tree.expect_last()
        if self.own_backward:
            assert self.task is not None
            options = {"inputs": inputs, "retain_graph": True} if retain_graph else {"inputs": inputs} if inputs else {}
            self.task.backward(loss, **options)
        else:
            loss.backward(inputs=inputs, retain_graph=retain_graph)

    def leave_out(self, last: bool, after_forward: bool) -> None:
        """Take part in a step without a gradient: for a batch that was skipped, or when this process has none left."""

    def end_step(self) -> None:
        """Complete the gradients and buffers of a step after its last backward; every rank calls it."""
        if self.tree is not None:
            self.tree.finish()
        if self.buffers.places:
            if self.by_replica and self.replica is None:  # without a batch: others' buffers arrive all the same
                self.buffers.open_replica(0)
            # first this process's own first replica, then that of rank 0: the other way round the broadcast would be
            # overwritten
            self.buffers.close_step()
            if self.data_ranks.size > 1:
                self.align_buffers()
        self.replica = None

    def abandon_step(self) -> None:
        """End a step before its last batch; it counts for nothing."""
        if self.tree is not None:
            self.tree.abandon()
        self.buffers.close_step()
        self.replica = None

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average gradients over ranks under manual optimization, just before their use. Twice does no harm."""

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


class SingleStrategy(Strategy):
    """One process, one device; with several replicas, one after the other on it."""

    name = "single"


def refuse_twice(devices: Sequence[torch.device]) -> None:
    """Raise ConfigError where one process is to drive the same device twice."""
    if devices[0].type != "cpu" and len(set(devices)) < len(devices):
        raise ConfigError(
            f"trainer.devices names {first_names([*map(str, devices)])} for one process: several processes can share a "
            f"device (strategy ddp), but one process needs different devices."
        )


def refuse_empty(task: "Task") -> None:
    """Raise TaskError for a task that has parameters without values."""
    for name, parameter in task.named_parameters():
        if parameter.is_meta:
            raise TaskError(
                f"{type(task).__name__} has no values in {name}: it is on the device meta, where torch.device('meta') "
                f"makes modules, and whole_at_end=false leaves a task. Take a new one, whose weights are in a "
                f"checkpoint; or make the module in configure_model, with strategy fsdp and meta_init=true."
            )


def trainable(task: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that require a gradient."""
    return (parameter for parameter in task.parameters() if parameter.requires_grad)
