"""Operations on DTensors: scattering, gathering, gradient norms, gradient clipping and loss scaling."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from ....base.errors import ConfigError
from ....base.tensors import local_part
from ....base.torch_private import multiply_each
from ...accelerators import widest_float
from ...checkpoints.shards import StoredTensor, load_stored

TensorChange = Callable[[Tensor], Any]


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor. All ranks in the tensor's mesh must call this."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():  # axis by axis, because torch warns about gathering all at once
            placements = [*tensor.placements]
            placements[axis] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def local_shard(value: Tensor | StoredTensor, like: DTensor) -> DTensor:
    """Return this rank's shard of the full `value`, with the placements of `like`. This needs no communication."""
    (chunk,) = like.__create_chunk_list__()  # the protocol used by torch.distributed.checkpoint
    place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    shard = value[place].to(local_part(like).device, copy=True)  # a view would keep the full tensor in memory
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@torch.no_grad()
def fill(target: Tensor, value: Tensor | StoredTensor) -> None:
    """Copy the full `value` into `target`. If `target` is sharded, copy only this rank's shard of `value`."""
    if isinstance(target, DTensor):
        local_part(target).copy_(local_part(local_shard(value, target)))
    else:
        target.copy_(load_stored(value))


def tensor_slots(task: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield (module, name in the module, tensor) for each parameter and buffer of a task."""
    for module in task.modules():
        for named in (module.named_parameters, module.named_buffers):
            yield from ((module, *item) for item in named(recurse=False, remove_duplicate=False))


def replace(task: nn.Module, change: TensorChange) -> None:
    """Replace each parameter and buffer with `change(tensor)`.

    Parameters remain parameters, and tied weights remain tied.
    """
    values: dict[Tensor, Tensor] = {}  # keeps the tensors alive, so that no id is reused
    for module, name, tensor in list(tensor_slots(task)):
        if tensor not in values:
            value = change(tensor)
            values[tensor] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        setattr(module, name, values[tensor])


@torch.no_grad()
def make_plain(task: nn.Module, keep: bool) -> None:
    """Replace a task's DTensors with full tensors on the host. All ranks must call this.

    If `keep` is False, replace the DTensors with meta tensors, which need no memory.
    """

    def change(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if not keep:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        value = full(tensor).cpu()
        # for a replicated DTensor, or a mesh of one rank, to_local() returns the shard's memory
        is_shared = value.untyped_storage().data_ptr() == local_part(tensor).untyped_storage().data_ptr()
        return value.clone() if is_shared else value

    replace(task, change)


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients of an optimizer's parameters."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def total_norm(gradients: Iterable[Tensor], ranks: int, device: torch.device) -> Tensor:
    """Return the 2-norm of all gradients over `ranks` ranks, with one all-reduce on `device`.

    Each rank divides its contribution by the number of ranks that have the same shard, so every parameter is counted
    once, even if it is replicated. Gradients must not be partial sums.
    """
    squares, kind = [], torch.float32
    for gradient in gradients:
        local = local_part(gradient)
        kind = torch.promote_types(kind, local.dtype)
        # in float32, because the square of 256 overflows in float16
        norm = torch.linalg.vector_norm(local, dtype=torch.float32 if local.dtype.itemsize < 4 else None)
        # Squares are summed in float64: in float32, small parameters would vanish next to large ones, and the sum would
        # depend on the number of ranks.
        squares.append(norm.to(widest_float(norm.device)).square().to(device) * (shard_count(gradient) / ranks))
    # even if this rank has no gradients, because other ranks may have some
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=widest_float(device), device=device)
    # on the default group, which contains every mesh: one collective for all parameters
    dist.all_reduce(total)
    return total.sqrt().to(kind)


def shard_count(tensor: Tensor) -> int:
    """Return the number of distinct shards of a tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for axis, placement in enumerate(tensor.placements):
        # not isinstance(placement, Shard), because _StridedShard (FSDP with tensor parallelism) is not a subclass of it
        if not placement.is_replicate():
            count *= tensor.device_mesh.size(axis)
    return count


@torch.no_grad()
def clip_norm(optimizer: Optimizer, limit: float, ranks: int, device: torch.device, one_order: bool = False) -> Tensor:
    """Scale the gradients down if their norm exceeds `limit`. Return the norm before clipping.

    Args:
        one_order: whether to compute the norm from full gradients, as in a single process, so that the norm is
            bitwise identical for any number of ranks.
    """
    gradients = gradients_of(optimizer)
    norm: Tensor
    if one_order and gradients:
        # gathered one by one, to fit in memory; torch's function produces the same bits as torch's clipping
        norms = [nn.utils.get_total_norm([full(gradient)]) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
    else:
        norm = total_norm(gradients, ranks, device)
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as in torch.nn.utils.clip_grad_norm_
    for gradient in gradients:
        local = local_part(gradient)
        local.mul_(factor.to(local.device))
    return norm


@torch.no_grad()
def clip_value(optimizer: Optimizer, limit: float) -> None:
    """Clamp each element of the gradients to [-limit, limit]."""
    for gradient in gradients_of(optimizer):
        local_part(gradient).clamp_(-limit, limit)


class MeshScaler(torch.amp.GradScaler):
    """Loss scaler for sharded gradients. If any shard overflows, all ranks skip the step.

    This class overrides the public methods of torch's scaler, which supports only one rank's gradients on one mesh.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.type)
        self.device = device
        self.factor = super().get_scale()
        self.good_steps = 0
        """Number of consecutive steps with finite gradients so far."""
        self.overflows: dict[int, Tensor] = {}
        """Maps the id of each optimizer with unscaled gradients to a nonzero value if a gradient was not finite."""

    def scale(self, outputs: Any) -> Any:
        """Return the loss times the scale."""
        return outputs * self.factor

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale. Raises RuntimeError if it is called again before an update."""
        if id(optimizer) in self.overflows:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        gradients = [local_part(gradient) for gradient in gradients_of(optimizer)]
        filled = [gradient for gradient in gradients if gradient.numel()]  # an empty shard has no maximum
        overflow = (~nn.utils.get_total_norm(filled, float("inf")).isfinite()).float().to(self.device)
        if gradients:
            multiply_each(gradients, 1.0 / self.factor)
        # over all ranks, because all of them must skip the same steps and have the same scale
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
        self.overflows[id(optimizer)] = overflow

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Update the weights, unless a gradient was not finite."""
        if id(optimizer) not in self.overflows:
            self.unscale_(optimizer)
        return None if self.overflows[id(optimizer)].item() else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Decrease the scale after an overflow. Increase it after many steps without an overflow."""
        overflowed, self.overflows = any(overflow.item() for overflow in self.overflows.values()), {}
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if new_scale is not None:
            self.factor = float(new_scale)
        elif overflowed:
            self.factor *= self.get_backoff_factor()
        elif self.good_steps == self.get_growth_interval():
            # a scale of inf would make every later loss inf or NaN
            self.good_steps, larger = 0, self.factor * self.get_growth_factor()
            self.factor = larger if larger <= torch.finfo(torch.float32).max else self.factor

    def get_scale(self) -> float:
        """Return the scale."""
        return self.factor

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, in the format of torch's scaler."""
        return {**super().state_dict(), "_growth_tracker": self.good_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict from torch's scaler or from this class."""
        super().load_state_dict(state_dict)
        self.factor, self.good_steps = float(state_dict["scale"]), int(state_dict["_growth_tracker"])


def disable_foreach(optimizers: Iterable[Optimizer], always: bool = False) -> None:
    """Set foreach=False for parameter groups that span multiple meshes or, if `always` is True, for all groups.

    torch's `foreach` and `fused` kernels need tensors on a single mesh, but `foreach` is torch's default on
    accelerators. Raises ConfigError if such a group has `foreach` or `fused` set to True.
    """
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        meshes = {parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in group["params"]}
        apart = always or len(meshes) > 1
        chosen = [option for option in ("foreach", "fused") if group.get(option)]
        if apart and chosen:
            raise ConfigError(
                f"{chosen[0]}=True requires all parameters to be on a single mesh, but under tensor parallelism, an "
                f"optimizer's parameters are on multiple meshes. Leave {chosen[0]} out."
            )
        if apart and "foreach" in group:
            group["foreach"] = False
