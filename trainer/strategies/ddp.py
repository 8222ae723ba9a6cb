"""Distributed data parallelism with one process per device. torch's DistributedDataParallel averages gradients."""

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
"""Matches DDP's error about parameters without a gradient, and captures their indices."""


class DDPStrategy(GroupStrategy):
    """One process per device. Accepts arguments of torch's DistributedDataParallel and init_process_group.

    To add a communication hook, override `regroup` in a subclass and register the hook on `self.ddp`.
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
        """Set the strategy's options.

        Args:
            elastic: whether to replace processes that die and continue the run.
            timeout: number of seconds a rank waits for other ranks, or a mapping from phases ("startup", "step" and
                "checkpoint") to seconds.
            process_group_backend: backend for the process group; by default, nccl on CUDA and gloo otherwise.
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
        """Reduces gradients during the backward pass; None in a single process, with `one_order`, under manual
        optimization, and for a task that overrides `backward`."""
        self.ddp_forward: Callable[..., Any] | None = None
        self.require_reduced: Callable[[], object] = nullcontext
        """Raises RuntimeError if DDP is still waiting for a gradient after the last backward pass of a step."""
        self.undo_batch_norm: Callable[[], None] | None = None
        self.batch_norm_group: tuple[Any, Any] | None = None
        """The default process group, and the group of the same ranks for batch norm."""

    def _require_elastic(self) -> None:
        """Raise ConfigError for arguments that `elastic` does not support."""
        if self.process_group_backend not in (None, "gloo"):
            raise ConfigError(
                "elastic=true reduces gradients with gloo, because a process cannot leave a broken NCCL or MPI group. "
                "Remove process_group_backend."
            )
        if self.init_method is not None:
            raise ConfigError("elastic=true uses the loopback interface of one machine, so leave init_method out.")

    @property
    def needs_every_gradient(self) -> bool:  # type: ignore[override]
        """True if torch's DDP waits for a gradient for every parameter."""
        return not self.finds_unused

    def _backend(self) -> str:
        """Return the backend of the process group.

        Elastic runs use gloo, because a process can leave a broken gloo group.
        """
        return "gloo" if self.elastic else super()._backend()

    def place_task(self, task: "Task") -> None:
        """Move the task to its device and convert it to the run's precision.

        Raises ConfigError if `elastic` is set and the task uses manual optimization.
        """
        if self.elastic and not task.automatic_optimization:
            raise ConfigError(
                "elastic=true needs automatic optimization. If training_step updates the weights itself, a step cannot "
                "be repeated after a process dies. Set automatic_optimization = True, or leave elastic out."
            )
        super().place_task(task)

    def _sync_batch_norm(self, task: "Task") -> None:
        """If `sync_batchnorm` is set, synchronize batch norm statistics over all processes until `teardown`."""
        trainer, replicas = task.trainer, self.layout.replicas
        fits = replicas == self.data_ranks.size > 1 and trainer.stage == "fit"
        if not trainer.sync_batchnorm or not fits or self.elastic or trainer.reproducible == "bitwise":
            super()._sync_batch_norm(task)
            return
        # A separate group: batch norm's sums block in the forward and backward pass, while DDP's buckets are in flight
        # in the strategy's group. It is kept for later runs, because gloo connects all pairs of ranks for each group.
        if self.batch_norm_group is None or self.batch_norm_group[0] is not dist.group.WORLD:
            self.batch_norm_group = dist.group.WORLD, dist.new_group()
        self.undo_batch_norm = synchronize(task, self.device, self.batch_norm_group[1])

    def regroup(self, layout: Layout | None, place: Place | None = None) -> None:
        """Attach torch's DDP, or the gradient tree if `one_order` is set, to the trainable parameters."""
        # DDP's hooks stay on the parameters until its C++ reducer is destroyed, so first drop the old one
        self._drop_ddp()
        self.loss_scale = 1.0
        super().regroup(layout, place)
        task = self.task
        if layout is None or task is None or self.place.world_size == 1 or self.one_order:
            return
        # Under manual optimization, backward runs inside training_step, which DDP's forward cannot wrap. Without
        # trainable parameters, DDP's constructor raises.
        if not task.automatic_optimization or not any(True for _ in trainable(task)):
            return
        # DDP divides the sum over ranks by their number: scaling the loss leaves gradients kept from the previous step
        # unchanged. Under 16-mixed, the gradients are scaled instead, because with more processes the larger loss
        # would overflow earlier.
        if self.precision.scaler is None:
            self.loss_scale = float(self.data_ranks.size)
        # an overridden `backward` may call loss.backward() twice, but DDP would reduce after the first call
        if not self.own_backward:
            self.ddp = self._wrap(task)
            is_plain = type(self.ddp) is DistributedDataParallel
            self.ddp_forward = partial(forward_of_ddp, self.ddp) if is_plain else self.ddp.forward
            self.require_reduced = reduction_check(self.ddp)

    def _drop_ddp(self) -> None:
        # all three hold references to the C++ reducer
        self.ddp, self.ddp_forward, self.require_reduced = None, None, nullcontext

    def _share_weights(self, task: "Task") -> None:
        if self.ddp is None or _is_quantized(task):  # otherwise DDP's constructor has already done so
            super()._share_weights(task)

    def _wrap(self, task: "Task") -> DistributedDataParallel:
        options = {name: value for name, value in self.module_options.items() if value is not None}
        with warnings.catch_warnings(), no_compiler_for_ddp():
            # torch 2.13 deprecates broadcast_buffers for an argument that older releases lack
            warnings.filterwarnings("ignore", message=".*broadcast_buffers")
            return DistributedDataParallel(
                DDPSteps(task, self._call_step),
                # DDP moves inputs to this device; None leaves them in place
                device_ids=[self.device] if self._only_device() and has_streams(self.device) else None,
                process_group=self.collectives.group,
                find_unused_parameters=self.finds_unused,
                broadcast_buffers=False,  # `end_step` broadcasts them once per step, not in each forward pass
                init_sync=not _is_quantized(task),  # it takes views, which quantized weights don't support
                **options,
            )

    def _call_step(self, name: str, arguments: Sequence[Any]) -> Any:
        return getattr(self.task, name)(*arguments)

    def teardown(self) -> None:
        """Remove torch's DDP and its hooks from the parameters."""
        self._drop_ddp()
        if self.undo_batch_norm is not None:
            self.undo_batch_norm()
        self.undo_batch_norm = None
        super().teardown()

    # --- the step ---------------------------------------------------------------------------------------------------
    def training_step(self, arguments: Sequence[Any], replica: int | None, last: bool) -> Any:
        """Call training_step through DDP, which prepares the all-reduce if this is the `last` local batch."""
        ddp, forward = self.ddp, self.ddp_forward
        if ddp is None or forward is None:
            return super().training_step(arguments, replica, last)
        if self.by_replica:
            self._open_replica(replica)
        # like DDP.no_sync(), but for a forward pass and its backward pass together
        if ddp.require_backward_grad_sync != last:  # a module's __setattr__ takes 10 us
            ddp.require_backward_grad_sync = last
        if self.precision.forward_context is nullcontext:  # saves four calls
            return forward("training_step", *arguments)
        with self.precision.forward_context():
            return forward("training_step", *arguments)

    def leave_out(self, last: bool, after_forward: bool) -> None:
        """Send zero gradients, because the all-reduce waits for every parameter on every rank."""
        if after_forward and self.data_ranks.size > 1 and self.task is not None and self.task.trainer.sync_batchnorm:
            raise TaskError(
                f"training_step returned None in step {self.task.global_step + 1}, but with sync_batchnorm=true, other "
                f"ranks wait for this batch's backward pass. Return the loss times 0.0 instead."
            )
        if self.ddp is not None and last:
            self._zero_loss().backward()

    def _zero_loss(self) -> Tensor:
        """Return a loss whose backward pass sends zero gradients."""
        assert self.ddp is not None
        self.ddp.require_backward_grad_sync = True
        loss: Tensor = self.ddp("nothing")  # a forward pass, because nothing else prepares DDP's reducer
        return loss

    def end_step(self) -> None:
        """Check that all gradients have been reduced, and scale them to the mean over samples."""
        if self.ddp is not None:
            self._check_reduced()
            if self.precision.scaler is not None:
                gradients = [parameter.grad for parameter in self.ddp.parameters() if parameter.grad is not None]
                if gradients:
                    multiply_each(gradients, float(self.data_ranks.size))
        super().end_step()

    def _add_up_ranks(self) -> None:
        if self.ddp is None:  # DDP reduces during the backward pass
            super()._add_up_ranks()

    def _check_reduced(self) -> None:
        """Raise TaskError if other ranks are still waiting for gradients this rank did not compute.

        The message lists the parameters without gradients.
        """
        assert self.task is not None
        try:
            self.require_reduced()
        except RuntimeError as error:
            indices = UNUSED.search(str(error))
            if indices is None:
                raise
            # DDP reports the indices of the parameters, and counts only trainable ones
            names = [name for name, parameter in self.task.named_parameters() if parameter.requires_grad]
            raise TaskError(
                f"Step {self.task.global_step + 1} produced no gradient on rank {self.place.rank} for "
                f"{first_names([names[int(index)] for index in indices.group(1).split()])}. Remove parameters that no "
                f"loss uses, or freeze them with requires_grad_(False). If only some batches use these parameters, set "
                f"find_unused_parameters=true for strategy=ddp."
            ) from error


