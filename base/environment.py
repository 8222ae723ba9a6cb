"""Access to environment variables. No other module reads or writes them."""

import os
from collections.abc import Mapping
from pathlib import Path

from .errors import ConfigError

NUMERIC_VARIABLES = (
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "OPENBLAS_CORETYPE"),
    *("ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT"),
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
    *("NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_COLLNET_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_TOPO_FILE"),
    *("NCCL_GRAPH_FILE", "NCCL_TUNER_PLUGIN", "TORCHINDUCTOR_MAX_AUTOTUNE"),
)
"""Variables that affect kernels and summation order in libraries used by torch; see docs/reference/bits.md."""


def get_variable(name: str) -> str | None:
    """Return the value of a variable; None if it is not set."""
    return os.environ.get(name)


def read_int(*names: str) -> int | None:
    """Return the value of the first variable in `names` that is set. Raises ConfigError if it is not an integer."""
    for name in names:
        value = os.environ.get(name, "").strip()
        if value:
            if not value.isdecimal():
                raise ConfigError(f"The environment variable {name} must be an integer, got {value!r}.")
            return int(value)
    return None


def all_variables() -> dict[str, str]:
    """Return all variables, keyed by name."""
    return dict(os.environ)


def set_variable(name: str, value: str) -> None:
    """Set a variable for this process and its child processes."""
    os.environ[name] = value


def set_default(name: str, value: str) -> None:
    """Set a variable unless it is already set."""
    os.environ.setdefault(name, value)


def unset_variable(name: str) -> None:
    """Remove a variable if it is set."""
    os.environ.pop(name, None)


def replace_variables(variables: Mapping[str, str]) -> None:
    """Replace all variables with `variables`."""
    # variables set by a run must not outlive it in a notebook or test
    os.environ.clear()
    os.environ.update(variables)


def cache_folder() -> Path:
    """Return the folder for local copies of remote files. Symlinks are resolved because other modules compare paths."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().resolve() / "legato"


def lead_python_path(folder: str) -> None:
    """Prepend a folder to PYTHONPATH for Python processes started later."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    # workers import the task's module by name, from any working directory
    if folder not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *paths])


def numeric_variables() -> dict[str, str | None]:
    """Return the variables that affect numerical results, keyed by name. Unset variables are None."""
    return {name: os.environ.get(name) for name in NUMERIC_VARIABLES}


def restart_count() -> int:
    """Return how many times this run's processes have been restarted after a failure."""
    worker = os.environ.get("LEGATO_WORKER")
    if worker is not None:
        return int(worker.split(":")[1])
    return read_int("TORCHELASTIC_RESTART_COUNT") or read_int("SLURM_RESTART_COUNT") or 0


def slurm_job() -> str | None:
    """Return the id of this process's SLURM job; None outside a job."""
    return os.environ.get("SLURM_JOB_ID") or None


def requeued_job() -> str | None:
    """Return the id of this process's SLURM job if the job was requeued, otherwise None."""
    return slurm_job() if read_int("SLURM_RESTART_COUNT") else None
