"""Distributed data parallel: one process for each device, gradients averaged by torch's DistributedDataParallel."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.nn.parallel import DistributedDataParallel

from ...base.errors import ConfigError, TaskError, first_names
from ...base.place import Place
from ...base.tensors import plain_tensors
from ...base.torch_private import forward_of_ddp, multiply_each, no_compiler_for_ddp, reduction_check
from ..accelerators import has_streams
from ..data.sampling import Layout
from ..optimization.model_checks import sparse_weights
from ..processes.ranks import Phase
from .batch_norm import synchronize
from .group import GroupStrategy
from .strategy import trainable

if TYPE_CHECKING:
    from ...tasks.task import Task

UNUSED = re.compile(r"Expected to have finished reduction.*did not receive grad for rank \d+:([ \d]+)", re.DOTALL)
"""DDP's message for parameters without gradient, which it lists by their indices."""


class DDPStrategy(GroupStrategy):
    """One process for each device. The arguments are DistributedDataParallel's and init_process_group's.

    A subclass registers a communication hook of torch's, or of its own, on `self.ddp` in `regroup`.
    """

    name = "ddp"

    def __init__(
        self,
        *,
        elastic: bool = False,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        process_group_backend: str | None = None,
        init_method: str | None = None,
        timeout: float | Mapping[Phase, float] = 1800.0,
    ) -> None:
        """`elastic`: the run goes on when processes die, which are replaced. `timeout`: the seconds that a rank waits
        for another, or those of each phase: startup, step, checkpoint. Without a backend, nccl on CUDA, else gloo.
        """
        super().__init__(process_group_backend, init_method, timeout)
        self.module_options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self.finds_unused = find_unused_parameters
        self.elastic = elastic
        if elastic:
            self._require_elastic()
        self.ddp: DistributedDataParallel | None = None
        """Lets gradients meet while backward computes them; None in one process, in one order, and where the task runs
        backward itself."""
        self.ddp_forward: Callable[..., Any] | None = None
        self.require_reduced: Callable[[], object] = nullcontext
        """Raises RuntimeError where DDP misses a gradient after the last backward of a step."""
        self.undo_batch_norm: Callable[[], None] | None = None
        self.batch_norm_group: tuple[Any, Any] | None = None
        """The group that all were in when batch norm got its own, and that one: both have the same ranks."""

    def _require_elastic(self) -> None:
        """Raise ConfigError for arguments that an elastic run excludes."""
        if self.process_group_backend not in (None, "gloo"):
            raise ConfigError(
                "elastic=true has a gradient reduction of its own, over gloo: a process cannot leave a broken NCCL or "
                "MPI group. Leave process_group_backend out."
            )
        if self.init_method is not None:
            raise ConfigError("elastic=true meets on the loopback interface of one machine: leave init_method out.")

    @property
    def needs_every_gradient(self) -> bool:  # type: ignore[override]
        """Whether torch's DDP waits for a gradient of every parameter."""
        return not self.finds_unused

    def _backend(self) -> str:
        """Return the backend of the process group: gloo for elastic runs, whose processes leave broken groups."""
        return "gloo" if self.elastic else super()._backend()

    def place_task(self, task: "Task") -> None:
        """Move the task to its device and precision. Raises ConfigError for options that exclude each other."""
        if self.elastic and not task.automatic_optimization:
            raise ConfigError(
                "elastic=true needs automatic optimization: where training_step updates the weights itself, a step in "
                "which another process has died cannot be repeated."
            )
        super().place_task(task)

    def _sync_batch_norm(self, task: "Task") -> None:
        """Compute the statistics of batch norm over all processes, until `teardown`."""
        trainer, replicas = task.trainer, self.layout.replicas
        fits = replicas == self.data_ranks.size > 1 and trainer.stage == "fit"
        if not trainer.sync_batchnorm or not fits or self.elastic or trainer.reproducible == "bitwise":
            super()._sync_batch_norm(task)
            return
        # A group of its own: batch norm's sums wait within forward and backward, while DDP's buckets are on their way
        # in the strategy's group. Kept for later runs, since gloo connects all pairs of ranks for each group.
        if self.batch_norm_group is None or self.batch_norm_group[0] is not dist.group.WORLD:
            self.batch_norm_group = dist.group.WORLD, dist.new_group()
        self.undo_batch_norm = synchronize(task, self.device, self.batch_norm_group[1])

    def regroup(self, layout: Layout | None, place: Place | None = None) -> None:
        """Attach to the parameters that are trained now: by torch's DDP, or in one order by the tree."""
        # DDP takes its hooks off the parameters only when its C++ reducer is destroyed: before another one is made
        self._drop_ddp()
        self.loss_scale = 1.0
        super().regroup(layout, place)
        task = self.task
        if layout is None or task is None or self.place.world_size == 1 or self.one_order:
            return
        # Under manual optimization backward runs inside training_step, which DDP's forward cannot wrap. Without trained
        # parameters DDP's constructor raises.
        if not task.automatic_optimization or not any(True for _ in trainable(task)):
            return
        # DDP divides the sum over ranks by their number, so that gradients which a task keeps from the step before stay
        # as they are. Under 16-mixed that is undone on the gradients: a larger loss would overflow on more processes
        # only.
        if self.precision.scaler is None:
            self.loss_scale = float(self.data_ranks.size)
        # a task's own `backward` may call backward twice, of which DDP reduces the first
        if not self.own_backward:
            self.ddp = self._wrap(task)
            is_plain = type(self.ddp) is DistributedDataParallel
            self.ddp_forward = partial(forward_of_ddp, self.ddp) if is_plain else self.ddp.forward
            self.require_reduced = reduction_check(self.ddp)

    def _drop_ddp(self) -> None:
        # all three refer to the C++ reducer
        self.ddp, self.ddp_forward, self.require_reduced = None, None, nullcontext

    def _share_weights(self, task: "Task") -> None:
        if self.ddp is None or _is_quantized(task):  # else DDP has done it
            super()._share_weights(task)

    def _wrap(self, task: "Task") -> DistributedDataParallel:
        options = {name: value for name, value in self.module_options.items() if value is not None}
        with warnings.catch_warnings(), no_compiler_for_ddp():
            # torch 2.13 deprecates broadcast_buffers for a name that older releases do not have
            warnings.filterwarnings("ignore", message=".*broadcast_buffers")
            return DistributedDataParallel(
                DDPSteps(task, self._call_step),
                # to which DDP may move inputs; None: they stay where they are
                device_ids=[self.device] if self._only_device() and has_streams(self.device) else None,
                process_group=self.collectives.group,
                find_unused_parameters=self.finds_unused,
                broadcast_buffers=False,  # in each forward; `end_step` does it
                init_sync=not _is_quantized(task),  # which takes views that quantized weights have not
                **options,
            )

    def _call_step(self, name: str, arguments: Sequence[Any]) -> Any:
        return getattr(self.task, name)(*arguments)

    def teardown(self) -> None:
        """Drop the wrapper, and with it its hooks on the parameters."""
        self._drop_ddp()
        if self.undo_batch_norm is not None:
            self.undo_batch_norm()
        self.undo_batch_norm = None
        super().teardown()

    # --- the step ---------------------------------------------------------------------------------------------------
    def training_step(self, arguments: Sequence[Any], replica: int | None, last: bool) -> Any:
        """Call training_step through DDP, which prepares the reduction when this is the `last` local batch."""
        ddp, forward = self.ddp, self.ddp_forward
        if ddp is None or forward is None:
            return super().training_step(arguments, replica, last)
        if self.by_replica:
            self._open_replica(replica)
        # what DDP's no_sync() sets; it must hold for the forward and its backward, which two contexts would split
        if ddp.require_backward_grad_sync != last:  # a module's __setattr__ takes 10 us
            ddp.require_backward_grad_sync = last
        if self.precision.forward_context is nullcontext:  # four calls less
            return forward("training_step", *arguments)
        with self.precision.forward_context():
            return forward("training_step", *arguments)

    def leave_out(self, last: bool, after_forward: bool) -> None:
        """Send a gradient of zero, since the other ranks' reduction waits for every parameter of every rank."""
        if after_forward and self.data_ranks.size > 1 and self.task is not None and self.task.trainer.sync_batchnorm:
            raise TaskError(
                f"training_step left a batch out of step {self.task.global_step + 1} after its forward, in which other "
                f"ranks count on it: with sync_batchnorm=true every batch has a backward. Return a loss times 0.0."
            )
        if self.ddp is not None and last:
            self._zero_loss().backward()

    def _zero_loss(self) -> Tensor:
        """Return a loss whose backward sends zeros for this rank's last batch."""
        assert self.ddp is not None
        self.ddp.require_backward_grad_sync = True
        loss: Tensor = self.ddp("nothing")  # a forward, which prepares DDP's reducer, anew after one without a loss
        return loss

    def end_step(self) -> None:
        """Check that all gradients were sent, and make means of samples out of them."""
        if self.ddp is not None:
            self._check_reduced()
            if self.precision.scaler is not None:
                gradients = [parameter.grad for parameter in self.ddp.parameters() if parameter.grad is not None]
                if gradients:
                    multiply_each(gradients, float(self.data_ranks.size))
        super().end_step()

    def _add_up_ranks(self) -> None:
        if self.ddp is None:  # which has done it within backward
            super()._add_up_ranks()

    def _check_reduced(self) -> None:
        """Raise TaskError, with their names, where parameters got no gradient: the other ranks wait for them."""
        assert self.task is not None
        try:
            self.require_reduced()
        except RuntimeError as error:
            indices = UNUSED.search(str(error))
            if indices is None:
                raise
            names = [name for name, parameter in self.task.named_parameters() if parameter.requires_grad]
            raise TaskError(
                f"Step {self.task.global_step + 1} gave rank {self.place.rank} no gradient for "
                f"{first_names([names[int(index)] for index in indices.group(1).split()])}. Freeze what no loss uses "
                f"(requires_grad_(False)) or remove it; if only some batches use it, set find_unused_parameters=true "
                f"for strategy ddp."
            ) from error


