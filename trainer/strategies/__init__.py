"""Strategies: how replicas map to devices and processes, and how their gradients meet."""

from importlib import import_module
from typing import Any

STRATEGIES = {
    "single": ".single:SingleStrategy",
    "data_parallel": ".data_parallel.data_parallel:DataParallelStrategy",
    "ddp": ".ddp:DDPStrategy",
    "mesh": ".pipeline.pipeline:PipelineMeshStrategy",
    "fsdp": ".mesh.mesh:FSDPStrategy",
    "zero1": ".zero1:Zero1Strategy",
    "ddp_model_parallel": ".model_parallel.model_parallel:DDPModelParallelStrategy",
    "ddp_rpc": ".ddp_rpc.ddp_rpc:DDPRPCStrategy",
}
"""The names that a config may use, and the class behind each."""

__all__ = [
    "STRATEGIES",
    "DDPModelParallelStrategy",
    "DDPRPCStrategy",
    "DDPStrategy",
    "DataParallelStrategy",
    "FSDPStrategy",
    "MeshStrategy",
    "PipelineMeshStrategy",
    "SingleStrategy",
    "Strategy",
    "Zero1Strategy",
]

_HOMES = {
    "Strategy": ".strategy",
    "MeshStrategy": ".mesh.mesh",
    **{home.split(":")[1]: home.split(":")[0] for home in STRATEGIES.values()},
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
