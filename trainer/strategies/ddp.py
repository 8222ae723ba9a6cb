"""Distributed data parallel: one process for each device, gradients averaged by torch's DistributedDataParallel."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...base.errors import ConfigError, TaskError, first_names
from ...base.torch_private import multiply_each, no_compiler_for_ddp, reduction_check
from ..accelerators import has_streams
from ..data.sampling import Layout
from ..elastic.store import ElasticOptions, split_address
from ..optimization.precision import nothing
from ..processes.ranks import Phase, Ranks
from .averaging import FlatAverage, TreeAverage
from .bitwise.batch_norm import synchronize
from .bitwise.buffers import ReplicaBuffers
from .group import GroupStrategy
from .reducers import AveragingReducer, Reducer
from .strategy import trainable

if TYPE_CHECKING:
    from ...tasks.task import Task

UNUSED = re.compile(r"Expected to have finished reduction.*did not receive grad for rank \d+:([ \d]+)", re.DOTALL)
"""DDP's message for parameters without gradient, which it lists by their indices."""


class DDPStrategy(GroupStrategy):
    """One process for each device. The arguments are DistributedDataParallel's and init_process_group's.

    A subclass registers a communication hook of torch's, or of its own, on `self.ddp.module` in `make_reducer`.
    """

    name = "ddp"

    def __init__(
        self,
        *,
        elastic: bool = False,
        min_processes: int = 1,
        join: str | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        process_group_backend: str | None = None,
        init_method: str | None = None,
        timeout: float | Mapping[Phase, float] = 1800.0,
    ) -> None:
        """`elastic`: the run goes on when processes die, and others may join it; with fewer than `min_processes` it
        saves a checkpoint and ends. `join`: "host:port" of the elastic run that this one joins. `timeout`: the
        seconds that a rank waits for another, or those of each phase: startup, step, checkpoint. Without a backend,
        nccl on CUDA, else gloo.
        """
        super().__init__(process_group_backend, init_method, timeout)
        self.module_options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "broadcast_buffers": broadcast_buffers,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self.finds_unused = find_unused_parameters
        if elastic:
            from ..elastic.members import ElasticProcesses

            self.elastic = ElasticProcesses(self._elastic_options(min_processes, join))
        elif join is not None or min_processes != 1:
            raise ConfigError("join and min_processes are for elastic runs: set elastic=true.")
        self.ddp: DDPReducer | None = None
        """The reducer, where it is torch's."""
        self.batch_norm_group: tuple[Any, Any] | None = None
        """The group that all were in when batch norm got its own, and that one: both have the same ranks."""

    def _elastic_options(self, min_processes: int, join: str | None) -> ElasticOptions:
        """Return the options of an elastic run. Raises ConfigError for arguments that it excludes."""
        if min_processes < 1:
            raise ConfigError(f"min_processes={min_processes!r}: expected at least 1.")
        if self.process_group_backend not in (None, "gloo"):
            raise ConfigError(
                "elastic=true has a gradient reduction of its own, over gloo: a process cannot leave a broken NCCL or "
                "MPI group. Leave process_group_backend out."
            )
        listen = "127.0.0.1:0"
        if self.init_method is not None:
            listen = self.init_method.removeprefix("tcp://")
            if listen == self.init_method:
                raise ConfigError(f"elastic=true needs init_method=tcp://HOST:PORT or none, got {self.init_method!r}.")
        for address in (listen, join):
            if address is not None:
                split_address(address)
        return ElasticOptions(min_processes, join, listen, self.timeouts["step"].total_seconds())

    @property
    def needs_every_gradient(self) -> bool:  # type: ignore[override]
        """Whether torch's DDP waits for a gradient of every parameter."""
        return not self.finds_unused

    @property
    def leaves_default_group(self) -> bool:  # type: ignore[override]
        """Whether the default process group has no collectives but the script's."""
        return self.collectives.group is not None

    def _backend(self) -> str:
        """Return the backend of the process group: gloo for elastic runs, whose processes leave broken groups."""
        return "gloo" if self.elastic.changes else super()._backend()

    def setup(self, task: "Task", optimizers: Sequence[Optimizer], layout: Layout, one_order: bool = False) -> None:
        """Prepare the placed task for training. Raises ConfigError for options that exclude each other."""
        if self.elastic.changes and not task.automatic_optimization:
            raise ConfigError(
                "elastic=true needs automatic optimization: where training_step updates the weights itself, a step in "
                "which another process has died cannot be repeated."
            )
        super().setup(task, optimizers, layout, one_order)

    def sync_batch_norm(self, task: "Task", replicas: int) -> Callable[[], None]:
        """Compute the statistics of batch norm over all processes; return what undoes it."""
        if replicas != self.data_ranks.size or replicas == 1:
            return super().sync_batch_norm(task, replicas)
        if self.elastic.changes or task.trainer.reproducible == "bitwise":
            raise ConfigError(
                "sync_batchnorm=true ties a run to one number of processes, each with one replica; it does not go with "
                "elastic=true or reproducible: bitwise. Leave one of the two out."
            )
        # A group of its own: batch norm's sums wait within forward and backward, while DDP's buckets are on their way
        # in the strategy's group. Kept for later runs, since gloo connects all pairs of ranks for each group.
        if self.batch_norm_group is None or self.batch_norm_group[0] is not dist.group.WORLD:
            self.batch_norm_group = dist.group.WORLD, dist.new_group()
        return synchronize(task, self.device, self.batch_norm_group[1])

    def make_reducer(self) -> None:
        """Make the reducer for the parameters that are trained now, and give every rank the weights of rank 0."""
        # the strategy's own reference, too, must be gone before another DDP is made (see Strategy.make_reducer)
        self.ddp, self.weight_ranks = None, self.collectives
        super().make_reducer()
        if self.task is not None and self.ddp is None and any(True for _ in trainable(self.task)):
            self.collectives.broadcast_tensors([*self.task.parameters(), *self.task.buffers()])  # as DDP does

    def _reducer_for(self, task: "Task") -> Reducer:
        trains = any(True for _ in trainable(task))
        # with `bitwise` gradients meet in the tree; without trained parameters DDP's constructor raises
        if self.place.world_size == 1 or (task.automatic_optimization and (self.one_order or not trains)):
            return super()._reducer_for(task)
        if task.automatic_optimization:
            self.ddp = self._wrap(task)
            return self.ddp
        # backward runs inside training_step, which DDP's forward cannot wrap
        ranks = self.data_ranks
        if task.trainer.reproducible == "bitwise":
            return AveragingReducer(task.parameters(), TreeAverage(self.layout, ranks.rank, ranks.group))
        return AveragingReducer(task.parameters(), FlatAverage(task, ranks.size, ranks.group))

    def _wrap(self, task: "Task") -> "DDPReducer":
        options = {name: value for name, value in self.module_options.items() if value is not None}
        with warnings.catch_warnings(), no_compiler_for_ddp():
            # torch 2.13 deprecates broadcast_buffers for a name that older releases do not have
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=DeprecationWarning)
            module = DistributedDataParallel(
                self._steps_of(task),
                device_ids=self._device_ids(),
                process_group=self.collectives.group,
                find_unused_parameters=self.finds_unused,
                **options,
            )
        return DDPReducer(task, module, self.collectives, self.precision.scaler is not None)

    def _steps_of(self, task: "Task") -> "DDPSteps":
        return DDPSteps(task, self.buffers)

    def _device_ids(self) -> list[torch.device] | None:
        """Return the device to which DDP may move inputs; None: they stay where they are."""
        return [self.device] if has_streams(self.device) else None

    def teardown(self) -> None:
        """Drop the wrapper, and with it the reducer's hooks on the parameters."""
        self.ddp = None
        super().teardown()

    # --- the step ---------------------------------------------------------------------------------------------------
    def training_step(self, arguments: Sequence[Any], last: bool) -> Any:
        """Call training_step through DDP, which prepares the reduction when this is the `last` local batch."""
        if self.ddp is None:
            return super().training_step(arguments, last)
        self.ddp.set_sync(last)
        self.buffers.settle()
        if self.precision.forward_context is nothing:  # four calls less
            return self.ddp.training_step(arguments)
        with self.precision.forward_context():
            return self.ddp.training_step(arguments)

    def backward(
        self, loss: Tensor, last: bool = True, inputs: Sequence[Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        """Add the gradient of `loss`; with the `last` one of a step DDP averages them over the processes."""
        super().backward(loss, last, inputs, retain_graph)
        if last and not retain_graph:
            self.reducer.complete()

    def leave_out(self, last: bool, after_forward: bool) -> None:
        """Send a gradient of zero, since the other ranks' reduction waits for every parameter of every rank."""
        if after_forward and self.data_ranks.size > 1 and self.task is not None and self.task.trainer.sync_batchnorm:
            raise TaskError(
                f"training_step left a batch out of step {self.task.global_step + 1} after its forward, in which other "
                f"ranks count on it: with sync_batchnorm=true every batch has a backward. Return a loss times 0.0."
            )
        if self.ddp is not None and last:
            self.ddp.zero_loss(after_forward).backward()
            self.ddp.complete()


class DDPReducer(Reducer):
    """Lets torch's DistributedDataParallel average gradients over ranks, while backward computes them."""

    def __init__(
        self,
        task: "Task",
        module: DistributedDataParallel,
        collectives: Ranks,
        is_scaled: bool,
    ) -> None:
        """`is_scaled`: losses are multiplied by the factor of 16-mixed."""
        super().__init__(task.parameters())
        self.task, self.module, self.collectives, self.is_scaled = task, module, collectives, is_scaled
        # Losses are weighted by their share of the step's samples, so a sum over ranks is the mean that is wanted, and
        # DDP divides it by their number. Under 16-mixed that is undone on the gradients (undo_division).
        self.scale = 1.0 if is_scaled else float(collectives.size)
        self.names = [name for name, parameter in task.named_parameters() if parameter.requires_grad]
        """The names of the parameters that DDP reduces, in its order."""
        self.nothing: Tensor | None = None
        """Zero loss that stands in when training_step returns None."""
        self.check_reduced = reduction_check(module)
        self.forward: Callable[..., Any] = module.forward

    def set_sync(self, last: bool) -> None:
        """Choose whether the next forward and its backward send gradients."""
        # what DDP's no_sync() sets; it must hold for the forward and its backward, which two contexts would split
        if self.module.require_backward_grad_sync != last:  # a module's __setattr__ takes 10 us
            self.module.require_backward_grad_sync = last

    def training_step(self, arguments: Sequence[Any]) -> Any:
        """Call the task's training_step within DDP's forward."""
        # the step's name goes through DDP.forward, which prepares the reduction and broadcasts buffers before it
        output = self.forward("training_step", *arguments)
        if type(output) is not _Nothing:
            return output
        # this forward has prepared DDP's reducer, which waits for the gradients of the loss that it returned
        self.nothing = output.loss
        return None

    def complete(self) -> None:
        """Check that all gradients were sent, and make means of samples out of them."""
        self.require_reduced()
        if self.is_scaled:
            self.undo_division()

    def require_reduced(self) -> None:
        """Raise TaskError, with their names, where parameters got no gradient: the other ranks wait for them."""
        try:
            self.check_reduced()
        except RuntimeError as error:
            found = UNUSED.search(str(error))
            if found is None:
                raise
            unused = [self.names[int(index)] for index in found.group(1).split()]
            raise TaskError(
                f"Step {self.task.global_step + 1} gave rank {self.collectives.rank} no gradient for "
                f"{first_names(unused)}. Freeze what no loss uses (requires_grad_(False)) or remove it; if only some "
                f"batches use it, set find_unused_parameters=true for strategy ddp."
            ) from error

    def undo_division(self) -> None:
        """Under 16-mixed multiply the gradients themselves: a larger loss would overflow on more processes only."""
        if self.is_scaled:
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            multiply_each(gradients, float(self.collectives.size))

    def zero_loss(self, after_forward: bool) -> Tensor:
        """Return a loss whose backward sends zeros for this rank's last batch."""
        self.set_sync(True)
        nothing = self.nothing if after_forward else self.module("nothing").loss
        self.nothing = None
        assert nothing is not None
        return nothing


class DDPSteps(nn.Module):
    """Module whose forward calls a step of the task, for DDP to wrap."""

    def __init__(self, task: "Task", buffers: ReplicaBuffers) -> None:
        super().__init__()
        self.task, self.replica_buffers = task, buffers

    def __call__(self, name: str, *arguments: Any) -> Any:  # past nn.Module's: nobody has hooks on this one
        """Return what the step `name` returns; where that is None, or for "nothing", a loss without effect."""
        self.replica_buffers.begin()  # DDP has just given every process the buffers of the first one
        output = None if name == "nothing" else self.call(name, arguments)
        return _Nothing(self.nothing()) if output is None else output

    def call(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call the step `name` of the task."""
        return getattr(self.task, name)(*arguments)

    def nothing(self) -> Tensor:
        """Return a loss whose gradient is zero for every parameter that is trained."""
        # 0 times a parameter, not zeros: DDP's reducer counts gradients by hooks, which only a graph calls
        nothing = [(parameter * 0.0).sum().float() for parameter in trainable(self.task)]
        return torch.stack([zero.to(nothing[0].device) for zero in nothing]).sum()  # parts may live on several devices


class _Nothing(NamedTuple):
    """Output that stands in for that of a step that returned None, or of a rank without a batch."""

    loss: Tensor