def _is_quantized(task: nn.Module) -> bool:
    """Return whether weights of a task are made of several tensors."""
    return any(plain_tensors(weight)[0] is not weight for weight in (*task.parameters(), *task.buffers()))


class DDPSteps(nn.Module):
    """Module whose forward calls a step of the task, for DDP to wrap."""

    def __init__(self, task: "Task", run: Callable[[str, Sequence[Any]], Any]) -> None:
        """`run`: calls a step by its name."""
        super().__init__()
        self.task, self.run = task, run

    def __call__(self, name: str, *arguments: Any) -> Any:  # past nn.Module's: nobody has hooks on this one
        """Return what the step `name` returns; for "nothing" a loss without effect."""
        return self.nothing() if name == "nothing" else self.run(name, arguments)

    def nothing(self) -> Tensor:
        """Return a loss whose gradient changes nothing, for every parameter that is trained."""
        # Times a parameter, not a constant: DDP's reducer counts gradients by hooks, which only a graph calls. -0.0,
        # since 0.0 would turn other ranks' -0.0 into 0.0, which one process without this rank does not.
        sparse = sparse_weights(self.task)  # DDP wants their gradients sparse here, too
        rows = {one: one.new_zeros(0, dtype=torch.int64) for one in sparse}
        used = (embedding(rows[one], one, sparse=True) if one in sparse else one for one in trainable(self.task))
        nothing = [(parameter * -0.0).sum().float() for parameter in used]
        return torch.stack([zero.to(nothing[0].device) for zero in nothing]).sum()  # parts may live on several devices
