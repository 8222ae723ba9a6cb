"""Fully sharded data parallel: a mesh with only the axis `shard`."""

from collections.abc import Mapping
from typing import Literal

from ..processes.timeouts import Phase
from .mesh import MeshStrategy


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
