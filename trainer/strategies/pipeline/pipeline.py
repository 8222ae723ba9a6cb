"""The axis `pipeline` of a mesh: each process has a stage of the model, and batches go through it in pieces.

    configure_blocks      embedding, layers.0, layers.1, layers.2, layers.3, head
    pipeline=2            `-------- stage 0 ---------´  `------ stage 1 -------´      parts.py cuts
    a training step       input --> activations ------> output --> the rest of training_step: loss, logged values
                          gradients <------------------ gradients

intercept.py lets training_step run without its blocks, stages.py runs the blocks. Every process has the whole task, but
of the parameters of other stages only their shapes. What the step logs is known on the last stage, which tells the
others.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ....base.errors import ConfigError
from ....base.tensors import map_tensors
from ....base.torch_private import local_part
from ...data.sampling import Layout
from ...metrics.reduce import to_floats
from ...optimization.batch_weights import weight_of
from ...optimization.outputs import losses_of
from ...processes.place import Place
from ..mesh import dtensors, weight_broadcast
from ..mesh.mesh import MeshStrategy
from ..mesh.sharding import sharded
from ..mesh.sizes import Sizes
from ..mesh.tensor_plan import apply_plan
from ..mesh.unwrap import Wrapping
from ..model_parallel.parts import Split, check_counts, cut_task, refuse_idle, tensors_of
from ..pieces import combine_losses
from .batch_run import BatchRun
from .intercept import BlockInterceptor
from .stages import Schedules, Stage, StageOwners
from .state_dicts import PipelineStateDicts

if TYPE_CHECKING:
    from ....tasks.task import Task


class PipelineMeshStrategy(MeshStrategy):
    """One process for each device, on a mesh with the axes data, shard, tensor and pipeline.

    The axes `data` and `shard` share out the replicas; `shard` also the parameters, gradients and optimizer states. The
    processes of the axis `tensor` work on the same batches, each on its part of the layers; those of the axis
    `pipeline` on the same batches, each on its own layers.
    """

    def __init__(
        self,
        *,
        micro_batches: int | None = None,
        split: Split = "auto",
        **options: Any,
    ) -> None:
        """`micro_batches`: how many pieces a pipeline cuts a batch into, at most; None: two for each of its processes.
        `split`: how many of the task's blocks each stage takes; "auto" goes by parameter bytes.
        """
        super().__init__(**options)
        if micro_batches is not None and (not isinstance(micro_batches, int) or micro_batches < 1):
            raise ConfigError(f"strategy mesh: micro_batches={micro_batches!r}; expected a positive count, or null.")
        if self.asked["pipeline"] == 1 and (micro_batches, split) != (None, "auto"):
            raise ConfigError("strategy mesh: micro_batches and split are for a pipeline; set pipeline, too.")
        self.pieces_wanted, self.split = micro_batches, split
        self.owners = StageOwners([], [], 0)
        self.state_dicts: PipelineStateDicts = PipelineStateDicts(self.asked)
        self.schedules: Schedules | None = None
        """What runs this process's stage; None without a pipeline."""
        self.line: dist.ProcessGroup | None = None
        """The processes of one pipeline."""

    # --- processes --------------------------------------------------------------------------------------------------
    def _check_sizes(self, sizes: Sizes) -> None:
        if sizes.pipeline == 1:
            return
        check_counts(self.split, sizes.pipeline)
        if self.meta_init:
            raise ConfigError("strategy mesh: meta_init hands out parts of tensors, of which a pipeline has none.")

    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Open the process group and lay the mesh."""
        super().join(place, devices, precision)
        self.has_all_weights = self.sizes.pipeline == 1
        # pipelines run their batches independently unless they share parameters
        self.lockstep = self.lockstep and (self.sizes.pipeline == 1 or self.sizes.shard > 1)

    # --- the task ---------------------------------------------------------------------------------------------------
    def place_task(self, task: "Task") -> None:
        """Give this process its stage of the task, whose weights are those of rank 0."""
        if self.sizes.pipeline == 1:
            super().place_task(task)
            return
        assert self.mesh is not None
        self.task, self.line = task, self.mesh["pipeline"].get_group()
        self._sync_batch_norm(task)
        self.precision.place(task)
        stages = cut_task(task, self.sizes.pipeline, self.split)
        if task.trainer.stage == "fit":
            refuse_idle(stages)
        weight_broadcast.share(task, self.collectives.broadcast_tensors)
        self.wrapping = Wrapping(task)
        if self.sizes.tensor > 1:
            apply_plan(task, task.tensor_plan(), self.mesh["tensor"])
        place = self.sizes.place_of(self.place.rank)["pipeline"]
        stage = Stage(stages[place])
        if self.sizes.shard > 1:
            axes = ("data", "shard") if self.sizes.data > 1 else ("shard",)
            self.sharding.apply(stage, stage, self.mesh[axes])
        self.wrapping.done()
        self.owners = StageOwners(tensors_of(task), stages, place)
        self.state_dicts.open_stages(self.owners, self.line)
        self._keep_own()
        interceptor = BlockInterceptor(stages, place, stage, self._relay)
        self.schedules = Schedules(stage, interceptor, self.device, self.line)

    def _keep_own(self) -> None:
        """Put what belongs to this process on its device, and of other parameters keep no more than their shapes."""
        for tensor in self.owners.tensors:
            local = local_part(tensor)
            if self.owners.is_foreign(tensor):
                # One number expanded to the shape: names, shapes and dtypes stay for optimizers and summaries, and sums
                # over it are finite. Tensors on meta fail where a step checks gradients.
                local.data = torch.zeros((), dtype=local.dtype, device=self.device).expand(local.shape)
            elif self.sizes.shard == 1 or not isinstance(tensor, DTensor):  # what is sharded is where it belongs
                local.data = local.data.to(self.device)

    def prepare(
        self, task: "Task", optimizers: Sequence[Optimizer], layout: Layout, one_order: bool = False
    ) -> list[Optimizer]:
        """Make the placed task ready to be trained. Raises ConfigError for what does not go together."""
        if self.schedules is not None and optimizers:
            from ....tasks.task import Task

            if type(task).backward is not Task.backward:
                raise ConfigError("A pipeline runs backward itself, stage by stage; a task's own backward cannot be.")
            if task.trainer.reproducible == "off":
                raise ConfigError(
                    "A pipeline needs reproducible: order. All processes of one load the same batch, which without "
                    "keyed random numbers they would not."
                )
        return super().prepare(task, optimizers, layout, one_order)

    def finish(self) -> None:
        """Give every process the whole task back, on its host; every rank calls it."""
        if self.schedules is None or self.task is None:
            super().finish()
            return
        for module in sharded(self.schedules.stage):
            module.reshard()

        def change(tensor: Tensor) -> Tensor:
            place = self.owners.place_of(tensor)
            # one tensor at a time, so that no device holds two whole models
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            if place == self.owners.own:
                value.copy_(dtensors.whole(tensor))
            dist.broadcast(value, group=self.line, group_src=place)
            value = value.cpu()
            return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value

        with torch.no_grad():
            dtensors.replace(self.task, change)
        self.schedules.interceptor.close()  # what still calls the task before `teardown` computes all of it here

    def teardown(self) -> None:
        """Restore the task's blocks."""
        if self.schedules is not None:
            self.schedules.interceptor.close()
        self.schedules, self.owners = None, StageOwners([], [], 0)
        self.state_dicts.open_stages(None, None)
        super().teardown()

    def _relay(self, stage: int, output: Tensor | None) -> Tensor:
        """Give every process of the pipeline the output of a stage."""
        if self.schedules is not None and stage == self.owners.own:
            for module in sharded(self.schedules.stage):
                module.reshard()  # no backward will drop what was gathered
        # outside of training shapes are not fixed, so they are told first
        header: list[Any] = [None if output is None else (output.shape, output.dtype)]
        dist.broadcast_object_list(header, group=self.line, group_src=stage, device=torch.device("cpu"))
        if output is None:
            output = torch.empty(header[0][0], dtype=header[0][1], device=self.device)
        output = output.detach().contiguous()
        dist.broadcast(output, group=self.line, group_src=stage)
        return output

    # --- the step ---------------------------------------------------------------------------------------------------
    def training_step(self, arguments: Sequence[Any], replica: int | None, last: bool) -> Any:
        """Run training_step with its blocks dealt out over the pipeline, forward and backward.

        Returns what it returned on the last stage, and its loss on the others.
        """
        if self.schedules is None:
            return super().training_step(arguments, replica, last)
        assert self.task is not None
        if self.by_replica:
            self._open_replica(replica)
        batch_run = BatchRun(self, self.task, arguments)
        # Before the schedule, which sets gradients. Where all batches of a step are left out they must be None again:
        # with zeros momentum and weight decay would still move the weights.
        fresh = [one for one in self.owners.tensors if isinstance(one, nn.Parameter) and one.grad is None]
        with self.precision.forward_context():
            self.schedules.run(
                batch_run.inputs(), len(batch_run.sizes), batch_run.kind, batch_run.loss, batch_run.known
            )
        output = self._told(batch_run)
        if output is None and not self.lockstep:
            for parameter in fresh:
                parameter.grad = None
        return output

    def _told(self, batch_run: BatchRun) -> Any:
        """Let every process of the pipeline log what the last stage has, and return the turn's loss."""
        assert self.schedules is not None
        assert self.task is not None
        output: Any = None
        message: list[Any] = [None]
        if self.schedules.is_last:
            output = combine_losses(batch_run.outputs, batch_run.sizes, self.device)
            losses = losses_of(output, 1)
            weight = weight_of(output)
            numbers = [loss.detach() for loss in losses] + ([] if weight is None else [weight])
            message = [(to_floats(numbers), isinstance(output, dict), batch_run.logged())]
        dist.broadcast_object_list(message, group=self.line, group_src=self.owners.last, device=torch.device("cpu"))
        values, in_dict, logged = message[0]
        for name, value, args, options in logged:
            self.task.log(name, value, *args, **options)
        if output is not None:
            return map_tensors(output, Tensor.detach)
        if not values:
            return None
        loss = torch.tensor(values[0], device=self.device)
        self.precision.scale(loss)  # a scaler is ready to unscale only when it has scaled
        return dict(zip(("loss", "weight"), (loss, *values[1:]), strict=False)) if in_dict else loss

    def backward(
        self, loss: Tensor, last: bool = True, inputs: Sequence[Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        """Do nothing in a pipeline: training_step has left the gradients."""
        if self.schedules is None:
            super().backward(loss, last, inputs, retain_graph)

    def end_step(self) -> None:
        """Add up the gradients of all pipelines, and give all of them the buffers of the first one."""
        if self.schedules is not None:
            self._reduce()
        super().end_step()

    def _reduce(self) -> None:
        """Add up the gradients of all pipelines; one that a pipeline lacks counts as zero."""
        own = [one for one in self.owners.own_tensors() if isinstance(one, nn.Parameter)]
        if self.sizes.shard > 1:  # what is sharded has met
            own = [one for one in own if not isinstance(one, DTensor)]
        for group in self._replica_groups():
            # which parameters have a gradient differs from pipeline to pipeline, but the collectives below must not
            used = torch.tensor([parameter.grad is not None for parameter in own], dtype=torch.int32)
            dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
            for parameter, is_used in zip(own, used.tolist(), strict=True):
                if is_used:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    dist.all_reduce(local_part(parameter.grad), group=group)

    def _replica_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups of processes, axis by axis, that have the same stages and other batches."""
        assert self.mesh is not None
        return [self.mesh[axis].get_group() for axis in ("data", "shard") if getattr(self.sizes, axis) > 1]

    def align_buffers(self) -> None:
        """Give every pipeline the buffers of the first one."""
        if self.schedules is None:
            super().align_buffers()
            return
        own = [one for one in self.owners.own_tensors() if not isinstance(one, nn.Parameter)]
        for group in self._replica_groups() if own else ():
            for buffer in own:
                dist.broadcast(buffer, group=group, group_src=0)

    def clip(self, optimizer: Optimizer, limit: float, algorithm: str) -> Tensor | None:
        """Clip the gradients of `optimizer`'s parameters by the norm over all stages, or by value."""
        if self.schedules is None or algorithm == "value":
            return super().clip(optimizer, limit, algorithm)
        return dtensors.clip_norm(optimizer, limit, self.place.world_size // self.sizes.pipeline)
