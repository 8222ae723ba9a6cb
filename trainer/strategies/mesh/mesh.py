"""Mesh: data parallelism, sharding (FSDP2) and tensor parallelism, each along an axis of a DeviceMesh."""

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
    """Return the mesh of all processes, its axes named; every rank calls it."""
    with connections.noting(more=True):
        return init_device_mesh(device_type, sizes, mesh_dim_names=Sizes._fields)


def data_ranks(mesh: DeviceMesh, sizes: Sizes) -> Ranks:
    """Return the ranks that together have every batch once: those that differ from this one on the axes data and shard.

    Every rank calls it, since making a group takes them all.
    """
    count = sizes.data * sizes.shard
    index = mesh.get_local_rank("data") * sizes.shard + mesh.get_local_rank("shard")
    if count in (1, mesh.size()):
        return Ranks(index, count)
    together = mesh.mesh.permute(0, 3, 1, 2).reshape(-1, count).tolist()
    with connections.noting(more=True):
        group, _ = dist.new_subgroups_by_enumeration(together, backend="gloo")  # small values on the host
    return Ranks(index, count, group)


def refuse_optimizers(name: str, task: "Task", optimizers: Sequence[Optimizer], is_pipeline: bool) -> None:
    """Raise ConfigError for optimizers that a strategy that gathers parameters around whole steps cannot use."""
    if optimizers and not task.automatic_optimization:
        raise ConfigError(
            f"strategy {name!r} needs automatic optimization: it gathers parameters around whole steps, which "
            f"training_step would cut. Use strategy ddp."
        )
    if len(optimizers) > 1 and is_pipeline:
        raise ConfigError(
            f"strategy {name!r} takes one optimizer, got {len(optimizers)}: a stage may have no parameter of one of "
            f"them. Use parameter groups of one optimizer, or strategy fsdp or ddp."
        )
    # torchao compiles its update, which goes wrong on an empty part, in torch's fully_shard by hand too (torch 2.13,
    # torchao 0.18)
    compiled = [one for one in optimizers if type(one).__module__.partition(".")[0] == "torchao"]
    empty = [parameter_name for parameter_name, one in task.named_parameters() if not local_part(one).numel()]
    if compiled and empty:
        raise ConfigError(
            f"torchao's {type(compiled[0]).__name__} computes wrong updates where a process has an empty part of a "
            f"parameter, as under strategy {name!r} of {first_names(empty)}. Use an optimizer of torch.optim, or "
            f"strategy ddp."
        )


def refuse_compile(name: str, options: bool | Mapping[str, Any], sizes: Sizes) -> None:
    """Raise ConfigError for compile options that do not work on a mesh."""
    if not isinstance(options, Mapping) or not options.get("blocks"):
        raise ConfigError(
            f"trainer.compile: the hooks by which strategy {name!r} gathers parameters cannot be compiled. The blocks "
            f"between them can: name their classes, as in compile={{'blocks': ['Block']}}."
        )
    if sizes.tensor * sizes.pipeline > 1:
        raise ConfigError(
            f"trainer.compile: torch's compiler fails on layers that are cut over processes; with tensor="
            f"{sizes.tensor} and pipeline={sizes.pipeline} leave it out."
        )


ELEMENTWISE = {
    optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.NAdam, optim.RAdam, optim.Adamax,
    optim.Adadelta, optim.ASGD, optim.Rprop,
}  # fmt: skip
"""Optimizers that update each number by its own gradient and state alone, whatever part of a parameter it is in."""