def _is_quantized(task: nn.Module) -> bool:
    """Return whether any of the task's weights consists of multiple tensors."""
    return any(plain_tensors(weight)[0] is not weight for weight in (*task.parameters(), *task.buffers()))


class DDPSteps(nn.Module):
    """Module that calls a step of the task. DDP wraps this module."""

    def __init__(self, task: "Task", run: Callable[[str, Sequence[Any]], Any]) -> None:
        """Wrap a function that runs a step.

        Args:
            run: function that calls a step by name.
        """
        super().__init__()
        self.task, self.run = task, run

    def __call__(self, name: str, *arguments: Any) -> Any:  # faster than nn.Module's: this module has no hooks
        """Run the step `name` and return its result. The step "nothing" returns a loss with zero gradients."""
        return self.nothing() if name == "nothing" else self.run(name, arguments)

    def nothing(self) -> Tensor:
        """Return a loss with a zero gradient for every trainable parameter."""
        # DDP's reducer counts gradients by hooks, which only run in a backward pass, so the loss has an autograd graph.
        # -0.0 leaves any sum unchanged; 0.0 would turn other ranks' -0.0 into 0.0, unlike a run without this rank.
        sparse = sparse_weights(self.task)  # DDP needs their gradients to be sparse here, too
        rows = {w: w.new_zeros(0, dtype=torch.int64) for w in sparse}
        used = (embedding(rows[w], w, sparse=True) if w in sparse else w for w in trainable(self.task))
        zeros = [(w * -0.0).sum().float() for w in used]
        return torch.stack([zero.to(zeros[0].device) for zero in zeros]).sum()  # weights may be on multiple devices
