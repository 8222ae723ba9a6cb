"""Sharding by torch's FSDP2: which modules are blocks, and how they are sharded.

A block's parameters are gathered together before its forward and its backward, and dropped after each. After Zhao et
al. 2023, "PyTorch FSDP" (https://arxiv.org/abs/2304.11277) and https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ....base.errors import ConfigError
from ....base.tensors import map_tensors
from ....base.torch_private import is_view
from ...accelerators import pins_memory
from ...optimization.kernels import modules_named
from .dtensors import tensor_slots

Blocks = Sequence[str] | int
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""They have no forward of their own, which is where a block's parameters are gathered."""


@dataclass(frozen=True)
class Sharding:
    """Options of `fully_shard`: how parameters are sharded."""

    blocks: Blocks
    cpu_offload: bool
    reshard_after_forward: bool | int | None

    def apply(self, root: nn.Module, task: nn.Module, mesh: DeviceMesh) -> FSDPModule:
        """Shard the blocks of `task`, and what is left as one more with `root`, whose forward calls it; return that."""
        # no dtypes: a mixed precision is autocast's, as in one process, which computes with weights of full precision
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
        pinned = mesh.device_type != "cpu" and pins_memory()
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=pinned) if self.cpu_offload else OffloadPolicy()
        for block in find_sharded_blocks(task, self.blocks):
            block.register_forward_hook(owned)
            # the hook comes before fully_shard's own: hooks run in the order of registration, and FSDP's must see the
            # copy
            fully_shard(block, reshard_after_forward=self.reshard_after_forward, **options)
        root.register_forward_hook(owned)
        outermost = fully_shard(root, reshard_after_forward=self.reshard_after_forward, **options)
        for module in sharded(root):
            # Sums, not means: the loss of a batch is weighted by its samples already. Forced, since with a factor torch
            # would else take ReduceOp.PREMUL_SUM, which only NCCL has.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        return outermost


def owned(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return a block's output without views, which a Linear may return.

    The hooks by which backward gathers a block's parameters are on its output; an operation in place on a view of it
    would lose them.
    """
    return map_tensors(output, lambda one: one.clone() if one.requires_grad and is_view(one) else one)


def sharded(root: Any) -> Iterator[Any]:
    """Yield the modules that are blocks, the root among them."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def drop_unsent_gradients(root: Any) -> None:
    """Drop the gradients that batches have left without sending them, between a backward and the next forward."""
    for block in sharded(root):
        # FSDP keeps them with a block's gathered parameters, which the block has only while they are gathered
        parts = set(block.parameters())
        block.unshard()
        for gathered in set(block.parameters()) - parts:
            gathered.grad = None
        block.reshard()


def find_sharded_blocks(task: nn.Module, blocks: Blocks) -> list[nn.Module]:
    """Return the modules that become blocks, inner ones first, as `fully_shard` wants them.

    By class name; or by size: from the inside out, what has at least so many parameters that no block has yet. Single
    layers are left to the module around them: fewer messages, each larger.
    """
    places = Counter(id(tensor) for *_, tensor in tensor_slots(task))
    if not isinstance(blocks, int):
        named = modules_named(task, list(blocks), "shard_blocks")
        for module in named:
            if shares(module, places):
                raise ConfigError(
                    f"shard_blocks: a {type(module).__name__} shares a parameter with a module outside of it, for "
                    f"which one block cannot gather it. Leave this class out: the rest is gathered with the whole task."
                )
        return named[::-1]
    found: list[nn.Module] = []
    taken: set[int] = set()

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        own = {id(parameter): parameter.numel() for parameter in module.parameters() if id(parameter) not in taken}
        inner = module is not task and any(True for _ in module.children()) and not isinstance(module, CONTAINERS)
        # a tied weight gathered by two blocks would be freed by the first while the second still needs it
        if inner and sum(own.values()) >= blocks and not shares(module, places):
            found.append(module)
            taken.update(own)

    visit(task)
    return found


def shares(module: nn.Module, places: Counter[int]) -> bool:
    """Return whether a module outside shares a tensor with this one; `places` counts the uses of a task's tensors."""
    inside = Counter(id(tensor) for *_, tensor in tensor_slots(module))
    return any(places[tensor] > count for tensor, count in inside.items())
