"""The global switches of torch that change results: one table, by which they travel to workers and are recorded."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

ATTENTION = ("flash", "mem_efficient", "cudnn", "math")
"""Kernels of scaled_dot_product_attention."""


class Switch(NamedTuple):
    """A setting of the process: how it is read, as a JSON value, and set."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def of_attribute(path: str) -> Switch:
    """Return the switch that is an attribute below torch.backends."""
    *parents, name = path.split(".")

    def find() -> Any:
        owner: Any = torch.backends
        for parent in parents:
            owner = getattr(owner, parent)
        return owner

    return Switch(lambda: getattr(find(), name), lambda value: setattr(find(), name, value))


def of_precision(name: str) -> Switch:
    """Return the switch of float32 products of a backend; "none" with nothing above it means "ieee", as torch says."""
    plain = of_attribute(f"{name}.fp32_precision")
    return Switch(lambda: {"none": "ieee"}.get(value := plain.read(), value), plain.write)


def set_deterministic(on: bool, warn_only: bool) -> None:
    """Call torch.use_deterministic_algorithms only on a change, because it imports torch's compiler (1 s)."""
    now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if now != (on, warn_only):
        torch.use_deterministic_algorithms(on, warn_only=warn_only)


def _read_deterministic() -> bool | str:
    on = torch.are_deterministic_algorithms_enabled()
    return "warn" if on and torch.is_deterministic_algorithms_warn_only_enabled() else on


def _read_attention() -> list[str]:
    enabled = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled", None) for name in ATTENTION}
    return [name for name, is_enabled in enabled.items() if is_enabled is not None and is_enabled()]


def _write_attention(names: list[str]) -> None:
    for name in ATTENTION:
        enable = getattr(torch.backends.cuda, f"enable_{name}_sdp", None)
        if enable is not None:
            enable(name in names)


def _read_nnpack() -> bool:
    nnpack: Any = torch.backends.nnpack
    (before,) = nnpack.set_flags(True)  # torch has no function that only reads it
    nnpack.set_flags(before)
    return bool(before)


def _flushes_denormals() -> bool:
    # torch only sets this switch; a product whose result is a denormal tells whether it is on
    return bool((torch.tensor([2.0**-1070], dtype=torch.float64) * 1.0 == 0.0).item())


def _autocast_dtype(device: str) -> Switch:
    return Switch(
        lambda: str(torch.get_autocast_dtype(device)),
        lambda name: torch.set_autocast_dtype(device, getattr(torch, name.removeprefix("torch."))),
    )


SWITCHES: dict[str, Switch] = {
    "default_dtype": Switch(
        lambda: str(torch.get_default_dtype()),
        lambda name: torch.set_default_dtype(getattr(torch, name.removeprefix("torch."))),
    ),
    "deterministic_algorithms": Switch(
        _read_deterministic, lambda value: set_deterministic(bool(value), value == "warn")
    ),
    "threads": Switch(torch.get_num_threads, torch.set_num_threads),
    # those of older torch first: reading one of them is an error once one of the newer ones was set to something else
    "matmul_precision": Switch(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "tf32_matmul": of_attribute("cuda.matmul.allow_tf32"),
    "tf32_cudnn": of_attribute("cudnn.allow_tf32"),
    **{
        f"fp32_precision_{name}": of_precision(name)
        for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
    },
    "scaled_dot_product_attention": Switch(_read_attention, _write_attention),
    "attention_reduces_in_half": Switch(
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    "attention_fastpath": Switch(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    "fp16_reduced_precision": of_attribute("cuda.matmul.allow_fp16_reduced_precision_reduction"),
    "bf16_reduced_precision": of_attribute("cuda.matmul.allow_bf16_reduced_precision_reduction"),
    "fp16_accumulation": of_attribute("cuda.matmul.allow_fp16_accumulation"),
    "cudnn": of_attribute("cudnn.enabled"),
    "cudnn_benchmark": of_attribute("cudnn.benchmark"),
    "cudnn_deterministic": of_attribute("cudnn.deterministic"),
    "mkldnn": of_attribute("mkldnn.enabled"),
    "mkldnn_deterministic": of_attribute("mkldnn.deterministic"),
    "nnpack": Switch(_read_nnpack, lambda on: torch.backends.nnpack.set_flags(on)),
    "opt_einsum": of_attribute("opt_einsum.enabled"),
    "opt_einsum_strategy": of_attribute("opt_einsum.strategy"),
    "flush_denormal": Switch(_flushes_denormals, torch.set_flush_denormal),
    "autocast_cache": Switch(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "autocast_dtype_cpu": _autocast_dtype("cpu"),
    "autocast_dtype_cuda": _autocast_dtype("cuda"),
}


def read_switches() -> dict[str, Any]:
    """Return the values of all switches that this torch has and tells, as JSON values."""
    values = {name: _value(switch) for name, switch in SWITCHES.items()}
    return {name: value for name, value in values.items() if value is not None}


def write_switches(values: Mapping[str, Any]) -> None:
    """Set the switches that differ from these values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in values.items():
            # only what differs: setting some of them warns, imports the compiler, or starts a device
            if _value(SWITCHES[name]) != value:
                SWITCHES[name].write(value)


def _value(switch: Switch) -> Any:
    """Return the value of a switch; None where this torch has no such switch, or refuses to tell.

    It refuses where the newer and the older switches of a thing were set to different values.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates some of them
        try:
            return switch.read()
        except (AttributeError, RuntimeError):
            return None