class MeshStrategy(GroupStrategy):
    """One process for each device, on a mesh with the axes data, shard and tensor.

    The axes `data` and `shard` share out the replicas; `shard` also the parameters, gradients and optimizer states. The
    processes of the axis `tensor` work on the same batches, each on its part of the layers.
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
        """`data`, `shard`, `tensor`: processes on each axis; one may be "auto" and takes what is left.
        `tensor_shards`: parts of each cut layer, fixed for a run; `tensor` processes share them out, with the same bits
        for any that divides their number. None: one for each process.
        `shard_blocks`: the classes whose modules are gathered as one, or how many parameters make such a block.
        `reshard_after_forward`: drop a block's gathered parameters after its forward; None: all but the outermost's.
        `cpu_offload`: keep parts, gradients and optimizer states on the host. `meta_init`: only rank 0
        builds what configure_model makes, and hands the parts out. `whole_at_end`: give every process the whole task
        back when a run ends; False: the weights are in the checkpoints only. `timeout`: in seconds, or those of each
        phase.
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
        """The process group that the mesh was made in."""
        self.among = SINGLE
        self.steps: MeshSteps | None = None
        """The outermost module, which calls the task's steps; None in one process."""
        self.root: FSDPModule | None = None
        """The same module, where it is sharded."""
        self.wrapping: Wrapping | None = None
        self.sends: bool | None = None
        """Whether gradients are sent in the next backward; None: as the step before left it."""
        self.shard_tree: ShardTree | None = None
        """What adds up sharded gradients in one order."""
        self.cut: TensorGradients | None = None
        """The gradients beside layers that are cut over the axis tensor."""
        self.mesh_states = MeshStateDicts(self.asked)
        self.state_dicts: ShardedStateDicts = self.mesh_states

    # --- processes --------------------------------------------------------------------------------------------------
    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Open the process group and lay the mesh; raises ConfigError where the axes do not multiply out."""
        self.sizes = fit_sizes(self.asked, place.world_size, place.nodes)
        shards, processes = self.tensor_shards, self.sizes.tensor
        if shards is not None and (shards < processes or shards % processes):
            raise ConfigError(
                f"strategy mesh: tensor_shards={shards} is not a multiple of tensor={processes}. A run keeps its "
                f"tensor_shards: take a number of processes that divides it."
            )
        super().join(place, devices, precision)
        if place.world_size == 1:
            return
        if not serves_host():
            raise ConfigError(
                f"strategy {self.name!r} also moves tensors on the host, which the process group that exists already "
                f"does not serve: make it by init_process_group() without a backend."
            )
        if self.mesh is None or self.group is not dist.group.WORLD:  # one mesh serves all stages of a trainer
            self.mesh, self.group = make_mesh(self.sizes, self.device.type), dist.group.WORLD
            self.among = data_ranks(self.mesh, self.sizes)
            self.mesh_states.open_writers(place.rank, place.world_size)
        self.data_ranks, self.weight_ranks = self.among, self._ranks_along("data")
        # elsewhere DTensor itself draws other numbers for each shard, and wants equal generators on all ranks
        shard = self.mesh.get_local_rank("shard") if self.device.type == "cpu" else 0
        self.shard = self.mesh.get_local_rank("pipeline") + self.sizes.pipeline * shard
        # a forward gathers parameters from all processes; what it gathers in inference mode could not be trained again
        self.allows_inference_mode, self.compiles_blocks = False, True
        self.has_all_weights = self.sizes.pipeline == 1
        # pipelines run their batches independently unless they share parameters
        self.lockstep = self.data_ranks.size > 1 and (self.has_all_weights or self.sizes.shard > 1)
        # what is gathered is no parameter of an optimizer's, to which a gradient could be confined
        self.takes_one_loss = self.data_ranks.size > 1
        if self.precision.scaler is not None:
            self.precision.scaler = dtensors.MeshScaler(self.device)

    def _ranks_along(self, axis: str) -> Ranks:
        """Return the processes that differ from this one on an axis alone."""
        if self.mesh is None:
            return SINGLE
        return Ranks(self.mesh.get_local_rank(axis), getattr(self.sizes, axis), self.mesh.get_group(axis))

    # --- the task ---------------------------------------------------------------------------------------------------
    def build_model(self, task: "Task") -> None:
        """Build the task's modules; with `meta_init` on rank 0 only, elsewhere no weight takes memory."""
        if not self.meta_init:
            super().build_model(task)
            return
        # On meta a draw consumes nothing of the generator, so ranks would differ from now on: all take rank 0's state.
        # Building there and resetting parameters shard by shard would need no whole model, but draws other numbers than
        # one process does.
        with nullcontext() if self.place.rank == 0 else torch.device("meta"):
            task.configure_model()
        torch.set_rng_state(self.collectives.broadcast(torch.get_rng_state()))
        build_remote_modules(task, task.trainer.seed)

    def place_task(self, task: "Task") -> None:
        """Give this process its part of the task's weights, which are those of rank 0."""
        if self.mesh is None:
            super().place_task(task)
            self.wrapping = Wrapping(task)
            self._cut(task)
            self.wrapping.done()
            return
        self.task = task
        self._sync_batch_norm(task)
        if self.place.rank == 0:  # which has the values for all
            refuse_empty(task)
        if self.lockstep:
            require_dimensions(task, self.name)
        if self.lockstep or self.sizes.tensor > 1:  # whose ranks compare gradients, which torch cannot broadcast sparse
            require_dense_gradients(task, [f"strategy={self.name}"])
        options = task.trainer.compile
        if options:
            refuse_compile(self.name, options, self.sizes)
        self.precision.place(task)
        values = weight_broadcast.send_off(task) if self.meta_init else None
        if not self.meta_init:
            # before anything is cut: fully_shard takes each rank's part out of that rank's own weights, without a
            # message
            self.collectives.broadcast_tensors([*task.parameters(), *task.buffers()])
        # taken before the first wrapper, and closed by done() after the last: what came in between is undone at the end
        self.wrapping = Wrapping(task)
        # inside FSDP's hooks: a block's forward is compiled, gathering it is not
        if isinstance(options, Mapping):
            kernels.compile_forwards(task, options)
        # FSDP comes last: fully_shard takes DTensors of another axis of the same mesh, parallelize_module does not
        self._cut(task)
        self._shard(task, self.mesh[("data", "shard") if self.sizes.data > 1 else ("shard",)])
        self.wrapping.done()
        if self.meta_init:
            parts = torch.device("cpu") if self.sharding.cpu_offload and self.data_ranks.size > 1 else self.device
            weight_broadcast.bring_back(task, values if self.place.rank == 0 else None, self.device, parts)

    def _cut(self, task: "Task") -> None:
        """Cut the layers that the plan names, over the axis tensor."""
        if not self.tensor_shards and self.sizes.tensor == 1:
            return
        words = words_of(task, self.tensor_shards or self.sizes.tensor, in_shards=bool(self.tensor_shards))
        if self.mesh is not None and self.sizes.tensor > 1:
            apply_plan(task, self.mesh["tensor"], words)
        if self.tensor_shards:
            TensorShards(self.tensor_shards, self._ranks_along("tensor")).attach(task, words)

    def _shard(self, task: "Task", mesh: DeviceMesh) -> None:
        """Shard the task's parameters over a mesh of the axes data and shard."""
        # The outermost block is this wrapper, not the task: fully_shard gathers in a module's forward, and a
        # training_step that calls self.body(x) and never self(x) would let each child take itself for the root.
        self.steps = MeshSteps(task)
        if self.data_ranks.size > 1:
            try:
                self.root = self.sharding.apply(self.steps, task, mesh)
            except NotImplementedError as error:  # of a class of quantized weights
                weights = ((name, type(weight).__name__) for name, weight in task.named_parameters())
                kinds = [f"{name} ({kind})" for name, kind in weights if kind not in ("Parameter", "DTensor")]
                raise ConfigError(
                    f"strategy={self.name} cuts each weight into parts, which its class does not do: "
                    f"{first_names(kinds)}. Use ddp or zero1, which keep weights whole. It said: {error}"
                ) from error
            # for calls of the task itself from hooks (sanity images, generation), which do not come through MeshSteps
            task.register_forward_pre_hook(self.steps.before_forward, prepend=True)
            task.register_forward_hook(self.steps.after_forward, always_call=True)
        elif not self.meta_init:
            task.to(self.device)

    def prepare(self, task: "Task", optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Prepare the placed task for training. Raises ConfigError for options that exclude each other."""
        if self.mesh is not None:
            if task.trainer.reproducible == "bitwise" and optimizers and task.automatic_optimization:
                self._refuse_bitwise(task, optimizers)
            refuse_optimizers(self.name, task, optimizers, self.sizes.pipeline > 1)
            if self.data_ranks.size > 1 and self.sizes.tensor * self.sizes.pipeline == 1:
                unknown = [one for one in optimizers if type(one) not in ELEMENTWISE]
                trials.refuse_unknown_arithmetic(self.name, unknown, self.collectives)
        # on one process of them, too: other kernels may have other bits
        dtensors.step_one_by_one(optimizers, always=self.tensor_shards is not None)
        prepared = super().prepare(task, optimizers)
        self.flat_sum = None  # gradients meet in backward
        return prepared

    def _share_weights(self, task: "Task") -> None:
        """Do nothing: `place_task` has shared the weights out."""

    def _refuse_bitwise(self, task: "Task", optimizers: Sequence[Optimizer]) -> None:
        """Raise ConfigError for what changes the last bits with the number of processes."""
        kinds = {parameter.dtype for parameter in task.parameters() if parameter.requires_grad}
        odd = [type(one).__name__ for one in optimizers if type(one) not in ELEMENTWISE]
        fused = any(group.get("fused") for one in optimizers for group in one.param_groups)
        axes = [axis for axis in ("data", "pipeline") if getattr(self.sizes, axis) > 1]
        reasons = {
            f"along the axis {' and '.join(axes)} torch adds up in an order of its own, unlike along shard": axes,
            f"without tensor_shards (such as tensor_shards={self.sizes.tensor}) the processes of tensor cut the sums": (
                self.sizes.tensor > 1 and self.tensor_shards is None
            ),
            "cpu_offload updates weights on the host, one process on its device": (
                self.sharding.cpu_offload and self.device.type != "cpu"
            ),
            f"{', '.join(odd)} may compute with more than one number of a parameter at a time": odd,
            "fused optimizers round the last numbers of a part otherwise than those within it": (
                fused and self.device.type == "cpu"
            ),
            "norms of gradients of several types have no order of their own in torch": len(kinds) > 1,
        }
        found = "; ".join(reason for reason, holds in reasons.items() if holds)
        if found:
            raise ConfigError(
                f"reproducible: bitwise under strategy {self.name!r}: {found}. Leave that out, or use strategy ddp or "
                f"zero1, or reproducible: order."
            )

    def regroup(self, layout: Layout | None, place: Place | None = None) -> None:
        """Attach to the parameters that are trained now."""
        self.sends, self.gradients_in_parts = None, self.mesh is not None
        super().regroup(layout, place)
        if self.sizes.tensor > 1 and self.mesh is not None and self.task is not None:
            self.cut = TensorGradients(self.task, plan_of(self.task), self.mesh.get_group("tensor"))

    def _make_tree(self, task: "Task") -> ReplicaTree:
        if self.root is None:
            return super()._make_tree(task)
        self.shard_tree = ShardTree(self.root, self.layout, self.data_ranks.rank)
        return self.shard_tree

    def finish(self) -> None:
        """Give every process the whole task back, on its host, or one without values; every rank calls it."""
        if self.steps is None or self.task is None:
            return
        # evaluations may have left blocks gathered; what make_whole takes is the shards
        for module in sharded(self.steps):
            module.reshard()
        dtensors.make_plain(self.task, keep=self.whole_at_end)

    def teardown(self) -> None:
        """Remove the wrappers from the task's modules."""
        if self.wrapping is not None:
            self.wrapping.undo()
        self.wrapping = self.steps = self.root = self.shard_tree = self.cut = None
        super().teardown()

    # --- the step ---------------------------------------------------------------------------------------------------
    def training_step(self, arguments: Sequence[Any], replica: int | None, last: bool) -> Any:
        """Call training_step, with the parameters of each block gathered while it runs.

        Raises TaskError where it leaves its batch out: the other processes wait in backward for this one's parameters.
        """
        if self.steps is None:
            return super().training_step(arguments, replica, last)
        if self.by_replica:
            self._open_replica(replica)
        if self.shard_tree is not None:
            self.shard_tree.open_batch(is_masked=replica is None)
        elif self.sends is not last and self.root is not None:
            self.root.set_requires_gradient_sync(
                last
            )  # visits every module of the task, so only where something changes
        self.sends = last
        with self.precision.forward_context():
            output = self.steps("training_step", *arguments)
        if output is None and self.data_ranks.size > 1:
            raise TaskError(
                f"training_step returned None, which leaves its batch out; under strategy {self.name!r} the other "
                f"processes wait for this one in backward. Return the loss times 0.0 instead."
            )
        return output

    def end_step(self) -> None:
        """Sum the gradients of uncut parameters beside cut layers, and complete the buffers of the step."""
        if self.cut is not None:
            self.cut.complete()
        super().end_step()

    def abandon_step(self) -> None:
        """Drop the gradients of the batches of a step that ends before its last one."""
        super().abandon_step()
        if self.root is not None:
            drop_unsent_gradients(self.root)

    def evaluation_step(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call the step `name` of the task."""
        if self.steps is None:
            return super().evaluation_step(name, arguments)
        with self.precision.forward_context():
            output = self.steps(name, *arguments)
        if self.root is not None:
            self.root.reshard()  # no backward will drop what the outermost block has gathered
        return output

    def clip(self, optimizer: Optimizer, limit: float, algorithm: str) -> Tensor | None:
        """Clip the gradients of `optimizer`'s parameters by the norm of all their parts, or by value."""
        if self.mesh is None:
            return super().clip(optimizer, limit, algorithm)
        if algorithm == "value":
            dtensors.clip_value(optimizer, limit)
            return None
        # the ranks of a pipeline have gradients of different parameters
        ranks = self.place.world_size // self.sizes.pipeline
        return dtensors.clip_norm(optimizer, limit, ranks, self.device, self.one_order)


class MeshSteps(nn.Module):
    """Calls the steps of a task, as the forward of the outermost sharded module."""

    def __init__(self, task: "Task") -> None:
        super().__init__()
        self.task, self.inside = task, False

    def forward(self, name: str, *arguments: Any) -> Any:
        """Return what the step `name` returns."""
        self.inside = True
        try:
            return getattr(self.task, name)(*arguments)
        finally:
            self.inside = False

    def before_forward(self: Any, task: nn.Module, inputs: Any) -> None:
        """Gather the outermost parameters where a hook calls the task itself, outside of a step."""
        if not self.inside:
            self.unshard()

    def after_forward(self: Any, task: nn.Module, inputs: Any, output: Any) -> None:
        """Drop the gathered parameters again."""
        if not self.inside:
            self.reshard()


class FSDPStrategy(MeshStrategy):
    """Parameters, gradients and optimizer states sharded over all processes, each of which has its own replicas."""

    name = "fsdp"

    def __init__(self, **options: Any) -> None:
        """The arguments are those of strategy mesh."""
        super().__init__(shard="auto", **options)
