"""Arguments of the Trainer: name, type, default and documentation of each.

The docstrings are the reference page, the text of `legato --help` and the hints in error messages. This module imports
no torch, so that a misspelt key is refused before torch is loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

from .errors import did_you_mean

if TYPE_CHECKING:
    from pathlib import Path

    from ..trainer.strategies.strategy import Strategy
    from .contracts import Callback, CheckpointFormat, Logger

PrecisionName = Literal[
    "32", "32-true", 32, "64", "64-true", 64, "16-mixed", "bf16-mixed", "bf16-true", "16-true", "bf16", "16", 16
]


@dataclass(kw_only=True)
class TrainerArguments:
    """Arguments of the Trainer."""

    # --- how long ---------------------------------------------------------------------------------------------------
    max_epochs: int | None = None
    """Stop after this many epochs. -1: no limit. Without max_epochs, max_steps and max_time: 1000."""
    min_epochs: int | None = None
    """Do not stop early before this many epochs."""
    max_steps: int = -1
    """Stop after this many optimizer steps. -1: no limit."""
    min_steps: int | None = None
    """Do not stop early before this many optimizer steps."""
    max_time: str | timedelta | Mapping[str, int] | None = None
    """Stop after this much time: "DD:HH:MM:SS", a timedelta, or its arguments as a mapping."""
    fast_dev_run: bool | int = False
    """Run this many batches of each stage (True: 1), without checkpoints and logs, as a quick test."""

    # --- where ------------------------------------------------------------------------------------------------------
    strategy: "str | Mapping[str, Any] | Strategy" = "auto"
    """Placement of replicas on devices: "auto", a name such as "ddp" or "fsdp", or a mapping of `name` and options."""
    accelerator: str = "auto"
    """"cpu", "cuda" (or "gpu"), "mps", "xpu", any other kind that torch supports, or "auto": the one it sees."""
    devices: int | str | list[int] = "auto"
    """Number of devices on this machine, their indices, or "auto": all of an accelerator, one process on CPU."""
    num_nodes: int = 1
    """Number of machines."""
    replicas: int | None = None
    """Logical data-parallel workers, constant for the whole run. None: one per data-parallel process at the start."""
    precision: PrecisionName = 32
    """32, 64, "bf16-mixed", "16-mixed", "bf16-true", "16-true"."""

    # --- the same result --------------------------------------------------------------------------------------------
    seed: int = 0
    """Determines, with config and data, the order of samples and every random number."""
    reproducible: Literal["off", "order", "bitwise"] = "order"
    """Same on any number of processes: "order" (samples, random numbers), "bitwise" (every bit) or nothing ("off")."""
    threads: int | None = None
    """Intra-op threads of each process. None: torch's choice, or 1 with "bitwise": their number changes last bits."""
    deterministic: bool | Literal["warn"] = False
    """Use torch's deterministic kernels only; "warn" instead of an error if there is none."""

    # --- the step ---------------------------------------------------------------------------------------------------
    accumulate_grad_batches: int = 1
    """Batches that each replica accumulates for one optimizer step."""
    gradient_clip_val: float | None = None
    """Clip gradients to this norm or value before each step. None or 0: no clipping."""
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    """"norm": clip the total norm; "value": clip each value."""
    nan: Literal["raise", "skip", "ignore"] = "raise"
    """Effect of a NaN or infinity: "raise" ends the run at a loss, "skip" skips a step with such a gradient."""
    nan_skips: int = 10
    """Steps in a row that nan=skip may skip before the run ends with an error."""
    detect_anomaly: bool = False
    """Let autograd name the operation whose gradient is NaN (slow)."""
    activation_checkpointing: list[str] | None = None
    """Classes of blocks whose activations are recomputed in backward to save memory."""
    compile: bool | Mapping[str, Any] = False
    """Compile the task's modules in place with torch.compile; a mapping holds its options, and `blocks`: classes."""
    sync_batchnorm: bool = False
    """Compute batch norm statistics over the batches of all replicas; each replica needs a process of its own."""

    # --- data -------------------------------------------------------------------------------------------------------
    limit_train_batches: int | float = 1.0
    """Batches per epoch of each replica: a count (int) or a fraction (float)."""
    limit_val_batches: int | float = 1.0
    """Validation batches, counted over all replicas: a count (int) or a fraction (float)."""
    limit_test_batches: int | float = 1.0
    """Test batches, counted over all replicas: a count (int) or a fraction (float)."""
    limit_predict_batches: int | float = 1.0
    """Prediction batches, counted over all replicas: a count (int) or a fraction (float)."""
    overfit_batches: int | float = 0.0
    """Train and validate on this many training batches only, in a fixed order."""
    use_distributed_sampler: bool = True
    """Deal samples out to replicas, but for loaders that are seen to yield each process its own share. False: all
    training loaders do."""
    loader: Mapping[str, Any] | None = None
    """Options of every DataLoader that is dealt out by sample, instead of its own: num_workers, prefetch_factor,
    persistent_workers, pin_memory. They change the speed and not the samples."""
    prefetch_to_device: bool = True
    """Copy a batch to a CUDA device while it computes the one before; takes memory for one more batch there."""
    reload_dataloaders_every_n_epochs: int = 0
    """Call the loader hooks of the task or data module again every n epochs. 0: never.

    A resume calls them once more for the resumed epoch, with `current_epoch` as it was then.
    """

    leave_out_samples: list[int] | None = None
    """Indices of the training dataset that are in no batch of any epoch; all other samples keep their step."""
    resume_at: Literal["step", "epoch"] = "step"
    """Point at which to resume if the samples of a step have changed (batch size, data, limits).

    "step": refuse this within an epoch; "epoch": end that epoch and begin the next one.
    """

    # --- evaluation -------------------------------------------------------------------------------------------------
    val_check_interval: int | float | str | timedelta | Mapping[str, int] = 1.0
    """Validate after this fraction of an epoch (float), this many training batches of a replica (int), or this time:
    "DD:HH:MM:SS", a timedelta or a mapping such as {"minutes": 30}."""
    check_val_every_n_epoch: int | None = 1
    """Validate every n epochs. None: count val_check_interval's batches over epochs."""
    num_sanity_val_steps: int = 2
    """Validation batches to run before training. -1: all of them; 0: none."""
    inference_mode: bool = True
    """Evaluate under torch.inference_mode; False: under torch.no_grad."""

    # --- what is written --------------------------------------------------------------------------------------------
    default_root_dir: "str | Path" = "runs"
    """The folder that holds run directories."""
    run_name: str = "default"
    """The run directory is default_root_dir/run_name/version_N."""
    logger: "bool | Logger | list[Logger] | None" = True
    """True: TensorBoard and metrics.jsonl in the run directory. False or None: nothing. Or your own."""
    write_csv: bool = False
    """Write `metrics.csv` besides. `run.csv` in a config."""
    save_code: bool = True
    """Store the git commit and uncommitted changes in the run directory. `run.save_code` in a config."""
    log_every_n_steps: int = 50
    """Optimizer steps between two logging points; values are read from the device only then. The last step is one."""
    callbacks: "list[Callback] | Callback | None" = None
    """Callbacks of the run."""
    enable_checkpointing: bool = True
    """Add a Checkpoint callback if none is given."""
    checkpoint_format: "CheckpointFormat | None" = None
    """Format of the checkpoints, an object of your own class. None: Legato's directories."""
    enable_progress_bar: bool = True
    """Add a ProgressBar callback if none is given."""
    enable_model_summary: bool = True
    """Add a ModelSummary callback if none is given."""

    # --- processes --------------------------------------------------------------------------------------------------
    cluster: Literal["auto", "off"] = "auto"
    """Join the processes that torchrun, SLURM or MPI started ("auto"), or ignore their variables ("off")."""
    max_restarts: int = 0
    """Number of times that Legato's launcher restarts failed workers, each time from the newest complete checkpoint."""
    hang_timeout: float | None = None
    """Seconds without progress after which to end the run; more than the longest step, save or hook. None: never."""
    hang_report_seconds: float | None = 120.0
    """Report where each rank is after this many seconds, and 20 longest steps, without progress. None: never."""
    garbage_collection_seconds: float | None = 10.0
    """Run Python's full garbage collections about this often, on all ranks at once. None: as Python does, within steps.

    What was made before the first is not looked at again for ten minutes (`gc.freeze`).
    """
    signal_grace_seconds: float = 30.0
    """Seconds in which a run must react to SIGTERM or SIGHUP, or its process ends; a save in progress is finished."""
    requeue: bool = False
    """Under SLURM, requeue the job when it is told to end (SIGTERM, SIGUSR1), once its checkpoint is saved."""

    def __post_init__(self) -> None:
        """Overridden by the Trainer, which builds its parts from the arguments."""


