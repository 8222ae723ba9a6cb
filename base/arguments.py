"""The Trainer's arguments, with their names, types, ranges, defaults and documentation.

The docstring of TrainerArguments is the single source for the reference page, `legato --help`, the JSON schema and
messages. This module does not import torch, so a misspelled key is reported before torch is imported.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from .errors import did_you_mean
from .quantities import Duration
from .values import Problem, Range, Rule, fit

if TYPE_CHECKING:
    from .contracts import Callback, CheckpointFormat, Logger, Strategy


def _counts_devices(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(index >= 0 for index in value)
    if isinstance(value, str):
        return value in ("auto", "-1") or (value.isdecimal() and int(value) > 0)
    return bool(value == -1 or value > 0)


# numbers and strings: YAML reads an unquoted 32 as a number, and Lightning accepts both
PrecisionName = Literal[
    "32", "32-true", 32, "64", "64-true", 64, "16-mixed", "bf16-mixed", "bf16-true", "16-true", "bf16", "16", 16
]
AcceleratorName = Literal["auto", "cpu", "cuda", "gpu", "mps", "xpu", "hpu", "npu", "mtia"]
ACCELERATORS: tuple[str, ...] = get_args(AcceleratorName)
"""Values of trainer.accelerator; torch extensions may add others."""


def _may_be_device_type(name: str) -> bool:
    # extensions of torch may add device types; until torch is imported, reject only names that look misspelled
    device_type = name.partition(":")[0]
    return device_type in ACCELERATORS[1:] or not did_you_mean(device_type, ACCELERATORS)


Accelerator = AcceleratorName | Annotated[str, Rule("a device type of a torch extension", _may_be_device_type)]
Devices = Annotated[int | str | list[int], Rule("a positive count, a list of indices, -1 or 'auto'", _counts_devices)]
Batches = Annotated[int, Range(0)] | Annotated[float, Range(0.0, 1.0)]
"""A number of batches (int) or a fraction of all batches (float)."""
Interval = Annotated[int, Range(1)] | Annotated[float, Range(0.0, 1.0, exclusive=True)] | Duration


@dataclass(kw_only=True, eq=False)
class TrainerArguments:
    """Arguments of the Trainer, which trains, validates, tests and predicts.

    Args:
        max_epochs: Stop after this many epochs. -1: no limit. Default: 1000, unless max_steps or max_time is set.
        min_epochs: Minimum number of epochs. The run cannot stop early until it has completed them.
        max_steps: Stop after this many optimizer steps. -1: no limit.
        min_steps: Minimum number of optimizer steps. The run cannot stop early until it has completed them.
        max_time: Stop after this duration: "DD:HH:MM:SS", a timedelta, or a mapping such as {"hours": 12}.
        fast_dev_run: Quick test: run this many batches of each stage (True: 1), without checkpoints or logs.
        strategy: How replicas are placed on devices: "auto", a name such as "ddp" or "fsdp", or a mapping with `name`
            and options.
        accelerator: "cpu", "cuda" (or "gpu"), "mps", "xpu" or another torch device type; "auto" selects whichever is
            available. "cuda:1" selects a single device.
        devices: Number of devices on this machine, or a list of their indices. "auto": all of an accelerator's devices,
            or one process on CPU. If you repeat an index, multiple processes share that device.
        num_nodes: Number of machines.
        replicas: Number of logical data-parallel workers, which stays the same throughout the run. None: one per
            data-parallel process at the start of the run.
        precision: 32, 64, "bf16-mixed", "16-mixed", "bf16-true" or "16-true".
        seed: Seed for the sample order and all random number generators.
        reproducible: Guarantee that holds for any number of processes: "order" (same samples and random numbers in each
            step), "bitwise" (bitwise identical results) or "off" (no guarantee).
        threads: Intra-op threads per process. This affects the low-order bits of results. None: torch's default, or 1
            under "bitwise".
        deterministic: Use only deterministic kernels. If an operation has none, True raises an error and "warn" issues
            a warning.
        recheck_every: To detect faulty hardware, compute the first step and every n-th step twice before updating the
            weights, and end the run if the results differ. Requires deterministic=True or reproducible="bitwise". None:
            never.
        accumulate_grad_batches: Number of batches that each replica accumulates per optimizer step.
        gradient_clip_val: Maximum norm or absolute value of the gradients. None or 0: no clipping.
        gradient_clip_algorithm: "norm": clip the total norm; "value": clip each element.
        nan: How to handle NaN and infinity: "raise" ends the run if a loss is not finite, "skip" skips a step if its
            gradients are not finite, and "ignore" continues.
        nan_skips: Maximum number of consecutive steps that nan="skip" skips before the run ends with an error.
        detect_anomaly: Make autograd report the operation that produced a NaN gradient. Slow.
        activation_checkpointing: Names of module classes whose activations are recomputed in the backward pass to save
            memory.
        compile: Compile the task's modules in place with torch.compile. A mapping passes options to torch.compile; its
            key `blocks` lists the module classes to compile.
        sync_batchnorm: Compute batch norm statistics over the batches of all replicas. Requires one process per
            replica.
        limit_train_batches: Number (int) or fraction (float) of training batches per replica per epoch.
        limit_val_batches: Number (int) or fraction (float) of validation batches, counted over all replicas.
        limit_test_batches: Number (int) or fraction (float) of test batches, counted over all replicas.
        limit_predict_batches: Number (int) or fraction (float) of prediction batches, counted over all replicas.
        overfit_batches: Train and validate on only this many batches (int: number, float: fraction), with the training
            batches in a fixed order. 0: off.
        use_distributed_sampler: True: shard training data across replicas, except for loaders that already yield a
            different shard in each process. False: your loaders shard the data. "even": shard, and repeat the first
            samples of an epoch until all replicas have the same number of samples, which is required if a step gathers
            data.
        loader: Options that override the settings of each DataLoader that Legato shards by sample: num_workers,
            prefetch_factor, persistent_workers, pin_memory. They affect speed, but not which samples are loaded.
        prefetch_to_device: On devices with streams, copy the next batch to the device while the current batch is being
            processed. Requires device memory for one more batch.
        reload_dataloaders_every_n_epochs: Call the loader hooks of the task or data module again every n epochs. 0:
            never. When a run resumes, the hooks are called again for the resumed epoch, with the same `current_epoch`
            as before.
        leave_out_samples: Dataset indices of training samples to leave out of every batch. All other samples stay in
            the same steps.
        resume_at: What to do if a run resumes mid-epoch and the samples in its steps have changed (batch size, data,
            limits). "step": raise an error; "epoch": end that epoch and start the next.
        val_check_interval: Validate after this fraction of an epoch (float), this many training batches per replica
            (int), or this duration: "DD:HH:MM:SS", a timedelta or a mapping such as {"minutes": 30}.
        check_val_every_n_epoch: Validate every n epochs. None: count the batches for val_check_interval across epochs.
        num_sanity_val_steps: Validation batches to run before training. -1: all of them; 0: none.
        inference_mode: True: evaluate under torch.inference_mode; False: under torch.no_grad.
        default_root_dir: Folder for run directories: a path, or a URL such as s3://bucket/runs.
        run_name: Name of the run. The run directory is default_root_dir/run_name/version_N.
        logger: Logger or list of loggers. True: TensorBoard and metrics.jsonl in the run directory; False or None: no
            logger.
        save_code: Store the git commit and uncommitted changes in the run directory. In a config, set `run.save_code`.
        log_every_n_steps: Number of optimizer steps between logging points. Values are read from the device only at
            logging points. The last step of a run is always a logging point.
        callbacks: Callbacks for the run.
        enable_checkpointing: Add a Checkpoint callback if you pass none.
        checkpoint_format: Checkpoint format, an instance of a CheckpointFormat subclass. None: Legato's directory
            format.
        enable_progress_bar: Add a ProgressBar callback if you pass none.
        enable_model_summary: Add a ModelSummary callback if you pass none.
        cluster: "auto": join the processes that torchrun, SLURM or MPI started; "off": ignore their environment
            variables.
        max_restarts: Maximum number of times Legato's launcher restarts failed workers. Each restart resumes from the
            newest complete checkpoint.
        hang_timeout: Seconds without progress after which the run ends with an error. Must be longer than the longest
            step, save or hook. None: never.
        requeue: Under SLURM, save a checkpoint and requeue the job when it receives SIGTERM or SIGUSR1.
    """

    # --- duration ---------------------------------------------------------------------------------------------------
    max_epochs: Annotated[int, Range(-1)] | None = None
    min_epochs: Annotated[int, Range(0)] | None = None
    max_steps: Annotated[int, Range(-1)] = -1
    min_steps: Annotated[int, Range(0)] | None = None
    max_time: Duration | None = None
    fast_dev_run: bool | Annotated[int, Range(0)] = False

    # --- devices ----------------------------------------------------------------------------------------------------
    strategy: "str | Mapping[str, Any] | Strategy" = "auto"
    accelerator: Accelerator = "auto"
    devices: Devices = "auto"
    num_nodes: Annotated[int, Range(1)] = 1
    replicas: Annotated[int, Range(1)] | None = None
    precision: PrecisionName = 32

    # --- reproducibility --------------------------------------------------------------------------------------------
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    reproducible: Literal["off", "order", "bitwise"] = "order"
    threads: Annotated[int, Range(1)] | None = None
    deterministic: bool | Literal["warn"] = False
    recheck_every: Annotated[int, Range(1)] | None = None

    # --- optimization -----------------------------------------------------------------------------------------------
    accumulate_grad_batches: Annotated[int, Range(1)] = 1
    gradient_clip_val: Annotated[float, Range(0)] | None = None
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    nan: Literal["raise", "skip", "ignore"] = "raise"
    nan_skips: Annotated[int, Range(0)] = 10
    detect_anomaly: bool = False
    activation_checkpointing: list[str] | None = None
    compile: bool | Mapping[str, Any] = False
    sync_batchnorm: bool = False

    # --- data -------------------------------------------------------------------------------------------------------
    limit_train_batches: Batches = 1.0
    limit_val_batches: Batches = 1.0
    limit_test_batches: Batches = 1.0
    limit_predict_batches: Batches = 1.0
    overfit_batches: Batches = 0.0
    use_distributed_sampler: bool | Literal["even"] = True
    loader: Mapping[str, Any] | None = None
    prefetch_to_device: bool = True
    reload_dataloaders_every_n_epochs: Annotated[int, Range(0)] = 0
    leave_out_samples: list[Annotated[int, Range(0)]] | None = None
    resume_at: Literal["step", "epoch"] = "step"

    # --- evaluation -------------------------------------------------------------------------------------------------
    val_check_interval: Interval = 1.0
    check_val_every_n_epoch: Annotated[int, Range(1)] | None = 1
    num_sanity_val_steps: Annotated[int, Range(-1)] = 2
    inference_mode: bool = True

    # --- output -----------------------------------------------------------------------------------------------------
    default_root_dir: "str | Path" = "runs"
    run_name: str = "default"
    logger: "bool | Logger | list[Logger] | None" = True
    save_code: bool = True
    log_every_n_steps: Annotated[int, Range(1)] = 50
    callbacks: "list[Callback] | Callback | None" = None
    enable_checkpointing: bool = True
    checkpoint_format: "CheckpointFormat | None" = None
    enable_progress_bar: bool = True
    enable_model_summary: bool = True

    # --- processes --------------------------------------------------------------------------------------------------
    cluster: Literal["auto", "off"] = "auto"
    max_restarts: Annotated[int, Range(0)] = 0
    hang_timeout: Annotated[float, Range(0, exclusive=True)] | None = None
    requeue: bool = False

    def __post_init__(self) -> None:
        """Hook that the Trainer overrides to build its attributes from the arguments."""


ARGUMENT_NAMES: tuple[str, ...] = tuple(TrainerArguments.__dataclass_fields__)
LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches")
LOADER_OPTIONS = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
TORCH_OPTIONS = {
    "broadcast_buffers": "Remove it: after each step, all processes have the buffers of the first replica.",
    "find_unused_parameters": "Add 0.0 times each unused parameter to the loss.",
    "comm_hook": "Register the hook in a subclass of DDPStrategy: see docs/how-to/own-strategy.md.",
    "comm_hook_options": "Register the hook in a subclass of DDPStrategy: see docs/how-to/own-strategy.md.",
    "device_ids": "Set trainer.devices.",
    "output_device": "Remove it: outputs are gathered on the first of trainer.devices.",
    "dim": "Remove it: batches are scattered along their first dimension.",
    "join": "Remove it: max_restarts replaces processes that die. An elastic run uses only one machine.",
    "min_processes": "Remove it: an elastic run continues with any number of processes.",
    "process_group": "Call torch.distributed.init_process_group before fit, which uses the default group.",
    "static_graph": "Remove it: Legato does not assume that the graph stays the same.",
}
"""Alternatives to arguments of DataParallel and DistributedDataParallel that Legato's strategies do not support."""
INSTEAD = {
    "benchmark": "Set torch.backends.cudnn.benchmark in the task's setup.",
    "channels_last": "Call to(memory_format=torch.channels_last) on the task in __init__, and on its images.",
    "garbage_collection_seconds": "Legato schedules garbage collection. To control it yourself, call gc.disable().",
    "gpus": 'Write accelerator="gpu", devices=...',
    "hang_report_seconds": "A hang is reported after 120 s without progress; hang_timeout ends the run.",
    "optimizer_kernels": "Pass fused=True or foreach=True to the optimizer in configure_optimizers.",
    "plugins": "Use `strategy` and `precision`.",
    "profiler": "Write callbacks=[legato.callbacks.Profile()], which records a trace with torch.profiler.",
    "signal_grace_seconds": "After SIGTERM, a run has 30 s to stop; a save in progress may take longer.",
    "resume_from_checkpoint": "Write trainer.fit(..., ckpt_path=...).",
    "write_csv": "Add legato.loggers.CSVLogger() to logger; in a config, add csv: {_target_: "
    "legato.loggers.CSVLogger} to loggers.",
}
"""Alternatives to arguments of Lightning's Trainer and to former arguments of Legato's Trainer."""


