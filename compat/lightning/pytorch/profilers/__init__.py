"""Legato's version of `lightning.pytorch.profilers`."""

# fmt: off

from legato.compat.lightning.profilers import (
    PassThroughProfiler, Profiler, PyTorchProfiler, RegisterRecordFunction, SimpleProfiler,
)
from legato.compat.lightning.inner import alias_below, inner_name, placeholders

AdvancedProfiler, = placeholders(
    __name__, "AdvancedProfiler",
    "Use Python's profiler: python -m cProfile -o out.prof train.py. profiler='simple' measures actions.",
)
XLAProfiler, = placeholders(
    __name__, "XLAProfiler",
    "Legato runs on CPU, CUDA and MPS devices, not on XLA. profiler='pytorch' records a trace on these devices.",
)
ScheduleWrapper, = placeholders(
    __name__, "ScheduleWrapper",
    "Pass torch.profiler.schedule(wait=1, warmup=1, active=3) as `schedule`, which counts the steps of a stage.",
)
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    advanced base profiler pytorch simple xla
""")
