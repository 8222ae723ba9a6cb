"""Mesh: parameters sharded (FSDP2), layers cut (tensor parallelism), batches dealt out: each an axis of the mesh."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...data import masked
from ...data.sampling import Layout
from ...errors import ConfigError, TaskError
from ...optimization import kernels
from ...processes import own_group
from ...processes.collectives import SINGLE, Collectives, GroupCollectives
from ...processes.environment import Place
from ...processes.sync import Phase
from ...torch_private import drop_sharded_gradients
from ..bitwise.buffers import ReplicaBuffers
from ..group import GroupStrategy
from . import dtensors, weight_broadcast
from .sharding import Sharding, as_sharded, sharded
from .sizes import PLACES, Size, Sizes, fit_sizes, read_sizes
from .tensor_plan import apply_plan
from .unwrap import Wrapping

if TYPE_CHECKING:
    from ....tasks.task import Task


def make_mesh(sizes: Sizes, device_type: str) -> DeviceMesh:
    """Return the mesh of all processes, its axes named; every rank calls it."""
    shape = tuple(getattr(sizes, axis) for axis in PLACES)
    return init_device_mesh(device_type, shape, mesh_dim_names=PLACES)


def data_ranks(sizes: Sizes, rank: int) -> Collectives:
    """Return the ranks that together have every batch once: those that differ from `rank` on the axes data and shard.

    Every rank calls it, since making a group takes them all.
    """
    world, index = prod(sizes), sizes.data_rank(rank)
    if sizes.replicating in (1, world):
        return GroupCollectives(index, sizes.replicating)
    together: dict[tuple[int, int], list[int]] = {}
    for other in range(world):
        place = sizes.place_of(other)
        together.setdefault((place["pipeline"], place["tensor"]), []).append(other)
    mine = None
    for ranks in together.values():
        group = dist.new_group(ranks, backend="gloo")  # small values on the host
        if rank in ranks:
            mine = group
    return GroupCollectives(index, sizes.replicating, mine)


def refuse_mesh_optimizers(name: str, task: "Task", optimizers: Sequence[Optimizer], gathers: bool) -> None:
    """Refuse what a strategy that `gathers` parameters around whole steps cannot do; raises ConfigError."""
    if optimizers and not task.automatic_optimization:
        raise ConfigError(
            f"strategy {name!r} needs automatic optimization: parameters are gathered around the forward and the "
            f"backward of whole steps, which training_step would cut. Use strategy ddp."
        )
    if len(optimizers) > 1 and gathers:
        raise ConfigError(
            f"strategy {name!r} takes one optimizer, got {len(optimizers)}: each of several reaches its own parameters "
            f"only, which torch cannot tell apart while they are gathered. Use parameter groups of one optimizer, or "
            f"strategy ddp."
        )


def refuse_compile(name: str, options: bool | Mapping[str, Any], sizes: Sizes) -> None:
    """Refuse to compile what cannot be; raises ConfigError."""
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


def refuse_empty(task: "Task", rank: int) -> None:
    """Refuse a task whose weights have no values on rank 0, from where they come; raises ConfigError."""
    empty = [name for name, parameter in task.named_parameters() if parameter.is_meta]
    if empty and rank == 0:
        raise ConfigError(
            f"{type(task).__name__} has no values in {empty[0]}: it is on the device meta, where whole_at_end=false "
            f"leaves a task. Take a new one; a checkpoint has its weights."
        )


class MeshStrategy(GroupStrategy):
    """One process a device, on a mesh with the axes data, shard, tensor and pipeline.

    The axes `data` and `shard` share out the replicas; `shard` also the parameters, gradients and optimizer states. The
    processes of the axis `tensor` work on the same batches, each on its part of the layers.
    """

    name = "mesh"
    reads_in_parts = ("state_dict", "optimizer_states")

    def __init__(  # noqa: PLR0913 (each a key of the config)
        self,
        *,
        data: int | Literal["auto"] = 1,
        shard: int | Literal["auto"] = 1,
        tensor: int | Literal["auto"] = 1,
        pipeline: int | Literal["auto"] = 1,
        shard_blocks: list[str] | int = 1_000_000,
        reshard_after_forward: bool | int | None = None,
        cpu_offload: bool = False,
        half_traffic: bool = False,
        find_unused_parameters: bool = False,
        meta_init: bool = False,
        whole_at_end: bool = True,
        process_group_backend: Literal["nccl", "gloo", "mpi"] | None = None,
        init_method: str | None = None,
        timeout: float | Mapping[Phase, float] = 1800.0,
    ) -> None:
        """`data`, `shard`, `tensor`, `pipeline`: processes on each axis; one may be "auto" and takes what is left.
        `shard_blocks`: the classes whose modules are gathered as one, or how many parameters make such a block.
        `reshard_after_forward`: drop a block's gathered parameters after its forward; None: all but the outermost's.
        `cpu_offload`: keep parts, gradients and optimizer states on the host. `half_traffic`: gather in the type of a
        mixed precision. `find_unused_parameters`: some batches leave parameters out. `meta_init`: only rank 0 builds
        what configure_model makes, and hands the parts out. `whole_at_end`: give every process the whole task back when
        a run ends; False: the weights are in the checkpoints only. `timeout`: in seconds, or those of each phase.
        """
        super().__init__(process_group_backend, init_method, timeout)
        self.asked: dict[str, Size] = {"data": data, "shard": shard, "tensor": tensor, "pipeline": pipeline}
        read_sizes(self.asked)
        self.sharding = Sharding(shard_blocks, cpu_offload, reshard_after_forward, half_traffic, find_unused_parameters)
        self.meta_init, self.whole_at_end = meta_init, whole_at_end
        self.sizes = Sizes(1, 1, 1, 1)
        self.mesh: DeviceMesh | None = None
        self.group: dist.ProcessGroup | None = None
        """The process group that the mesh was made in."""
        self.among = SINGLE
        self.saving: Collectives | None = None
        self.steps: MeshSteps | None = None
        """What calls the task's steps, and is the outermost sharded module; None in one process."""
        self.wrapping: Wrapping | None = None
        self.sends = True
        """Whether gradients meet in the next backward."""
        self.between_steps = True
        self.single_tensor_groups: list[dict[str, Any]] = []
        """The parameter groups whose `foreach` was None, and must be False here."""

    # --- processes --------------------------------------------------------------------------------------------------
    @property
    def lockstep(self) -> bool:
        """Whether all processes must take equally many turns: a forward gathers the parameters from all of them."""
        return self.data_ranks.size > 1

    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Open the process group and lay the mesh; raises ConfigError where the axes do not multiply out."""
        self.sizes = fit_sizes(self.asked, place.world_size, place.nodes)
        self.check_sizes(self.sizes)
        super().join(place, devices, precision)
        if place.world_size == 1:
            return
        if own_group.host_group() is not None:
            raise ConfigError(
                f"strategy {self.name!r} also moves tensors on the host, which the process group that exists already "
                f"does not serve: make it by init_process_group() without a backend."
            )
        if self.mesh is None or self.group is not dist.group.WORLD:  # one mesh serves all stages of a trainer
            self.mesh, self.group = make_mesh(self.sizes, self.device.type), dist.group.WORLD
            self.among = data_ranks(self.sizes, place.rank)
            self.saving = GroupCollectives(place.rank, place.world_size, dist.new_group(backend="gloo"))
        self.data_ranks = self.among
        if self.precision.scaler is not None:
            self.precision.scaler = dtensors.MeshScaler(self.device.type)

    def check_sizes(self, sizes: Sizes) -> None:
        """Refuse an axis `pipeline` of more than one process."""
        if sizes.pipeline > 1:
            raise ConfigError(
                f"strategy mesh: pipeline={sizes.pipeline}; here a mesh has the axes data, shard and tensor only. Set "
                f"pipeline to 1."
            )

    # --- the task ---------------------------------------------------------------------------------------------------
    def build_model(self, task: "Task") -> None:
        """Call the task's configure_model; with `meta_init` on rank 0 only, elsewhere no weight takes memory."""
        if self.meta_init and self.place.rank > 0:
            with torch.device("meta"):
                task.configure_model()
        else:
            task.configure_model()
        if self.meta_init and self.place.world_size > 1:
            torch.set_rng_state(self.collectives.broadcast(torch.get_rng_state()))

    def place_task(self, task: "Task") -> None:
        """Give this process its part of the task's weights, which are those of rank 0."""
        if self.mesh is None:
            super().place_task(task)
            return
        self.task = task
        refuse_empty(task, self.place.rank)
        options = task.trainer.compile
        if options:
            refuse_compile(self.name, options, self.sizes)
        self.precision.place(task)
        values = weight_broadcast.send_off(task) if self.meta_init else None
        if not self.meta_init:
            weight_broadcast.share(task, self.collectives.broadcast_tensors)
        self.wrapping = Wrapping(task)
        if isinstance(options, Mapping):
            kernels.compile_forwards(task, options)
        if self.sizes.tensor > 1:
            apply_plan(task, task.tensor_plan(), self.mesh["tensor"])
        self.steps = MeshSteps(task)
        if self.data_ranks.size > 1:
            axes = ("data", "shard") if self.sizes.data > 1 else ("shard",)
            self.sharding.apply(self.steps, task, self.mesh[axes], self.precision)
            task.register_forward_pre_hook(self.steps.before_forward, prepend=True)
            task.register_forward_hook(self.steps.after_forward, always_call=True)
        elif not self.meta_init:
            task.to(self.device)
        self.wrapping.done()
        if self.meta_init:
            parts = torch.device("cpu") if self.sharding.cpu_offload and self.data_ranks.size > 1 else self.device
            weight_broadcast.bring_back(task, values if self.place.rank == 0 else None, self.device, parts)

    def set_layout(self, layout: Layout, bitwise: bool) -> None:
        """Know which replicas run where."""
        if bitwise and self.mesh is not None:
            raise ConfigError(
                f"reproducible: bitwise needs gradients that meet in one order on any number of processes; strategy "
                f"{self.name!r} adds them up in torch's own order. Use reproducible: order, or strategy ddp."
            )
        super().set_layout(layout, bitwise)

    def setup(self, task: "Task", optimizers: Sequence[Optimizer], local_replicas: int) -> None:
        """Make the placed task ready to be trained. Raises ConfigError for what does not go together."""
        if self.mesh is not None:
            refuse_mesh_optimizers(self.name, task, optimizers, self.data_ranks.size > 1)
            if task.trainer.compile:
                refuse_compile(self.name, task.trainer.compile, self.sizes)
            self._use_single_tensor_steps(optimizers)
        super().setup(task, optimizers, local_replicas)
        if self.steps is not None:
            self.steps.replica_buffers = self.buffers
        self.sends = self.between_steps = True

    def compile(self, task: "Task", options: bool | Mapping[str, Any]) -> None:
        """Compile nothing more: blocks were compiled before hooks were put on them."""
        if self.mesh is None:
            super().compile(task, options)

    def _use_single_tensor_steps(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers update one parameter after the other where parameters lie on several meshes.

        torch's `foreach` and `fused` kernels take tensors of one mesh only.
        """
        self.single_tensor_groups = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                meshes = {one.device_mesh if isinstance(one, DTensor) else None for one in group["params"]}
                if len(meshes) < 2:
                    continue
                for option in ("foreach", "fused"):
                    if group.get(option):
                        raise ConfigError(
                            f"{type(optimizer).__name__}({option}=True): its kernels take tensors of one mesh, but "
                            f"with tensor={self.sizes.tensor} these lie on {len(meshes)}. Leave {option} out."
                        )
                if group.get("foreach", False) is None:
                    group["foreach"] = False
                    self.single_tensor_groups.append(group)

    def finish(self) -> None:
        """Give every process the whole task back, on its host, or one without values; every rank calls it."""
        if self.steps is None or self.task is None:
            return
        for module in sharded(self.steps):
            module.reshard()
        if self.whole_at_end:
            dtensors.make_whole(self.task, torch.device("cpu"))
        else:
            dtensors.make_empty(self.task)

    def teardown(self) -> None:
        """Take the wrappers off the task's modules."""
        if self.wrapping is not None:
            self.wrapping.undo()
        self.wrapping = self.steps = None
        super().teardown()

    # --- the step ---------------------------------------------------------------------------------------------------
    def training_step(self, arguments: Sequence[Any], last: bool) -> Any:
        """Call training_step, with the parameters of each block gathered while it runs.

        Raises TaskError where it leaves its batch out: the other processes wait in backward for this one's parameters.
        """
        if self.steps is None:
            return super().training_step(arguments, last)
        self._send_gradients(last)
        self.buffers.settle()
        if self.between_steps:
            self.align_buffers()
            self.between_steps = False
        with self.precision.forward_context():
            output = self.steps("training_step", *arguments)
        if output is None and self.data_ranks.size > 1:
            raise TaskError(
                f"training_step returned None, which leaves its batch out; under strategy {self.name!r} the other "
                f"processes wait for this one in backward. Return the loss times 0.0 instead."
            )
        return output

    def _send_gradients(self, last: bool) -> None:
        root = as_sharded(self.steps)
        if self.sends is not last and root is not None:
            root.set_requires_gradient_sync(last)
        self.sends = last

    def backward(
        self, loss: Tensor, last: bool = True, inputs: Sequence[Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        """Add the gradient of `loss`; with the `last` one of a step the parts of all processes meet."""
        super().backward(loss, last, inputs, retain_graph)
        if last and not retain_graph:
            self._close_step()

    def leave_out(self, last: bool, after_forward: bool) -> None:
        """Take part in a step in which this process has no batch, with the masked turn that is still due."""
        run = None if self.task is None else self.task.trainer.current_run
        if not after_forward and run is not None and run.step is not None:
            masked.train(run, run.step.masked[-1:], last=True)
        elif last:
            self._close_step()

    def _close_step(self) -> None:
        self.between_steps = True
        if self.sizes.tensor == 1 or self.task is None:
            return
        for parameter in self.task.parameters():
            gradient = parameter.grad
            if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
                continue
            if gradient.placements != parameter.placements:  # sums over the sequence that are partial yet
                parameter.grad = gradient.redistribute(placements=parameter.placements)

    def abandon_step(self) -> None:
        """Drop the gradients of the turns of a step that ends before its last one."""
        super().abandon_step()
        self.between_steps = True
        root = as_sharded(self.steps)
        run = None if self.task is None else self.task.trainer.current_run
        if root is None or run is None or run.step is None or drop_sharded_gradients(root):
            return
        masked.train(run, [*run.step.turns, *run.step.masked][:1], last=True)
        for parameter in run.task.parameters():
            parameter.grad = None

    def repeat_step(self, arguments: Sequence[Any]) -> Any:
        """Call training_step once more, with the parameters gathered; every rank calls it."""
        return (
            super().repeat_step(arguments) if self.steps is None else self.evaluation_step("training_step", arguments)
        )

    def no_gradients(self, inference_mode: bool) -> AbstractContextManager[Any]:
        """Return what an evaluation runs under: parameters gathered in inference mode could not be trained again."""
        return super().no_gradients(inference_mode and self.mesh is None)

    def evaluation_step(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call the step `name` of the task."""
        if self.steps is None:
            return super().evaluation_step(name, arguments)
        with self.precision.forward_context():
            output = self.steps(name, *arguments)
        root = as_sharded(self.steps)
        if root is not None:
            root.reshard()  # no backward will drop what the outermost block has gathered
        return output

    def gradients_are_finite(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the gradient is finite in every rank's part of it."""
        finite = super().gradients_are_finite(parameters)
        if self.mesh is None:
            return finite
        return not self.collectives.all_reduce(torch.tensor([float(not finite)]), "max").item()

    def clip(self, optimizer: Optimizer, limit: float, algorithm: str) -> Tensor | None:
        """Clip the gradients of `optimizer`'s parameters by the norm of all their parts, or by value."""
        if self.mesh is None:
            return super().clip(optimizer, limit, algorithm)
        if algorithm == "value":
            dtensors.clip_value(optimizer, limit)
            return None
        return dtensors.clip_norm(optimizer, limit, self.place.world_size)

    # --- checkpoints: each rank writes its parts ----------------------------------------------------------------------
    @property
    def writers(self) -> Collectives | None:
        """All ranks, by a process group of their own: a save in the background must not meet training's collectives."""
        return self.saving

    def load_model_state(self, weights: Mapping[str, Any], strict: bool) -> None:
        """Take this process's part of whole weights."""
        assert self.task is not None
        dtensors.load_sharded_weights(self.task, weights, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of `optimizer`, with this rank's parts."""
        found = super().optimizer_state(optimizer)
        for group, saved in zip(optimizer.param_groups, found["param_groups"], strict=True):
            if any(group is own for own in self.single_tensor_groups):
                saved["foreach"] = None
        return found

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take this process's part of what `optimizer_state` returned, on any layout."""
        dtensors.load_optimizer(optimizer, state)
        if self.mesh is not None:
            self._use_single_tensor_steps([optimizer])


class MeshSteps(nn.Module):
    """Calls the steps of a task, as the forward of the outermost sharded module."""

    def __init__(self, task: "Task") -> None:
        super().__init__()
        self.task, self.replica_buffers, self.inside = task, ReplicaBuffers(None), False

    def forward(self, name: str, *arguments: Any) -> Any:
        """Return what the step `name` returns."""
        self.replica_buffers.begin()
        self.inside = True
        try:
            return getattr(self.task, name)(*arguments)
        finally:
            self.inside = False

    def before_forward(self, task: nn.Module, inputs: Any) -> None:
        """Gather the outermost parameters where a hook calls the task itself, outside of a step."""
        root = as_sharded(self)
        if not self.inside and root is not None:
            root.unshard()

    def after_forward(self, task: nn.Module, inputs: Any, output: Any) -> None:
        """Drop them again."""
        root = as_sharded(self)
        if not self.inside and root is not None:
            root.reshard()


class FSDPStrategy(MeshStrategy):
    """Parameters, gradients and optimizer states sharded over all processes, each of which has its own replicas."""

    name = "fsdp"

    def __init__(
        self,
        *,
        shard_blocks: list[str] | int = 1_000_000,
        reshard_after_forward: bool | int | None = None,
        cpu_offload: bool = False,
        half_traffic: bool = False,
        find_unused_parameters: bool = False,
        meta_init: bool = False,
        whole_at_end: bool = True,
        process_group_backend: Literal["nccl", "gloo", "mpi"] | None = None,
        init_method: str | None = None,
        timeout: float | Mapping[Phase, float] = 1800.0,
    ) -> None:
        """The arguments are those of strategy mesh."""
        super().__init__(
            shard="auto",
            shard_blocks=shard_blocks,
            reshard_after_forward=reshard_after_forward,
            cpu_offload=cpu_offload,
            half_traffic=half_traffic,
            find_unused_parameters=find_unused_parameters,
            meta_init=meta_init,
            whole_at_end=whole_at_end,
            process_group_backend=process_group_backend,
            init_method=init_method,
            timeout=timeout,
        )
