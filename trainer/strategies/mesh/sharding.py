"""Sharding with torch's FSDP2: how blocks are chosen and which options are passed to fully_shard.

A block's parameters are gathered together before its forward and backward passes, and freed after each pass.
See Zhao et al. 2023, "PyTorch FSDP" (https://arxiv.org/abs/2304.11277), and
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
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
"""Modules without a forward method, which therefore cannot gather parameters as a block."""


@dataclass(frozen=True)
class Sharding:
    """Options of `fully_shard`."""

    blocks: Blocks
    cpu_offload: bool
    reshard_after_forward: bool | int | None

    def apply(self, root: nn.Module, task: nn.Module, mesh: DeviceMesh) -> FSDPModule:
        """Shard the blocks of `task`, and then shard `root` with all remaining parameters. Return the sharded `root`.

        The forward method of `root` must call the task.
        """
        # no dtypes: autocast handles mixed precision on full-precision weights, as in a single process
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
        pinned = mesh.device_type != "cpu" and pins_memory()
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=pinned) if self.cpu_offload else OffloadPolicy()
        for block in find_sharded_blocks(task, self.blocks):
            # registered before fully_shard adds its hooks, which must see the copy
            block.register_forward_hook(without_views)
            fully_shard(block, reshard_after_forward=self.reshard_after_forward, **options)
        root.register_forward_hook(without_views)
        outermost = fully_shard(root, reshard_after_forward=self.reshard_after_forward, **options)
        for module in sharded(root):
            # Sums, not means, because losses are already weighted by samples. Forced, because with a factor torch uses
            # ReduceOp.PREMUL_SUM, which only NCCL has.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        return outermost


def without_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return a block's output with views replaced by copies. For example, a Linear may return a view.

    In the backward pass, hooks on a block's output gather the block's parameters. An in-place operation on a view would
    discard the hooks.
    """
    return map_tensors(output, lambda tensor: tensor.clone() if tensor.requires_grad and is_view(tensor) else tensor)


def sharded(root: Any) -> Iterator[Any]:
    """Yield the sharded blocks in `root`, including `root` itself."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def drop_unsent_gradients(root: Any) -> None:
    """Drop gradients that have not been reduced. Call this between a backward pass and the next forward pass."""
    for block in sharded(root):
        # FSDP keeps them on a block's gathered parameters, which are only accessible while gathered
        shards = set(block.parameters())
        block.unshard()
        for gathered in set(block.parameters()) - shards:
            gathered.grad = None
        block.reshard()


def find_sharded_blocks(task: nn.Module, blocks: Blocks) -> list[nn.Module]:
    """Return the modules to shard as blocks, inner modules first, as `fully_shard` requires.

    Args:
        blocks: class names, or the minimum number of parameters in a block. In the latter case, a module becomes a
            block if it has at least that many parameters outside its inner blocks. A single layer belongs to its
            parent's block, because fewer, larger messages are faster.
    """
    uses = Counter(id(tensor) for *_, tensor in tensor_slots(task))
    if not isinstance(blocks, int):
        named = modules_named(task, list(blocks), "shard_blocks")
        for module in named:
            if shares_tensors(module, uses):
                raise ConfigError(
                    f"shard_blocks: a {type(module).__name__} shares a parameter with a module outside it, and cannot "
                    f"be a block. Remove its class from shard_blocks. The outermost block then gathers its parameters."
                )
        return named[::-1]
    chosen: list[nn.Module] = []
    taken: set[int] = set()

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        sizes = {id(parameter): parameter.numel() for parameter in module.parameters() if id(parameter) not in taken}
        inner = module is not task and any(True for _ in module.children()) and not isinstance(module, CONTAINERS)
        # if two blocks gathered a tied weight, the first would free it while the second still needs it
        if inner and sum(sizes.values()) >= blocks and not shares_tensors(module, uses):
            chosen.append(module)
            taken.update(sizes)

    visit(task)
    return chosen


def shares_tensors(module: nn.Module, uses: Counter[int]) -> bool:
    """Return whether `module` shares a tensor with a module outside it.

    Args:
        uses: number of times the task uses each tensor, keyed by the tensor's id.
    """
    inside = Counter(id(tensor) for *_, tensor in tensor_slots(module))
    return any(uses[tensor] > count for tensor, count in inside.items())
