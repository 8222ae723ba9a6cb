"""Legato's version of `lightning.fabric.plugins`."""

# fmt: off

from legato.compat.lightning.plugins import (
    ClusterEnvironment, LightningEnvironment, MPIEnvironment, SLURMEnvironment, TorchElasticEnvironment,
    find_free_network_port,
)
from legato.compat.lightning.strategies import CheckpointIO, TorchCheckpointIO
from legato.compat.lightning.inner import alias_below, inner_name, placeholders

XLACheckpointIO, XLAEnvironment = placeholders(
    __name__, "XLACheckpointIO XLAEnvironment",
    "Legato runs on CPU, CUDA and MPS devices, not on TPUs. Pass accelerator='auto'.",
)
KubeflowEnvironment, LSFEnvironment = placeholders(
    __name__, "KubeflowEnvironment LSFEnvironment",
    "Legato reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Set them in the cluster.",
)
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    collectives collectives.collective collectives.single_device collectives.torch_collective environments
    environments.cluster_environment environments.kubeflow environments.lightning environments.lsf environments.mpi
    environments.slurm environments.torchelastic environments.xla io io.checkpoint_io io.torch_io io.xla precision
    precision.amp precision.bitsandbytes precision.deepspeed precision.double precision.fsdp precision.half
    precision.precision precision.transformer_engine precision.utils precision.xla
""")
