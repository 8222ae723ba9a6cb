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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ....base.errors import ConfigError
from ....base.place import Place
from ....base.tensors import local_part
from ....base.torch_private import replace_values
from ...processes.ranks import SINGLE
from ..mesh import dtensors
from ..mesh.mesh import MeshStrategy
from ..mesh.sharding import sharded
from ..mesh.sizes import Size, fit_sizes, read_sizes
from ..model_parallel.parts import Split, check_counts, cut_task, refuse_idle, tensors_of
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
        pipeline: Size = 1,
        micro_batches: int | None = None,
        split: Split = "auto",
        **options: Any,
    ) -> None:
        """`pipeline`: processes on this axis, or "auto". `micro_batches`: how many pieces a pipeline cuts a batch into,
        at most; None: two for each of its processes. `split`: how many of the task's blocks each stage takes; "auto"
        goes by parameter bytes.
        """
        super().__init__(**options)
        self.asked["pipeline"] = pipeline
        read_sizes(self.asked)
        if micro_batches is not None and (not isinstance(micro_batches, int) or micro_batches < 1):
            raise ConfigError(f"strategy mesh: micro_batches={micro_batches!r}; expected a positive count, or null.")
        if pipeline == 1 and (micro_batches, split) != (None, "auto"):
            raise ConfigError("strategy mesh: micro_batches and split are for a pipeline; set pipeline, too.")
        self.pieces_wanted, self.split = micro_batches, split
        self.owners = StageOwners([], [], 0)
        self.stage: Stage | None = None
        """The part of the task that this process computes."""
        self.schedules: Schedules | None = None
        """What runs this process's stage; None without a pipeline."""
        self.stage_ranks = SINGLE
        """The processes of one pipeline, by stage."""

    # --- processes --------------------------------------------------------------------------------------------------
    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Open the process group and lay the mesh; raises ConfigError for what does not go with a pipeline."""
        stages = fit_sizes(self.asked, place.world_size, place.nodes).pipeline
        if stages > 1:
            check_counts(self.split, stages)
            if self.meta_init:
                raise ConfigError("strategy mesh: meta_init hands out parts of tensors, of which a pipeline has none.")
        super().join(place, devices, precision)
        self.stage_ranks = self._ranks_along("pipeline")

    # --- the task ---------------------------------------------------------------------------------------------------
    def place_task(self, task: "Task") -> None:
        """Give this process its stage of the task, whose weights are those of rank 0."""
        if self.sizes.pipeline == 1:
            super().place_task(task)
            return
        stages, place = cut_task(task, self.sizes.pipeline, self.split), self.stage_ranks.rank
        if task.trainer.stage == "fit":
            refuse_idle(stages)
        self.stage = Stage(stages[place])
        super().place_task(task)
        self.owners = StageOwners(tensors_of(task), stages, place)
        self.state_dicts = PipelineStateDicts(self.mesh_states, self.owners, self.stage_ranks)
        self._keep_own()
        interceptor = BlockInterceptor(stages, place, self.stage, self._relay)
        self.schedules = Schedules(self.stage, interceptor, self.device, self.stage_ranks)

    def _shard(self, task: "Task", mesh: DeviceMesh) -> None:
        if self.stage is None:
            super()._shard(task, mesh)
        elif self.sizes.shard > 1:
            self.sharding.apply(self.stage, self.stage, mesh)

    def _keep_own(self) -> None:
        """Put what belongs to this process on its device, and of other parameters keep no more than their shapes."""
        for tensor in self.owners.tensors:
            local = local_part(tensor)
            if self.owners.is_foreign(tensor):
                # One number expanded to the shape: names, shapes and dtypes stay for optimizers and summaries, and sums
                # over it are finite. Tensors on meta fail where a step checks gradients.
                replace_values(tensor, torch.zeros((), dtype=local.dtype, device=self.device).expand(local.shape))
            elif self.sizes.shard == 1 or not isinstance(tensor, DTensor):  # what is sharded is where it belongs
                replace_values(tensor, local.data.to(self.device))

    def prepare(self, task: "Task", optimizers: Sequence[Optimizer]) -> list[Optimizer]:
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
        return super().prepare(task, optimizers)

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
                value.copy_(dtensors.full(tensor))
            dist.broadcast(value, group=self.stage_ranks.group, group_src=place)
            return value.cpu()

        with torch.no_grad():
            dtensors.replace(self.task, change)
        self.schedules.interceptor.close()  # what still calls the task before `teardown` computes all of it here

    def teardown(self) -> None:
        """Restore the task's blocks."""
        if self.schedules is not None:
            self.schedules.interceptor.close()
        self.stage = self.schedules = None
        self.owners, self.state_dicts = StageOwners([], [], 0), self.mesh_states
        super().teardown()

    def _relay(self, stage: int, output: Tensor | None) -> Tensor:
        """Give every process of the pipeline the output of a stage."""
        if self.schedules is not None and stage == self.owners.own:
            for module in sharded(self.schedules.stage):
                module.reshard()  # no backward will drop what was gathered
        # outside of training shapes are not fixed, so they are told first
        shape, dtype = self.stage_ranks.broadcast(output is not None and (output.shape, output.dtype), source=stage)
        output = torch.empty(shape, dtype=dtype, device=self.device) if output is None else output.detach().contiguous()
        dist.broadcast(output, group=self.stage_ranks.group, group_src=stage)
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
        together = self.data_ranks if self.lockstep else SINGLE
        pieces = self.pieces_wanted or 2 * self.sizes.pipeline
        batch_run = BatchRun(self.task, arguments, self.schedules, pieces, together, is_masked=replica is None)
        # Before the schedule, which sets gradients. Where all batches of a step are left out they must be None again:
        # with zeros momentum and weight decay would still move the weights.
        fresh = [one for one in self.owners.tensors if isinstance(one, nn.Parameter) and one.grad is None]
        with self.precision.forward_context():
            batch_run.run()
        output = batch_run.result(self.stage_ranks)
        if output is None and not self.lockstep:
            for parameter in fresh:
                parameter.grad = None
        return output

    def backward(
        self, loss: Tensor, last: bool = True, inputs: Sequence[Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        """Do nothing in a pipeline: training_step has left the gradients."""
        if self.schedules is None:
            super().backward(loss, last, inputs, retain_graph)

    def end_step(self) -> None:
        """Add up the gradients of all pipelines, and give all of them the buffers of the first one."""
        own = [one for one in self.owners.own_tensors() if isinstance(one, nn.Parameter)]
        if self.sizes.shard > 1:  # what is sharded has met in backward
            own = [one for one in own if not isinstance(one, DTensor)]
        for ranks in map(self._ranks_along, ("data", "shard")):
            # which parameters have a gradient differs from pipeline to pipeline, but the collectives below must not;
            # one that a pipeline lacks counts as zero
            present = torch.tensor([parameter.grad is not None for parameter in own], dtype=torch.int32)
            for parameter, is_used in zip(own, ranks.all_reduce(present, "max").tolist(), strict=True):
                if is_used:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    ranks.all_reduce(local_part(parameter.grad), "sum")
        super().end_step()

    def align_buffers(self) -> None:
        """Give every pipeline the buffers of the first one."""
        if self.schedules is None:
            super().align_buffers()
            return
        own = [one for one in self.owners.own_tensors() if not isinstance(one, nn.Parameter)]
        for axis in ("data", "shard"):
            self._ranks_along(axis).broadcast_tensors(own)
