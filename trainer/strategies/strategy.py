"""Strategy: the contract between the loop and the hardware."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import torch_private
from ..data.sampling import Layout
from ..data.transfer import align_in_place, to_device
from ..elastic.store import ElasticOptions
from ..errors import ConfigError, TaskError
from ..optimization import kernels
from ..optimization.kernels import Recomputing
from ..optimization.nonfinite import are_finite
from ..optimization.outputs import describe_bad_loss
from ..optimization.precision import Precision, nothing
from ..processes.collectives import SINGLE, Collectives
from ..processes.environment import Place
from ..processes.sync import DEFAULT, Timeouts
from .bitwise.buffers import ReplicaBuffers
from .bitwise.tree import GradientTree
from .ddp_rpc.remote_modules import build_here

if TYPE_CHECKING:
    from ...tasks.task import Task


class Strategy:
    """How replicas map to devices and processes, and how their gradients meet.

    The loop calls, in this order: `join`, `place_task`, `setup`; then for each step `training_step` and `backward` for
    every local turn and `optimizer_step` for every optimizer; `teardown` at the end. A strategy answers by methods;
    nobody asks its type.
    """

    name = ""
    """The word for it in a config."""
    reads_in_parts: tuple[str, ...] = ()
    """The keys of a checkpoint under which it takes tensors in parts as they are stored, and reads what it needs."""
    micro_batches = 1
    """Into how many pieces a training batch is cut for its forward."""

    cuts_batches = False
    """Whether a training step is called with a part of a replica's batch."""

    def __init__(self) -> None:
        self.place = Place()
        self.collectives: Collectives = SINGLE
        """All ranks of the run."""
        self.data_ranks: Collectives = SINGLE
        """The ranks that share out the replicas: together they have every batch once."""
        self.meeting = ""
        """Where the processes met, as "host:port" or a file."""
        self.timeouts = Timeouts(DEFAULT)
        """How long ranks wait for each other."""
        self.devices: list[torch.device] = []
        self.device = torch.device("cpu")
        self.precision = Precision("32", "cpu")
        self.task: Task | None = None
        self.buffers = ReplicaBuffers(None)
        self.layout = Layout(1, 1)
        self.tree: GradientTree | None = None
        self.parameters: list[nn.Parameter] = []
        self.trains: list[bool] = []
        """Which of the parameters required a gradient when `prepare` was called."""
        self.has_frozen = False
        self.bitwise = False
        self.replica: int | None = None
        self.one: Tensor | None = None
        """The gradient of a loss with respect to itself."""
        self.own_backward = self.plain_backward = False
        """Whether the task brings a `backward` of its own; whether there is nothing but torch's to do."""
        self.recomputing: Recomputing | None = None
        self.elastic: ElasticOptions | None = None
        """How processes may leave and come while the run trains; None: not at all."""

    # --- processes --------------------------------------------------------------------------------------------------
    def local_processes(self, devices: Sequence[torch.device]) -> int:
        """Return how many processes this machine runs for these devices."""
        return 1

    @property
    def lockstep(self) -> bool:
        """Whether all processes must take equally many turns, those with fewer batches some that do not count."""
        return False

    @property
    def task_devices(self) -> list[torch.device]:
        """The devices of this process over which the task may spread, from its inputs to its loss."""
        return [self.device]

    @property
    def has_all_weights(self) -> bool:
        """Whether this process has all weights, or its part of each."""
        return True

    def serves(self, place: Place) -> bool:
        """Return whether the process at this place only serves the others, and takes no part in the loop."""
        return False

    def serve(self, place: Place, task: "Task", seed: int) -> None:
        """Serve the others until their run is over."""

    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Take this process's place among the processes of the run; raises ConfigError where it cannot."""
        if place.world_size > 1:
            raise ConfigError(
                f"strategy {self.name!r} runs in one process, but this is one of {place.world_size}; use strategy ddp, "
                f"or set trainer.cluster=off so that each process runs by itself."
            )
        self.place, self.devices, self.device = place, list(devices), devices[0]
        self.precision = Precision(precision, self.device.type)

    # --- the task ---------------------------------------------------------------------------------------------------
    def build_model(self, task: "Task") -> None:
        """Let the task build what it has left for now, before it is placed."""
        task.configure_model()

    def build_remote_modules(self, task: "Task", seed: int) -> None:
        """Give the task the modules that it marks as remote: here, where no strategy has a better place."""
        build_here(task, seed)

    def recompute(self, task: "Task", blocks: str | Sequence[str]) -> None:
        """Let blocks of these classes compute their forward again in backward; called before the task is placed."""
        self.recomputing = Recomputing(task, blocks)

    def sync_batch_norm(self, task: "Task", replicas: int) -> Callable[[], None]:
        """Let batch norm have its statistics over all replicas of a step; return what undoes it.

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
        """Move the task to its device and precision, before its optimizers are made."""
        self.task = task
        self.precision.place(task)
        task.to(self.device)

    def set_layout(self, layout: Layout, bitwise: bool) -> None:
        """Know which replicas run where, and whether their gradients must meet in an order that does not show it."""
        self.layout, self.bitwise = layout, bitwise

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return what stands in the place of an optimizer of the placed task's."""
        return optimizer

    def setup(self, task: "Task", optimizers: Sequence[Optimizer], local_replicas: int) -> None:
        """Make the placed task ready to be trained by `local_replicas` replicas in this process."""
        from ...tasks.task import Task

        self.own_backward = type(task).backward is not Task.backward
        self.plain_backward = not (self.own_backward or self.bitwise or self.precision.scaler is not None)
        if self.bitwise:
            align_in_place([*task.parameters(), *task.buffers()])
        several = local_replicas > 1 or self.data_ranks.size > 1 or self.elastic is not None
        self.buffers = ReplicaBuffers(task if several else None)
        self.prepare(task)

    def compile(self, task: "Task", options: bool | Mapping[str, Any]) -> None:
        """Compile the task's modules, as the argument `compile` says."""
        kernels.compile_in_place(task, options)

    def prepare(self, task: "Task") -> None:
        """Make ready for the gradients of the parameters that are trained now."""
        self.parameters = list(task.parameters())
        self.trains = [parameter.requires_grad for parameter in self.parameters]
        self.has_frozen = not all(self.trains)
        if self.bitwise:
            self.build_reduction_tree(task)

    def refresh_trainable(self) -> None:
        """Make ready anew where other parameters are trained by now; every rank calls it, between two steps."""
        if self.task is not None and [parameter.requires_grad for parameter in self.parameters] != self.trains:
            self.prepare(self.task)

    def forget_early_gradients(self) -> None:
        """Drop gradients of parameters that were frozen when the step began: they are trained from the next one on."""
        for parameter, trains in zip(self.parameters, self.trains, strict=True):
            if not trains:
                parameter.grad = None

    def build_reduction_tree(self, task: "Task") -> None:
        """Let gradients meet in the one order that does not depend on the number of processes."""
        if self.tree is not None:
            self.tree.close()
        self.tree = GradientTree(task.parameters(), self.layout, self.data_ranks.rank)
        if not self.own_backward and not task.trainer.current_run.hooks["on_after_backward"]:
            self.tree.send_early()  # nobody looks at the gradients of a single replica

    def finish(self) -> None:
        """The run has ended well: leave the task whole behind; every rank calls it, before `teardown`."""

    def teardown(self) -> None:
        """Let go of what `setup` made; the process group stays, and the task may still be saved."""
        if self.tree is not None:
            self.tree.close()
        self.tree = None
        if self.recomputing is not None:
            self.recomputing.undo()
        self.recomputing = None

    # --- the step ---------------------------------------------------------------------------------------------------
    def to_device(self, batch: Any) -> Any:
        """Return the batch on this process's device, in the precision of the weights."""
        return self.precision.convert_batch(to_device(batch, self.device))

    def training_step(self, arguments: Sequence[Any], last: bool) -> Any:
        """Call the task's training_step; `last` says that no further turn of this process is in the step."""
        assert self.task is not None
        if self.precision.forward_context is nothing:
            return self.task.training_step(*arguments)
        with self.precision.forward_context():
            return self.task.training_step(*arguments)

    def repeat_step(self, arguments: Sequence[Any]) -> Any:
        """Call the task's training_step once more, where nothing comes of it but what is seen on the way."""
        return Strategy.evaluation_step(self, "training_step", arguments)

    def no_gradients(self, inference_mode: bool) -> AbstractContextManager[Any]:
        """Return what an evaluation runs under."""
        return torch.inference_mode() if inference_mode else torch.no_grad()

    def evaluation_step(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call the step `name` of the task."""
        with self.precision.forward_context():
            return getattr(self.task, name)(*arguments)

    @property
    def gradient_scale(self) -> float:
        """What a step's loss weights add up to in one process, so that gradients meet as a mean over samples."""
        return 1.0

    def backward(
        self, loss: Tensor, last: bool = True, inputs: Sequence[Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        """Add the gradient of `loss`, for `inputs` only where given; with `last`, the gradients of all processes meet.

        Raises TaskError where the loss is no scalar or hangs on no parameter.
        """
        if loss.requires_grad is False or loss.numel() != 1:
            raise TaskError(describe_bad_loss(loss))
        if self.plain_backward and inputs is None and not retain_graph:
            one = self.one  # which torch would make anew in each step, for 4 us
            if one is None or one.dtype is not loss.dtype or one.shape != loss.shape or one.device != loss.device:
                self.one = one = torch.ones_like(loss)
            torch.autograd.backward((loss,), (one,))
            return
        inputs = None if inputs is None else [tensor for tensor in inputs if tensor.requires_grad]
        if inputs == []:
            return
        if self.precision.scaler is not None:
            loss = self.precision.scale(loss)
        if self.tree is not None and last and not retain_graph and self.replica is not None:
            self.tree.expect_last(self.replica)
        if self.own_backward:
            assert self.task is not None
            options = {"inputs": inputs, "retain_graph": True} if retain_graph else {"inputs": inputs} if inputs else {}
            self.task.backward(loss, **options)
        else:
            loss.backward(inputs=inputs, retain_graph=retain_graph)

    def leave_out(self, last: bool, after_forward: bool) -> None:
        """Take part in a step without a gradient: a batch that was skipped, or none left for this process."""

    def abandon_step(self) -> None:
        """The step that had begun ends before its last turn, and counts for nothing."""
        if self.tree is not None and self.replica is not None:
            self.tree.abandon()
        self.replica = None
        self.buffers.close_step()

    def open_replica(self, replica: int) -> None:
        """The turns of `replica` come next in this step."""
        self._take_gradients()
        self.replica = replica
        self.buffers.open_replica(replica - self.layout.owned(self.data_ranks.rank).start)

    def finish_backward(self) -> None:
        """Every local turn of the step is done: gradients and buffers are complete after this."""
        self._take_gradients()
        if self.tree is not None:
            self.tree.finish()
        self.replica = None
        self.buffers.close_step()
        if self.tree is not None:
            self.buffers.await_others()
            self.align_buffers()

    def _take_gradients(self) -> None:
        """Hand the gradients of the replica whose turns end to the tree; the first time in a step there is none."""
        if self.tree is not None:
            if self.replica is None:
                self.tree.begin()
            else:
                self.tree.take(self.replica)

    def reduce_gradients(self, optimizer: Optimizer) -> None:
        """Average gradients over ranks under manual optimization, just before their use; twice does no harm."""

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo the loss scaling in the gradients, so that they can be clipped or looked at."""
        self.precision.unscale(optimizer)

    def optimizer_step(self, optimizer: Optimizer, closure: Any = None) -> Any:
        """Update the weights from the gradients, but where a scaled gradient overflowed; return what `step` returns."""
        if self.precision.scaler is None:
            return torch_private.step_of(optimizer)(closure)
        self.precision.step(optimizer)
        return None

    def gradients_are_finite(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the step's gradient is finite, the same on every rank: here all ranks have the whole of it."""
        return are_finite(parameter.grad for parameter in parameters if parameter.grad is not None)

    def clip(self, optimizer: Optimizer, limit: float, algorithm: str) -> Tensor | None:
        """Clip the gradients of `optimizer`'s parameters; return their norm before, where that is what is clipped."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if algorithm == "value":
            nn.utils.clip_grad_value_(parameters, limit)
            return None
        return nn.utils.clip_grad_norm_(parameters, limit)

    # --- elastic runs -----------------------------------------------------------------------------------------------
    def release(self) -> None:
        """Let go of the process group, in the middle of a step perhaps, which is then as if it had not begun."""

    def regroup(self, place: Place, layout: Layout) -> None:
        """Take the place of this process in a new group, and its replicas."""

    def align_buffers(self) -> None:
        """Give every rank the buffers of replica 0, so that evaluation is the same everywhere."""
        if self.task is not None:
            self.collectives.broadcast_tensors(self.task.buffers())

    # --- checkpoints ------------------------------------------------------------------------------------------------
    @property
    def writers(self) -> Collectives | None:
        """The ranks that write a checkpoint together, where each has parts of the state; None: rank 0 has it whole."""
        return None

    def model_state(self) -> dict[str, Tensor]:
        """Return the task's state_dict, whole, under the task's own names; every rank calls it, rank 0 needs it."""
        assert self.task is not None
        return self.task.state_dict()

    def load_model_state(self, weights: Mapping[str, Any], strict: bool) -> None:
        """Take over what `model_state` returned, on any layout."""
        assert self.task is not None
        self.task.load_state_dict(dict(weights), strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of `optimizer`, whole; every rank calls it, rank 0 needs it."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take over what `optimizer_state` returned, on any layout."""
        optimizer.load_state_dict(state)

    def parameter_names(self, optimizer: Optimizer) -> list[list[str]] | None:
        """Return the names of the parameters in `optimizer_state`, group by group; None where they are not known."""
        assert self.task is not None
        names = {id(parameter): name for name, parameter in self.task.named_parameters()}
        groups = [[names.get(id(one)) for one in group["params"]] for group in optimizer.param_groups]
        return None if any(None in group for group in groups) else groups  # type: ignore[return-value]


def trainable(task: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that require a gradient."""
    return (parameter for parameter in task.parameters() if parameter.requires_grad)
