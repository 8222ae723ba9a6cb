"""Legato's version of `lightning.pytorch.plugins`."""

# fmt: off

from legato.compat.lightning.fabric.plugins import (
    KubeflowEnvironment, LSFEnvironment, XLACheckpointIO, XLAEnvironment,
)
from legato.compat.lightning.plugins import (
    ClusterEnvironment, DoublePrecision, DoublePrecision as DoublePrecisionPlugin, FSDPPrecision,
    FSDPPrecision as FSDPMixedPrecisionPlugin, FSDPPrecision as FSDPPrecisionPlugin, HalfPrecision,
    HalfPrecision as HalfPrecisionPlugin, LayerSync, LightningEnvironment, MPIEnvironment, MixedPrecision,
    MixedPrecision as MixedPrecisionPlugin, Precision, Precision as PrecisionPlugin, SLURMEnvironment,
    TorchElasticEnvironment, TorchSyncBatchNorm,
)
from legato.compat.lightning.strategies import CheckpointIO, TorchCheckpointIO
from legato.compat.lightning.types import PLUGIN_INPUT as _PLUGIN_INPUT
from legato.compat.lightning.inner import alias_below, inner_name, placeholders

AsyncCheckpointIO, = placeholders(
    __name__, "AsyncCheckpointIO",
    "To write checkpoints in the background, pass callbacks=[legato.callbacks.Checkpoint(asynchronous=True)].",
)
BitsandbytesPrecision, = placeholders(
    __name__, "BitsandbytesPrecision",
    "Use bitsandbytes layers in the module's configure_model.",
)
DeepSpeedPrecision, = placeholders(
    __name__, "DeepSpeedPrecision",
    "Pass Trainer(strategy='fsdp'). It shards parameters, gradients and optimizer states as ZeRO stage 3 does.",
)
TransformerEnginePrecision, = placeholders(
    __name__, "TransformerEnginePrecision",
    "Use transformer_engine's layers and fp8_autocast in the module, and pass precision='bf16-true'.",
)
XLAPrecision, = placeholders(
    __name__, "XLAPrecision",
    "Legato runs on CPU, CUDA and MPS devices, not on TPUs. Pass accelerator='auto'.",
)
LightningDoublePrecisionModule, = placeholders(
    __name__, "LightningDoublePrecisionModule",
    "Pass Trainer(precision='64-true'), which converts the module and its batches.",
)
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    environments io io.async_plugin io.checkpoint_plugin io.torch_plugin io.wrapper io.xla_plugin layer_sync
    precision precision.amp precision.bitsandbytes precision.deepspeed precision.double precision.fsdp
    precision.half precision.precision precision.transformer_engine precision.xla
""")