ARGUMENT_NAMES: tuple[str, ...] = tuple(TrainerArguments.__dataclass_fields__)

MINIMUM = {
    "accumulate_grad_batches": 1,
    "num_nodes": 1,
    "log_every_n_steps": 1,
    "max_epochs": -1,
    "max_steps": -1,
    "min_epochs": 0,
    "min_steps": 0,
    "fast_dev_run": 0,
    "num_sanity_val_steps": -1,
    "check_val_every_n_epoch": 1,
    "reload_dataloaders_every_n_epochs": 0,
    "replicas": 1,
    "threads": 1,
    "max_restarts": 0,
    "nan_skips": 0,
}
"""Minimum of each argument that is a count."""
MAY_BE_NONE = (
    *("max_epochs", "min_epochs", "min_steps", "check_val_every_n_epoch", "replicas", "threads"),
    "gradient_clip_val",
    *("hang_timeout", "hang_report_seconds", "garbage_collection_seconds"),
)
LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches")
LOADER_OPTIONS = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
CHOICES = {
    "reproducible": ("off", "order", "bitwise"),
    "gradient_clip_algorithm": ("norm", "value"),
    "nan": ("raise", "skip", "ignore"),
    "resume_at": ("step", "epoch"),
    "cluster": ("auto", "off"),
}
ACCELERATORS = ("auto", "cpu", "cuda", "gpu", "mps", "xpu", "hpu", "npu", "mtia")
"""Words for trainer.accelerator; an extension of torch may bring others."""


