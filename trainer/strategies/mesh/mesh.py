"""Data parallelism, sharding (FSDP2) and tensor parallelism, each along an axis of a DeviceMesh."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from ....base.errors import ConfigError, TaskError, first_names
from ....base.place import Place
from ....base.tensors import local_part
from ...data.sampling import Layout
from ...optimization import kernels
from ...optimization.model_checks import require_dense_gradients, require_dimensions
from ...processes import connections
from ...processes.ranks import SINGLE, Phase, Ranks, serves_host
from ..group import GroupStrategy
from ..servers import build_remote_modules
from ..state_dicts import ShardedStateDicts
from ..strategy import refuse_empty
from ..tree import ReplicaTree
from . import dtensors, trials, weight_broadcast
from .shard_tree import ShardTree
from .sharding import Sharding, drop_unsent_gradients, sharded
from .sizes import Size, Sizes, fit_sizes, read_sizes
from .state_dicts import MeshStateDicts
from .tensor_gradients import TensorGradients
from .tensor_plan import apply_plan, plan_of, words_of
from .tensor_shards import TensorShards
from .unwrap import Wrapping

if TYPE_CHECKING:
    from ....tasks.task import Task


def make_mesh(sizes: Sizes, device_type: str) -> DeviceMesh:
    """Return the mesh of all processes, with named axes. All ranks must call this."""
    with connections.noting(more=True):
        return init_device_mesh(device_type, sizes, mesh_dim_names=Sizes._fields)


def data_ranks(mesh: DeviceMesh, sizes: Sizes) -> Ranks:
    """Return the ranks along the data and shard axes, which together process every batch once.

    The returned ranks have the same coordinates along the other axes as this rank. All ranks must call this, because
    creating a group is a collective operation.
    """
    count = sizes.data * sizes.shard
    index = mesh.get_local_rank("data") * sizes.shard + mesh.get_local_rank("shard")
    if count in (1, mesh.size()):
        return Ranks(index, count)
    together = mesh.mesh.permute(0, 3, 1, 2).reshape(-1, count).tolist()
    with connections.noting(more=True):
        group, _ = dist.new_subgroups_by_enumeration(together, backend="gloo")  # for small values on the host
    return Ranks(index, count, group)


def refuse_optimizers(name: str, task: "Task", optimizers: Sequence[Optimizer], is_pipeline: bool) -> None:
    """Raise ConfigError for optimizers that do not work if parameters are gathered once per training_step."""
    if optimizers and not task.automatic_optimization:
        raise ConfigError(
            f"strategy={name} needs automatic optimization: it gathers parameters once per training_step, so weights "
            f"cannot change during training_step. Use strategy=ddp."
        )
    if len(optimizers) > 1 and is_pipeline:
        raise ConfigError(
            f"A pipeline (strategy={name}) supports only one optimizer, got {len(optimizers)}: with several, an "
            f"optimizer might have no parameters in a stage. Use several parameter groups, or strategy=fsdp or ddp."
        )
    # torchao compiles its update, which is wrong for an empty shard, even with plain fully_shard (torch 2.13 and
    # torchao 0.18)
    compiled = [optimizer for optimizer in optimizers if type(optimizer).__module__.partition(".")[0] == "torchao"]
    empty = [parameter for parameter, weight in task.named_parameters() if not local_part(weight).numel()]
    if compiled and empty:
        raise ConfigError(
            f"torchao's {type(compiled[0]).__name__} computes wrong updates if a process has an empty shard, "
            f"and strategy={name} creates empty shards for {first_names(empty)}. Use torch.optim, or strategy=ddp."
        )


def refuse_compile(name: str, options: bool | Mapping[str, Any], sizes: Sizes) -> None:
    """Raise ConfigError for compile options that a mesh does not support."""
    if not isinstance(options, Mapping) or not options.get("blocks"):
        raise ConfigError(
            f"trainer.compile: the hooks that gather parameters in strategy={name} cannot be compiled, but the "
            f"blocks between them can. List the classes of these blocks, as in compile={{'blocks': ['Block']}}."
        )
    if sizes.tensor * sizes.pipeline > 1:
        raise ConfigError(
            f"trainer.compile: torch's compiler fails on layers that are split across processes. With "
            f"tensor={sizes.tensor} and pipeline={sizes.pipeline}, leave compile out."
        )


ELEMENTWISE = {
    optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.NAdam, optim.RAdam, optim.Adamax,
    optim.Adadelta, optim.ASGD, optim.Rprop,
}  # fmt: skip
"""Optimizers that update each element using only its own gradient and state, so sharding does not change results."""


class MeshStrategy(GroupStrategy):
    """One process per device, on a mesh with data, shard and tensor axes.

    Replicas are divided along `data` and `shard`; parameters, gradients and optimizer states are sharded along `shard`.
    Processes along `tensor` work on the same batches, each with a shard of the layers in the tensor plan.
    """

    name = "mesh"

    def __init__(  # noqa: PLR0913 (each a key of the config)
        self,
        *,
        data: Size = 1,
        shard: Size = 1,
        tensor: Size = 1,
        tensor_shards: int | None = None,
        shard_blocks: list[str] | int = 1_000_000,
        reshard_after_forward: bool | int | None = None,
        cpu_offload: bool = False,
        meta_init: bool = False,
        whole_at_end: bool = True,
        process_group_backend: str | None = None,
        init_method: str | None = None,
        timeout: float | Mapping[Phase, float] = 1800.0,
    ) -> None:
        """Set the strategy's options.

        Args:
            data, shard, tensor: number of processes along each axis. One axis may be "auto", which uses all remaining
                processes.
            tensor_shards: number of shards per tensor-parallel layer, fixed for the entire run. Results are bitwise
                identical for any `tensor` that divides that number. None selects one shard per process.
            shard_blocks: classes of the modules that are each gathered as a block, or the minimum number of parameters
                in a block.
            reshard_after_forward: whether to free a block's gathered parameters after its forward pass. None frees the
                parameters of all blocks except the outermost one.
            cpu_offload: whether to store shards, gradients and optimizer states on the host.
            meta_init: whether to allocate the modules created in configure_model only on rank 0, and broadcast their
                shards.
            whole_at_end: whether every process has the full weights after a run. If False, only the checkpoints
                contain the weights.
            timeout: number of seconds a rank waits for other ranks, or a mapping from phases to seconds, as for ddp.
        """
        super().__init__(process_group_backend, init_method, timeout)
        self.asked: dict[str, Size] = {"data": data, "shard": shard, "tensor": tensor, "pipeline": 1}
        read_sizes(self.asked)
        self.tensor_shards = tensor_shards
        self.sharding = Sharding(shard_blocks, cpu_offload, reshard_after_forward)
        self.meta_init, self.whole_at_end = meta_init, whole_at_end
        self.sizes = Sizes(1, 1, 1, 1)
        self.mesh: DeviceMesh | None = None
        self.group: dist.ProcessGroup | None = None
        """The default process group when the mesh was created."""
        self.among = SINGLE
        self.steps: MeshSteps | None = None
        """The outermost module, which calls the task's steps; None in one process."""
        self.root: FSDPModule | None = None
        """The outermost module if it is sharded, otherwise None."""
        self.wrapping: Wrapping | None = None
        self.sends: bool | None = None
        """Whether FSDP reduces gradients in the next backward pass; None if not set yet for this layout."""
        self.shard_tree: ShardTree | None = None
        """Sums sharded gradients in a fixed order."""
        self.tensor_gradients: TensorGradients | None = None
        """Gradients of parameters that are not split along the `tensor` axis."""
        self.mesh_states = MeshStateDicts(self.asked)
        self.state_dicts: ShardedStateDicts = self.mesh_states

    # --- processes --------------------------------------------------------------------------------------------------
    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Join the process group and create the mesh. Raises ConfigError if the axes do not match the world size."""
        self.sizes = fit_sizes(self.asked, place.world_size, place.nodes)
        shards, processes = self.tensor_shards, self.sizes.tensor
        if shards is not None and (shards < processes or shards % processes):
            raise ConfigError(
                f"strategy=mesh: tensor_shards={shards} is not a multiple of tensor={processes}. tensor_shards is "
                f"fixed for a run. Set tensor to a divisor of {shards}."
            )
        super().join(place, devices, precision)
        if place.world_size == 1:
            return
        if not serves_host():
            raise ConfigError(
                f"strategy={self.name} also communicates CPU tensors, which your process group does not support. "
                f"Call init_process_group() without a backend."
            )
        if self.mesh is None or self.group is not dist.group.WORLD:  # one mesh serves all calls of a trainer
            self.mesh, self.group = make_mesh(self.sizes, self.device.type), dist.group.WORLD
            self.among = data_ranks(self.mesh, self.sizes)
            self.mesh_states.open_writers(place.rank, place.world_size)
        self.data_ranks, self.weight_ranks = self.among, self._ranks_along("data")
        # on accelerators, DTensor draws different numbers for each shard from generators that are equal on all ranks
        shard = self.mesh.get_local_rank("shard") if self.device.type == "cpu" else 0
        self.shard = self.mesh.get_local_rank("pipeline") + self.sizes.pipeline * shard
        # parameters that are gathered in inference mode could no longer be trained
        self.allows_inference_mode, self.compiles_blocks = False, True
        self.has_all_weights = self.sizes.pipeline == 1
        # pipelines run their batches independently unless they share parameters
        self.lockstep = self.data_ranks.size > 1 and (self.has_all_weights or self.sizes.shard > 1)
        # backward's `inputs` cannot select gradients, because the gathered tensors are not the optimizer's parameters
        self.takes_one_loss = self.data_ranks.size > 1
        if self.precision.scaler is not None:
            self.precision.scaler = dtensors.MeshScaler(self.device)

    def _ranks_along(self, axis: str) -> Ranks:
        """Return the processes along an axis of the mesh that share this process's coordinates along the other axes."""
        if self.mesh is None:
            return SINGLE
        return Ranks(self.mesh.get_local_rank(axis), getattr(self.sizes, axis), self.mesh.get_group(axis))

    # --- the task ---------------------------------------------------------------------------------------------------
    def build_model(self, task: "Task") -> None:
        """Build the task's modules. If `meta_init` is set, only rank 0 allocates weights."""
        if not self.meta_init:
            super().build_model(task)
            return
        # Draws on the meta device do not advance the generator, so rank 0's state is broadcast afterwards. Resetting
        # parameters shard by shard would avoid the full model on rank 0, but it would draw different numbers than a
        # single process does.
        with nullcontext() if self.place.rank == 0 else torch.device("meta"):
            task.configure_model()
        torch.set_rng_state(self.collectives.broadcast(torch.get_rng_state()))
        build_remote_modules(task, task.trainer.seed)

    def place_task(self, task: "Task") -> None:
        """Shard the task's weights. This process keeps its shard of rank 0's weights."""
        if self.mesh is None:
            super().place_task(task)
            self.wrapping = Wrapping(task)
            self._cut(task)
            self.wrapping.done()
            return
        self.task = task
        self._sync_batch_norm(task)
        if self.place.rank == 0:  # the source of all values
            refuse_empty(task)
        if self.lockstep:
            require_dimensions(task, self.name)
        if self.lockstep or self.sizes.tensor > 1:  # tensor ranks compare gradients; torch cannot broadcast sparse ones
            require_dense_gradients(task, [f"strategy={self.name}"])
        options = task.trainer.compile
        if options:
            refuse_compile(self.name, options, self.sizes)
        self.precision.place(task)
        values = weight_broadcast.release_values(task) if self.meta_init else None
        if not self.meta_init:
            # before sharding: fully_shard takes each rank's shard from that rank's weights, without communication
            self.collectives.broadcast_tensors([*task.parameters(), *task.buffers()])
        # records the wrappers added before done(), which `teardown` removes
        self.wrapping = Wrapping(task)
        # inside FSDP's hooks, so that a block's forward is compiled but gathering its parameters is not
        if isinstance(options, Mapping):
            kernels.compile_forwards(task, options)
        # FSDP last: fully_shard accepts DTensors of another axis of the same mesh, parallelize_module does not
        self._cut(task)
        self._shard(task, self.mesh[("data", "shard") if self.sizes.data > 1 else ("shard",)])
        self.wrapping.done()
        if self.meta_init:
            parts = torch.device("cpu") if self.sharding.cpu_offload and self.data_ranks.size > 1 else self.device
            weight_broadcast.broadcast_values(task, values if self.place.rank == 0 else None, self.device, parts)

    def _cut(self, task: "Task") -> None:
        """Shard the layers in the tensor plan along the `tensor` axis."""
        if not self.tensor_shards and self.sizes.tensor == 1:
            return
        words = words_of(task, self.tensor_shards or self.sizes.tensor, in_shards=bool(self.tensor_shards))
        if self.mesh is not None and self.sizes.tensor > 1:
            apply_plan(task, self.mesh["tensor"], words)
        if self.tensor_shards:
            TensorShards(self.tensor_shards, self._ranks_along("tensor")).attach(task, words)

    def _shard(self, task: "Task", mesh: DeviceMesh) -> None:
        """Shard the task's parameters across a mesh with data and shard axes."""
        # The outermost block is this wrapper, not the task: fully_shard gathers in a module's forward. If training_step
        # called self.body(x) but never self(x), each child would become a root.
        self.steps = MeshSteps(task)
        if self.data_ranks.size > 1:
            try:
                self.root = self.sharding.apply(self.steps, task, mesh)
            except NotImplementedError as error:  # raised by some classes of quantized weights
                weights = ((name, type(weight).__name__) for name, weight in task.named_parameters())
                kinds = [f"{name} ({kind})" for name, kind in weights if kind not in ("Parameter", "DTensor")]
                raise ConfigError(
                    f"strategy={self.name} shards each weight, but these weights' classes do not support sharding: "
                    f"{first_names(kinds)}. Use strategy=ddp or zero1, which do not shard weights. torch: {error}"
                ) from error
            # for hooks that call the task directly, bypassing MeshSteps (sanity images, generation)
            task.register_forward_pre_hook(self.steps.before_forward, prepend=True)
            task.register_forward_hook(self.steps.after_forward, always_call=True)
        elif not self.meta_init:
            task.to(self.device)

    def prepare(self, task: "Task", optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Prepare the task after it has been placed. Raises ConfigError for optimizers that do not work on the mesh."""
        if self.mesh is not None:
            if task.trainer.reproducible == "bitwise" and optimizers and task.automatic_optimization:
                self._refuse_bitwise(task, optimizers)
            refuse_optimizers(self.name, task, optimizers, self.sizes.pipeline > 1)
            if self.data_ranks.size > 1 and self.sizes.tensor * self.sizes.pipeline == 1:
                unknown = [optimizer for optimizer in optimizers if type(optimizer) not in ELEMENTWISE]
                trials.refuse_unknown_arithmetic(self.name, unknown, self.collectives)
        # with tensor_shards even in a single process, because different kernels may round differently
        dtensors.disable_foreach(optimizers, always=self.tensor_shards is not None)
        prepared = super().prepare(task, optimizers)
        self.flat_sum = None  # gradients are reduced in the backward pass
        return prepared

    def _share_weights(self, task: "Task") -> None:
        """Do nothing, because `place_task` has already distributed the weights."""

    def _refuse_bitwise(self, task: "Task", optimizers: Sequence[Optimizer]) -> None:
        """Raise ConfigError for settings that make the low-order bits of results depend on the number of processes."""
        dtypes = {parameter.dtype for parameter in task.parameters() if parameter.requires_grad}
        mixing = [type(optimizer).__name__ for optimizer in optimizers if type(optimizer) not in ELEMENTWISE]
        fused = any(group.get("fused") for optimizer in optimizers for group in optimizer.param_groups)
        axes = [axis for axis in ("data", "pipeline") if getattr(self.sizes, axis) > 1]
        reasons = {
            f"along {' and '.join(f'the {axis} axis' for axis in axes)}, torch chooses the summation order": axes,
            f"without tensor_shards (such as tensor_shards={self.sizes.tensor}), sums depend on the tensor size": (
                self.sizes.tensor > 1 and self.tensor_shards is None
            ),
            "cpu_offload updates weights on the host, but a single process updates them on its device": (
                self.sharding.cpu_offload and self.device.type != "cpu"
            ),
            f"{', '.join(mixing)} may combine several elements of a parameter": mixing,
            "fused optimizers round the last elements of a shard differently from the others": (
                fused and self.device.type == "cpu"
            ),
            "the norm of gradients of several dtypes has no fixed order in torch": len(dtypes) > 1,
        }
        violations = "; ".join(reason for reason, holds in reasons.items() if holds)
        if violations:
            raise ConfigError(
                f"strategy={self.name} cannot be bitwise reproducible here: {violations}. Change these settings, or "
                f"use strategy=ddp or zero1, or set reproducible=order."
            )

    def regroup(self, layout: Layout | None, place: Place | None = None) -> None:
        """Attach gradient reductions to the trainable parameters."""
        self.sends, self.gradients_in_parts = None, self.mesh is not None
        super().regroup(layout, place)
        if self.sizes.tensor > 1 and self.mesh is not None and self.task is not None:
            self.tensor_gradients = TensorGradients(self.task, plan_of(self.task), self.mesh.get_group("tensor"))

    def _make_tree(self, task: "Task") -> ReplicaTree:
        if self.root is None:
            return super()._make_tree(task)
        self.shard_tree = ShardTree(self.root, self.layout, self.data_ranks.rank)
        return self.shard_tree

    def finish(self) -> None:
        """Replace sharded weights with full weights on the host, or with meta tensors if `whole_at_end` is False.

        All ranks must call this.
        """
        if self.steps is None or self.task is None:
            return
        # evaluations may have left blocks gathered, but make_plain reads the shards
        for module in sharded(self.steps):
            module.reshard()
        dtensors.make_plain(self.task, keep=self.whole_at_end)

    def teardown(self) -> None:
        """Remove the wrappers from the task's modules."""
        if self.wrapping is not None:
            self.wrapping.undo()
        self.wrapping = self.steps = self.root = self.shard_tree = self.tensor_gradients = None
        super().teardown()

    # --- the step ---------------------------------------------------------------------------------------------------
    def training_step(self, arguments: Sequence[Any], replica: int | None, last: bool) -> Any:
        """Call training_step. Each block's parameters are gathered while the block runs.

        Raises TaskError if training_step skips its batch, because other processes would wait for this process in the
        backward pass.
        """
        if self.steps is None:
            return super().training_step(arguments, replica, last)
        if self.by_replica:
            self._open_replica(replica)
        if self.shard_tree is not None:
            self.shard_tree.open_batch(is_masked=replica is None)
        elif self.sends is not last and self.root is not None:
            self.root.set_requires_gradient_sync(last)  # only if it changes, because this visits every module
        self.sends = last
        with self.precision.forward_context():
            output = self.steps("training_step", *arguments)
        if output is None and self.data_ranks.size > 1:
            raise TaskError(
                f"training_step returned None to skip its batch, but under strategy={self.name}, the other processes "
                f"wait for this process in the backward pass. Return the loss times 0.0 instead."
            )
        return output

    def end_step(self) -> None:
        """Sum partial gradients along the `tensor` axis and synchronize the buffers."""
        if self.tensor_gradients is not None:
            self.tensor_gradients.complete()
        super().end_step()

    def abandon_step(self) -> None:
        """Drop the gradients of an unfinished step."""
        super().abandon_step()
        if self.root is not None:
            drop_unsent_gradients(self.root)

    def evaluation_step(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call the task's method `name`, such as "validation_step"."""
        if self.steps is None:
            return super().evaluation_step(name, arguments)
        with self.precision.forward_context():
            output = self.steps(name, *arguments)
        if self.root is not None:
            self.root.reshard()  # no backward pass will free the parameters of the outermost block
        return output

    def clip(self, optimizer: Optimizer, limit: float, algorithm: str) -> Tensor | None:
        """Clip the gradients of `optimizer`'s parameters by value, or by the norm over all shards."""
        if self.mesh is None:
            return super().clip(optimizer, limit, algorithm)
        if algorithm == "value":
            dtensors.clip_value(optimizer, limit)
            return None
        # ranks of a pipeline have gradients for different parameters
        ranks = self.place.world_size // self.sizes.pipeline
        return dtensors.clip_norm(optimizer, limit, ranks, self.device, self.one_order)


class MeshSteps(nn.Module):
    """The outermost sharded module. Its forward method calls the task's steps."""

    def __init__(self, task: "Task") -> None:
        super().__init__()
        self.task, self.inside = task, False

    def forward(self, name: str, *arguments: Any) -> Any:
        """Call the task's method `name` and return its result."""
        self.inside = True
        try:
            return getattr(self.task, name)(*arguments)
        finally:
            self.inside = False

    def before_forward(self: Any, task: nn.Module, inputs: Any) -> None:
        """Gather the outermost block's parameters if a hook calls the task outside a step."""
        if not self.inside:
            self.unshard()

    def after_forward(self: Any, task: nn.Module, inputs: Any, output: Any) -> None:
        """Free the gathered parameters."""
        if not self.inside:
            self.reshard()


class FSDPStrategy(MeshStrategy):
    """Shards parameters, gradients and optimizer states across all processes. Each process runs its own replicas."""

    name = "fsdp"

    def __init__(self, **options: Any) -> None:
        """Accept the mesh strategy's arguments."""
        super().__init__(shard="auto", **options)