@cache
def argument_types() -> dict[str, Any]:
    """Return the type of each argument. The type is Any for classes in higher layers, which are not imported."""
    above = dict.fromkeys(("Strategy", "Callback", "CheckpointFormat", "Logger"), Any)
    return get_type_hints(TrainerArguments, localns=above, include_extras=True)


def read_strategy(trainer: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the strategy's name (None for a custom strategy) and options from a validated trainer section."""
    strategy = trainer["strategy"]
    options = dict(strategy) if isinstance(strategy, Mapping) else {"name": strategy}
    return options.pop("name", None), options


@cache
def argument_texts() -> dict[str, str]:
    """Return the documentation of each Trainer argument, keyed by name."""
    return documented_arguments(TrainerArguments.__doc__)


def documented_arguments(docstring: str | None) -> dict[str, str]:
    """Return the description of each argument in the "Args:" section of a docstring, keyed by name."""
    section = inspect.cleandoc(docstring or "").partition("Args:\n")[2]
    entries = re.findall(r"(?m)^    ([\w, `]+): (.*(?:\n {6,}.*)*)", section)
    return {name.strip(" `"): re.sub(r"\s+", " ", text) for names, text in entries for name in names.split(",")}


def problems(arguments: Mapping[str, Any]) -> list[Problem]:
    """Return the mistakes in Trainer arguments, with keys ("trainer", name). Mappings with `_target_` are accepted."""
    mistakes: list[Problem] = []
    for name, value in arguments.items():
        if name in ARGUMENT_NAMES:
            mistakes += fit(argument_types()[name], value, ("trainer", name), lambda value, key, base: (value, []))[1]
        else:
            mistakes.append(Problem(("trainer", name), f"is not an argument of Trainer.{instead_of(name)}"))
    return mistakes


def instead_of(name: object) -> str:
    """Return a sentence that suggests an alternative to an unknown Trainer argument; "" if there is none."""
    return f" {INSTEAD[str(name)]}" if name in INSTEAD else did_you_mean(str(name), ARGUMENT_NAMES)


def with_suggestions(function: Callable[..., Any], owner: str, instead: Callable[[str], str]) -> Callable[..., Any]:
    """Wrap a function so that an unknown argument raises a TypeError with a suggestion, as in Python 3.13."""
    names = inspect.signature(function).parameters

    @wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        for name in options.keys() - names.keys():
            raise TypeError(f"{owner} has no argument {name!r}.{instead(name)}")
        return function(*arguments, **options)

    return checked


def suggesting(cls: type, *methods: str) -> None:
    """Wrap methods of a class so that a misspelled argument raises a TypeError that suggests the closest name."""
    for method in methods:
        function = getattr(cls, method)
        nearest = partial(did_you_mean, names=[*inspect.signature(function).parameters][1:])
        setattr(cls, method, with_suggestions(function, method, nearest))


# outside the class, because cli/config/classes.py parses its source as that of a plain dataclass
TrainerArguments.__init__ = with_suggestions(TrainerArguments.__init__, "Trainer", instead_of)  # type: ignore[method-assign]
