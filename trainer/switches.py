"""Everything outside a run that affects its exact results: versions, CPU, environment variables and torch's switches.

docs/reference/bits.md describes each name. A run records and compares the results of `versions` and `environment`.
Workers also copy the caller's values for the switches in the SWITCHES table.
"""

import platform
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from ..base.environment import numeric_variables
from ..base.version import __version__
from .accelerators import autocast_kinds, built_with

# the CPU features by which oneDNN and MKL choose their matrix kernels
CPU_FEATURES = ("avx2", "avx512_f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16", "neon", "sve")


class Switch(NamedTuple):
    """A process-wide setting, with a function that reads it as a JSON value and a function that writes it."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def of_attribute(path: str) -> Switch:
    """Return the switch for an attribute of torch.backends or one of its modules."""
    parents, _, name = path.rpartition(".")
    return Switch(
        lambda: attrgetter(path)(torch.backends),
        lambda value: setattr(attrgetter(parents)(torch.backends), name, value),
    )


def of_precision(name: str) -> Switch:
    """Return the switch for a backend's float32 precision. The switch reads "none" as "ieee", its synonym in torch."""
    plain = of_attribute(f"{name}.fp32_precision")
    return Switch(lambda: {"none": "ieee"}.get(value := plain.read(), value), plain.write)


def of_library(ask: Callable[..., Any]) -> Switch:
    """Return the switch that selects the library torch prefers. Its value is the library's name."""
    return Switch(lambda: str(ask()).rpartition(".")[2].lower(), ask)


def of_split_k(kind: str) -> Switch:
    """Return the switch for split-K matrix products. torch sets it together with reduced precision, as a pair."""
    reduced = of_attribute(f"cuda.matmul.allow_{kind}_reduced_precision_reduction")
    split_k = of_attribute(f"cuda.matmul.allow_{kind}_reduced_precision_reduction_split_k")
    return Switch(split_k.read, lambda value: reduced.write((reduced.read(), value)))


def of_dtype(read: Callable[[], torch.dtype], write: Callable[[torch.dtype], object]) -> Switch:
    """Return the switch for a dtype. Its JSON value is the dtype's name."""
    return Switch(lambda: str(read()), lambda name: write(getattr(torch, name.removeprefix("torch."))))


def of_autocast(device: str) -> Switch:
    """Return the switch for a device type's autocast dtype."""
    return of_dtype(lambda: torch.get_autocast_dtype(device), lambda dtype: torch.set_autocast_dtype(device, dtype))


def of_attention(kernel: str) -> Switch:
    """Return the switch for a kernel of scaled_dot_product_attention."""
    return Switch(
        getattr(torch.backends.cuda, f"{kernel}_sdp_enabled"), getattr(torch.backends.cuda, f"enable_{kernel}_sdp")
    )


def _read_deterministic() -> bool | str:
    on = torch.are_deterministic_algorithms_enabled()
    return "warn" if on and torch.is_deterministic_algorithms_warn_only_enabled() else on


def _read_nnpack() -> bool:
    nnpack: Any = torch.backends.nnpack
    (before,) = nnpack.set_flags(True)  # torch has no function that only reads the flag
    nnpack.set_flags(before)
    return bool(before)


def _flushes_denormals() -> bool:
    # torch cannot read the switch, but a product with a denormal result shows whether it is on
    return bool((torch.tensor([2.0**-1070], dtype=torch.float64) * 1.0 == 0.0).item())


