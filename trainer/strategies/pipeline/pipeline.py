"""Pipeline parallelism along a mesh axis: each process holds one stage and splits batches into micro-batches.

    configure_blocks      embedding, layers.0, layers.1, layers.2, layers.3, head
    pipeline=2            `-------- stage 0 ---------´  `------ stage 1 -------´      split by parts.py
    a training step       input --> activations ------> output --> the rest of training_step: loss, logged values
                          gradients <------------------ gradients

intercept.py runs training_step without its blocks, and stages.py runs the blocks. Every process has all of the
task's modules, but it stores only the shapes of other stages' parameters. The last stage broadcasts the values that
training_step logs.
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
    """One process per device, on a mesh with data, shard, tensor and pipeline axes.

    Replicas are divided along `data` and `shard`; parameters, gradients and optimizer states are sharded along `shard`.
    Processes along `tensor` work on the same batches, each with a shard of the layers in the tensor plan. Processes
    along `pipeline` also work on the same batches, each with some of the layers.
    """

    def __init__(
        self,
        *,
        pipeline: Size = 1,
        micro_batches: int | None = None,
        split: Split = "auto",
        **options: Any,
    ) -> None:
        """Set the strategy's options.

        Args:
            pipeline: number of processes along this axis, or "auto".
            micro_batches: maximum number of micro-batches per batch; None selects two micro-batches per process in the
                pipeline.
            split: number of blocks in each stage; "auto" balances the stages by their size in bytes.

        The other arguments are the same as for MeshStrategy.
        """
        super().__init__(**options)
        self.asked["pipeline"] = pipeline
        read_sizes(self.asked)
        if micro_batches is not None and (not isinstance(micro_batches, int) or micro_batches < 1):
            raise ConfigError(f"strategy=mesh: expected micro_batches to be positive or null, got {micro_batches!r}.")
        if pipeline == 1 and (micro_batches, split) != (None, "auto"):
            raise ConfigError("strategy=mesh: micro_batches and split require a pipeline. Set pipeline=2, for example.")
        self.pieces_wanted, self.split = micro_batches, split
        self.owners = StageOwners([], [], 0)
        self.stage: Stage | None = None
        """The blocks on this process."""
        self.schedules: Schedules | None = None
        """Runs this process's stage; None without a pipeline."""
        self.stage_ranks = SINGLE
        """The processes of this pipeline, in the order of their stages."""

    # --- processes --------------------------------------------------------------------------------------------------
    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Join the process group and create the mesh. Raises ConfigError for options that pipelines do not support."""
        stages = fit_sizes(self.asked, place.world_size, place.nodes).pipeline
        if stages > 1:
            check_counts(self.split, stages)
            if self.meta_init:
                raise ConfigError("strategy=mesh: meta_init and pipeline cannot be combined. Leave one of them out.")
        super().join(place, devices, precision)
        self.stage_ranks = self._ranks_along("pipeline")

    # --- the task ---------------------------------------------------------------------------------------------------
    def place_task(self, task: "Task") -> None:
        """Move this process's stage to its device. Every stage starts with rank 0's weights."""
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
        self._keep_stage()
        interceptor = BlockInterceptor(stages, place, self.stage, self._relay)
        self.schedules = Schedules(self.stage, interceptor, self.device, self.stage_ranks)

    def _shard(self, task: "Task", mesh: DeviceMesh) -> None:
        if self.stage is None:
            super()._shard(task, mesh)
        elif self.sizes.shard > 1:
            self.sharding.apply(self.stage, self.stage, mesh)

    def _keep_stage(self) -> None:
        """Move this process's tensors to its device and free other stages' parameters."""
        for tensor in self.owners.tensors:
            local = local_part(tensor)
            if self.owners.is_foreign(tensor):
                # A scalar expanded to the shape: optimizers and summaries see names, shapes and dtypes, and sums are
                # finite. Meta tensors would fail in checks of gradients.
                replace_values(tensor, torch.zeros((), dtype=local.dtype, device=self.device).expand(local.shape))
            elif self.sizes.shard == 1 or not isinstance(tensor, DTensor):  # sharded tensors are already in place
                replace_values(tensor, local.data.to(self.device))

    def prepare(self, task: "Task", optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Prepare the task for training. Raises ConfigError for settings that a pipeline does not support."""
        if self.schedules is not None and optimizers:
            from ....tasks.task import Task

            if type(task).backward is not Task.backward:
                raise ConfigError("A pipeline runs each stage's backward pass. Do not override Task.backward.")
            if task.trainer.reproducible == "off":
                raise ConfigError(
                    "A pipeline needs reproducible=order. All processes in a pipeline must load the same batch, "
                    "which requires keyed random numbers."
                )
        return super().prepare(task, optimizers)

    def finish(self) -> None:
        """Copy the weights of all stages to the host on every process. All ranks must call this."""
        if self.schedules is None or self.task is None:
            super().finish()
            return
        for module in sharded(self.schedules.stage):
            module.reshard()

        def change(tensor: Tensor) -> Tensor:
            place = self.owners.place_of(tensor)
            # one tensor at a time, so that no device holds two full models
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            if place == self.owners.place:
                value.copy_(dtensors.full(tensor))
            dist.broadcast(value, group=self.stage_ranks.group, group_src=place)
            return value.cpu()

        with torch.no_grad():
            dtensors.replace(self.task, change)
        self.schedules.interceptor.close()  # calls to the task before `teardown` compute in this process

    def teardown(self) -> None:
        """Restore the task's blocks."""
        if self.schedules is not None:
            self.schedules.interceptor.close()
        self.stage = self.schedules = None
        self.owners, self.state_dicts = StageOwners([], [], 0), self.mesh_states
        super().teardown()

    def _relay(self, stage: int, output: Tensor | None) -> Tensor:
        """Send a stage's output to every process in the pipeline."""
        if self.schedules is not None and stage == self.owners.place:
            for module in sharded(self.schedules.stage):
                module.reshard()  # no backward pass will free the gathered parameters
        # the shape first, because shapes vary outside of training
        shape, dtype = self.stage_ranks.broadcast(output is not None and (output.shape, output.dtype), source=stage)
        output = torch.empty(shape, dtype=dtype, device=self.device) if output is None else output.detach().contiguous()
        dist.broadcast(output, group=self.stage_ranks.group, group_src=stage)
        return output

    # --- the step ---------------------------------------------------------------------------------------------------
    def training_step(self, arguments: Sequence[Any], replica: int | None, last: bool) -> Any:
        """Run the forward and backward passes of training_step. Each stage of the pipeline runs its blocks.

        Returns the output of training_step on the last stage, and only the loss on other stages.
        """
        if self.schedules is None:
            return super().training_step(arguments, replica, last)
        assert self.task is not None
        if self.by_replica:
            self._open_replica(replica)
        together = self.data_ranks if self.lockstep else SINGLE
        pieces = self.pieces_wanted or 2 * self.sizes.pipeline
        batch_run = BatchRun(self.task, arguments, self.schedules, pieces, together, is_masked=replica is None)
        # The schedule sets gradients. If all batches of a step are skipped, gradients must be None again: with zeros,
        # momentum and weight decay would still change the weights.
        fresh = [weight for weight in self.owners.tensors if isinstance(weight, nn.Parameter) and weight.grad is None]
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
        """Do nothing in a pipeline, because training_step has already computed the gradients."""
        if self.schedules is None:
            super().backward(loss, last, inputs, retain_graph)

    def end_step(self) -> None:
        """Sum the gradients over all pipelines, and copy the first pipeline's buffers to all of them."""
        weights = [tensor for tensor in self.owners.own_tensors() if isinstance(tensor, nn.Parameter)]
        if self.sizes.shard > 1:  # gradients of sharded parameters are reduced in the backward pass
            weights = [weight for weight in weights if not isinstance(weight, DTensor)]
        for ranks in map(self._ranks_along, ("data", "shard")):
            # Pipelines may have gradients for different parameters but must issue the same collectives, so a missing
            # gradient counts as zero.
            present = torch.tensor([parameter.grad is not None for parameter in weights], dtype=torch.int32)
            for parameter, is_used in zip(weights, ranks.all_reduce(present, "max").tolist(), strict=True):
                if is_used:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    ranks.all_reduce(local_part(parameter.grad), "sum")
        super().end_step()

    def align_buffers(self) -> None:
        """Copy the first pipeline's buffers to all pipelines."""
        if self.schedules is None:
            super().align_buffers()
            return
        buffers = [tensor for tensor in self.owners.own_tensors() if not isinstance(tensor, nn.Parameter)]
        for axis in ("data", "shard"):
            self._ranks_along(axis).broadcast_tensors(buffers)
