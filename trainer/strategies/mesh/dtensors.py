"""DTensors on a mesh: scatter and gather of tensors, norms and clipping of sharded gradients, their scaler."""

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


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor; every rank of its mesh calls it."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():  # one axis after the other: all at once torch warns that it goes so
            placements = [*tensor.placements]
            placements[axis] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def local_shard(value: Tensor | StoredTensor, like: DTensor) -> DTensor:
    """Return this rank's part of the whole `value`, laid out as `like` is; no rank talks to another."""
    (chunk,) = like.__create_chunk_list__()  # what torch.distributed.checkpoint asks of a tensor
    place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    own = value[place].to(local_part(like).device, copy=True)  # a copy, or the whole would live as long as the part
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@torch.no_grad()
def fill(target: Tensor, value: Tensor | StoredTensor) -> None:
    """Copy the whole `value` into `target`, of which this rank may hold a part."""
    if isinstance(target, DTensor):
        local_part(target).copy_(local_part(local_shard(value, target)))
    else:
        target.copy_(load_stored(value))


def tensor_slots(task: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield each parameter and buffer of a task: its module, its name there, and the tensor."""
    for module in task.modules():
        for named in (module.named_parameters, module.named_buffers):
            yield from ((module, *item) for item in named(recurse=False, remove_duplicate=False))


def replace(task: nn.Module, change: TensorChange) -> None:
    """Replace each parameter and buffer by `change(tensor)`, as a parameter where it is one; ties stay."""
    made: dict[Tensor, Tensor] = {}  # keeps the tensors alive, so that no id is used twice
    for module, name, tensor in list(tensor_slots(task)):
        if tensor not in made:
            value = change(tensor)
            made[tensor] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        setattr(module, name, made[tensor])


@torch.no_grad()
def make_plain(task: nn.Module, keep: bool) -> None:
    """Replace the DTensors of a task by plain tensors, each whole on the host; every rank calls it.

    Where not to `keep`, by tensors without memory, on the device "meta".
    """

    def change(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if not keep:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        value = whole(tensor).cpu()
        # to_local() of a replicated DTensor, or of a mesh with one rank, returns the shard's own memory
        is_shared = value.untyped_storage().data_ptr() == local_part(tensor).untyped_storage().data_ptr()
        return value.clone() if is_shared else value

    replace(task, change)


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients of an optimizer's parameters."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def total_norm(gradients: Iterable[Tensor], ranks: int, device: torch.device) -> Tensor:
    """Return the 2-norm of all gradients together, the same on each of `ranks` ranks, by one all-reduce on `device`.

    Every rank adds what it holds, divided by how many ranks hold the same: so parameters of several meshes, and plain
    ones that each rank has whole, count once each. The gradients must not be partial sums.
    """
    squares, kind = [], torch.float32
    for gradient in gradients:
        local = local_part(gradient)
        kind = torch.promote_types(kind, local.dtype)
        # half precision would overflow while squaring, at gradients of 256 in float16
        norm = torch.linalg.vector_norm(local, dtype=torch.float32 if local.dtype.itemsize < 4 else None)
        # Squares are added in float64: float32 loses small parameters beside large ones, and then the result would
        # depend on how many ranks the sum is spread over.
        squares.append(norm.to(widest_float(norm.device)).square().to(device) * (parts(gradient) / ranks))
    # with no gradient here, too: others may have some
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=widest_float(device), device=device)
    # on the default group, which has every rank of the mesh: one collective, whatever meshes the parameters have
    dist.all_reduce(total)
    return total.sqrt().to(kind)


def parts(tensor: Tensor) -> int:
    """Return into how many different parts a tensor is dealt out."""
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for axis, placement in enumerate(tensor.placements):
        # _StridedShard (FSDP over tensor parallelism) is no Shard for isinstance, so what is not replicated is asked
        if not placement.is_replicate():
            count *= tensor.device_mesh.size(axis)
    return count


@torch.no_grad()
def clip_norm(optimizer: Optimizer, limit: float, ranks: int, device: torch.device, one_order: bool = False) -> Tensor:
    """Scale the gradients down where their norm is above `limit`; return the norm before.

    `one_order`: compute it from whole gradients, as one process does, so that the number of ranks changes no bit.
    """
    gradients = gradients_of(optimizer)
    norm: Tensor
    if one_order and gradients:
        # one after the other, as no device has room for all; torch's own function has the bits of its clipping
        norms = [nn.utils.get_total_norm([whole(gradient)]) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
    else:
        norm = total_norm(gradients, ranks, device)
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ has it
    for gradient in gradients:
        local = local_part(gradient)
        local.mul_(factor.to(local.device))
    return norm


@torch.no_grad()
def clip_value(optimizer: Optimizer, limit: float) -> None:
    """Limit every number of the gradients to [-limit, limit]."""
    for gradient in gradients_of(optimizer):
        local_part(gradient).clamp_(-limit, limit)


class MeshScaler(torch.amp.GradScaler):
    """Scales losses where every rank holds parts of the gradients: an overflow in one part is one on all ranks.

    The public methods of torch's, whose own look at one rank's gradients on one mesh.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.type)
        self.device = device
        self.factor = super().get_scale()
        self.good_steps = 0
        """Number of steps in a row with only finite gradients."""
        self.found: dict[int, Tensor] = {}
        """Whether a gradient was not finite, by the id of each optimizer whose gradients are unscaled."""

    def scale(self, outputs: Any) -> Any:
        """Return the loss, multiplied."""
        return outputs * self.factor

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients. Raises RuntimeError where they have been since the last update."""
        if id(optimizer) in self.found:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        gradients = [local_part(gradient) for gradient in gradients_of(optimizer)]
        held = [gradient for gradient in gradients if gradient.numel()]  # an empty part has no largest number
        is_bad = (~nn.utils.get_total_norm(held, float("inf")).isfinite()).float().to(self.device)
        if gradients:
            multiply_each(gradients, 1.0 / self.factor)
        # over all ranks, as the loss scale must stay the same on each: an overflow in one shard skips the step
        # everywhere
        dist.all_reduce(is_bad, dist.ReduceOp.MAX)
        self.found[id(optimizer)] = is_bad

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Update the weights, unless a gradient was not finite."""
        if id(optimizer) not in self.found:
            self.unscale_(optimizer)
        return None if self.found[id(optimizer)].item() else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Choose the next factor: a smaller one after an overflow, a larger one after many steps without."""
        overflowed, self.found = any(found.item() for found in self.found.values()), {}
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if new_scale is not None:
            self.factor = float(new_scale)
        elif overflowed:
            self.factor *= self.get_backoff_factor()
        elif self.good_steps == self.get_growth_interval():
            # inf as a factor would make every loss inf or NaN from then on
            self.good_steps, larger = 0, self.factor * self.get_growth_factor()
            self.factor = larger if larger <= torch.finfo(torch.float32).max else self.factor

    def get_scale(self) -> float:
        """Return the factor."""
        return self.factor

    def state_dict(self) -> dict[str, Any]:
        """Return what torch's has."""
        return {**super().state_dict(), "_growth_tracker": self.good_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what torch's or this one had."""
        super().load_state_dict(state_dict)
        self.factor, self.good_steps = float(state_dict["scale"]), int(state_dict["_growth_tracker"])


def step_one_by_one(optimizers: Iterable[Optimizer], always: bool = False) -> None:
    """Have optimizers update one parameter after the other where a group's parameters lie on several meshes, or always.

    torch's `foreach` and `fused` kernels take tensors of one mesh only. Left at None, torch would choose `foreach`
    where all tensors are on an accelerator. Raises ConfigError where the user has chosen one of them.
    """
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        meshes = {parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in group["params"]}
        apart = always or len(meshes) > 1
        chosen = [option for option in ("foreach", "fused") if group.get(option)]
        if apart and chosen:
            raise ConfigError(
                f"{chosen[0]}=True: its kernels take tensors of one mesh, but under this strategy's tensor parallelism "
                f"an optimizer's lie on several. Leave {chosen[0]} out."
            )
        if apart and "foreach" in group:
            group["foreach"] = False