SWITCHES: dict[str, Switch] = {
    "default_dtype": of_dtype(torch.get_default_dtype, torch.set_default_dtype),
    "deterministic_algorithms": Switch(
        _read_deterministic,
        lambda value: torch.use_deterministic_algorithms(bool(value), warn_only=value == "warn"),
    ),
    "threads": Switch(torch.get_num_threads, torch.set_num_threads),
    # older switches first: torch cannot read them once a newer switch has a different value
    "matmul_precision": Switch(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "tf32_matmul": of_attribute("cuda.matmul.allow_tf32"),
    "tf32_cudnn": of_attribute("cudnn.allow_tf32"),
    **{
        f"fp32_precision_{name}": of_precision(name)
        for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
    },
    **{f"{kernel}_attention": of_attention(kernel) for kernel in ("flash", "mem_efficient", "cudnn", "math")},
    "attention_reduces_in_half": Switch(
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    "attention_fastpath": Switch(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    "fp16_reduced_precision": of_attribute("cuda.matmul.allow_fp16_reduced_precision_reduction"),
    "bf16_reduced_precision": of_attribute("cuda.matmul.allow_bf16_reduced_precision_reduction"),
    "fp16_split_k": of_split_k("fp16"),  # after those of reduced precision, which allow it again
    "bf16_split_k": of_split_k("bf16"),
    "fp16_accumulation": of_attribute("cuda.matmul.allow_fp16_accumulation"),
    "blas_library": of_library(torch.backends.cuda.preferred_blas_library),
    "linalg_library": of_library(torch.backends.cuda.preferred_linalg_library),
    "cudnn": of_attribute("cudnn.enabled"),
    "cudnn_benchmark": of_attribute("cudnn.benchmark"),
    "cudnn_benchmark_limit": of_attribute("cudnn.benchmark_limit"),
    "cudnn_deterministic": of_attribute("cudnn.deterministic"),
    "mkldnn": of_attribute("mkldnn.enabled"),
    "mkldnn_deterministic": of_attribute("mkldnn.deterministic"),
    "nnpack": Switch(_read_nnpack, lambda on: torch.backends.nnpack.set_flags(on)),
    "opt_einsum": of_attribute("opt_einsum.enabled"),
    "opt_einsum_strategy": of_attribute("opt_einsum.strategy"),
    "flush_denormal": Switch(_flushes_denormals, torch.set_flush_denormal),
    "autocast_cache": Switch(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    **{f"autocast_dtype_{kind}": of_autocast(kind) for kind in autocast_kinds()},
}


def versions() -> dict[str, str | None]:
    """Return the versions of Legato, Python, torch, and the libraries that torch uses."""
    ours = {"legato": __version__, "python": platform.python_version()}
    return {**ours, "torch": str(torch.__version__), "numpy": np.__version__, **built_with()}


def processor() -> dict[str, str]:
    """Return the CPU's instruction sets, which determine the kernels that libraries choose."""
    flags: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    features = [str(flags.get("cpu_name", "")).split(" ")[0], *(name for name in CPU_FEATURES if flags.get(name))]
    return {"cpu_capability": torch.backends.cpu.get_cpu_capability(), "cpu_features": " ".join(features)}


def environment() -> dict[str, Any]:
    """Return the CPU's instruction sets, torch's switches and the libraries' variables, as JSON values."""
    return {**processor(), **read_switches(), **numeric_variables()}


def read_switches(names: Iterable[str] = SWITCHES) -> dict[str, Any]:
    """Return the values of all switches that this version of torch can read, as JSON values."""
    values = {name: _value(SWITCHES[name]) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def write_switches(values: Mapping[str, Any]) -> None:
    """Set the switches whose current values differ from `values`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in values.items():
            # only if the value differs: setting a switch may warn, import the compiler (1 s), or start a device
            if _value(SWITCHES[name]) != value:
                SWITCHES[name].write(value)


@contextmanager
def settings(deterministic: bool | str, detect_anomaly: bool, threads: int | None) -> Iterator[None]:
    """Apply a run's settings to torch's switches within this context; `deterministic` may be "warn"."""
    # restored at the end: the process may continue with another run, as in a notebook
    before = read_switches(("deterministic_algorithms", "cudnn_benchmark", "threads"))
    memory: Any = torch.utils.deterministic  # Any: type checkers do not see this module's attribute
    filled = memory.fill_uninitialized_memory
    try:
        if deterministic:
            write_switches({"deterministic_algorithms": deterministic, "cudnn_benchmark": False})
            # filling new memory with NaN only helps to find uninitialized reads, and takes a fifth of the step time
            memory.fill_uninitialized_memory = False
        if threads is not None:
            torch.set_num_threads(threads)
        with torch.autograd.set_detect_anomaly(detect_anomaly or torch.is_anomaly_enabled()):
            yield
    finally:
        write_switches(before)
        memory.fill_uninitialized_memory = filled


def _value(switch: Switch) -> Any:
    """Return the value of a switch, or None if this version of torch has no such switch or cannot read it.

    torch cannot read a setting if its older and newer switches have different values.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some switches are deprecated
        try:
            return switch.read()
        except (AttributeError, RuntimeError):
            return None
