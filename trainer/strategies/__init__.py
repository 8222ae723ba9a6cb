"""Strategies: how replicas map to devices and processes, and how their gradients are combined."""

from typing import TYPE_CHECKING

from ...base.late_imports import importer

if TYPE_CHECKING:
    from .data_parallel.data_parallel import DataParallelStrategy as DataParallelStrategy
    from .ddp import DDPStrategy as DDPStrategy
    from .ddp_rpc.ddp_rpc import DDPRPCStrategy as DDPRPCStrategy
    from .group import GroupStrategy as GroupStrategy
    from .mesh.mesh import FSDPStrategy as FSDPStrategy
    from .mesh.mesh import MeshStrategy as MeshStrategy
    from .model_parallel.model_parallel import DDPModelParallelStrategy as DDPModelParallelStrategy
    from .pipeline.pipeline import PipelineMeshStrategy as PipelineMeshStrategy
    from .strategy import SingleStrategy as SingleStrategy
    from .strategy import Strategy as Strategy
    from .zero1 import Zero1Strategy as Zero1Strategy

STRATEGIES = {
    "single": ".strategy:SingleStrategy",
    "data_parallel": ".data_parallel.data_parallel:DataParallelStrategy",
    "ddp": ".ddp:DDPStrategy",
    "mesh": ".pipeline.pipeline:PipelineMeshStrategy",
    "fsdp": ".mesh.mesh:FSDPStrategy",
    "zero1": ".zero1:Zero1Strategy",
    "ddp_model_parallel": ".model_parallel.model_parallel:DDPModelParallelStrategy",
    "ddp_rpc": ".ddp_rpc.ddp_rpc:DDPRPCStrategy",
}
"""Maps the name of each strategy in a config to its class."""

_HOMES = {
    "Strategy": ".strategy",
    "GroupStrategy": ".group",
    "MeshStrategy": ".mesh.mesh",
    **{home.split(":")[1]: home.split(":")[0] for home in STRATEGIES.values()},
}
__all__ = list(_HOMES)
__all__ += ["STRATEGIES"]

if not TYPE_CHECKING:  # otherwise a type checker would accept any name
    __getattr__ = importer(__name__, _HOMES)