def wanted(name: str, value: Any) -> str | None:
    """Return what an argument of the Trainer must be if `value` is invalid, else None."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None and name in MAY_BE_NONE:
        return None
    if name in MINIMUM:
        whole = isinstance(value, int) and (number or name == "fast_dev_run")
        return None if whole and value >= MINIMUM[name] else f"an integer of at least {MINIMUM[name]}"
    if name in LIMITS:
        fits = number and value >= 0 and (isinstance(value, int) or value <= 1)
        return None if fits else "a count (int) or a fraction from 0.0 to 1.0 (float)"
    if name in CHOICES and value not in CHOICES[name]:
        return f"one of {CHOICES[name]}"
    if name == "gradient_clip_val" and not (number and value >= 0):
        return "a positive number, or 0 for no clipping"
    if (name == "hang_timeout" or name.endswith("_seconds")) and not (number and value > 0):
        return "a positive number of seconds"
    if name == "val_check_interval":
        if isinstance(value, (str, timedelta, Mapping)):
            return None  # read by parse_duration
        fits = number and value > 0 and (isinstance(value, int) or value <= 1)
        return None if fits else "a count (int), a fraction up to 1.0 (float) or a time"
    # torch alone knows the kinds that its extensions add: without it only a word that looks misspelt is refused
    if (
        name == "accelerator"
        and value not in ACCELERATORS
        and (not isinstance(value, str) or did_you_mean(value, ACCELERATORS))
    ):
        return f"one of {', '.join(ACCELERATORS)}"
    if name == "leave_out_samples" and value is not None:
        fits = isinstance(value, list) and all(type(index) is int and index >= 0 for index in value)
        return None if fits else "a list of indices of the training dataset, of which the first is 0"
    if name == "devices" and not _counts_devices(value):
        return "a positive count, a list of different indices, -1 or 'auto'"
    return None


def _counts_devices(value: Any) -> bool:
    if isinstance(value, list):
        indices = [one for one in value if isinstance(one, int) and not isinstance(one, bool) and one >= 0]
        return bool(value) and len(set(indices)) == len(value)
    if isinstance(value, str):
        return value in ("auto", "-1") or (value.isdecimal() and int(value) > 0)
    return isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value > 0)


TORCH_OPTIONS = {
    "comm_hook": "A subclass of DDPStrategy registers its hook: see docs/how-to/own-strategy.md.",
    "comm_hook_options": "A subclass of DDPStrategy registers its hook: see docs/how-to/own-strategy.md.",
    "device_ids": "trainer.devices names the devices.",
    "output_device": "The outputs meet on the first of trainer.devices.",
    "dim": "Batches are scattered along their first dimension.",
    "process_group": "Call torch.distributed.init_process_group before fit: its group is the one that is used.",
    "static_graph": "Leave it out: the graph of each step is taken as it comes.",
}
"""Arguments of torch's DataParallel and DistributedDataParallel that strategies lack, and what serves instead."""
INSTEAD = {
    "channels_last": "Call to(memory_format=torch.channels_last) on the task in __init__, and on its images.",
    "optimizer_kernels": "Give fused=True or foreach=True to the optimizer in configure_optimizers.",
    "benchmark": "Set torch.backends.cudnn.benchmark in the task's setup.",
    "gpus": 'Say accelerator="gpu", devices=...',
    "plugins": "Give options or an object to `strategy`, a word to `precision`.",
    "profiler": "Say callbacks=[Profiling(SimpleProfiler())], of legato.trainer.profiling.",
    "resume_from_checkpoint": "Say trainer.fit(..., ckpt_path=...).",
}
"""Replacements for arguments of Lightning's Trainer."""


def _with_named_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `init` to name an unknown argument, with a suggestion."""

    @wraps(init)
    def checked(self: TrainerArguments, **arguments: Any) -> None:
        for name in arguments:
            if name not in ARGUMENT_NAMES:
                hint = f" {INSTEAD[name]}" if name in INSTEAD else did_you_mean(name, ARGUMENT_NAMES)
                raise TypeError(f"Trainer has no argument {name!r}.{hint}")
        init(self, **arguments)

    return checked


# Wrapped here and not in the class, whose source config/check.py reads as that of a plain dataclass.
TrainerArguments.__init__ = _with_named_arguments(TrainerArguments.__init__)  # type: ignore[method-assign]
