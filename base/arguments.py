"""Arguments of the Trainer: name, type, range, default and documentation of each.

The docstring of TrainerArguments is their only text: the reference page, `legato --help`, editors and messages read it.
This module imports no torch, so that a misspelt key is refused before torch is loaded.
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
from .values import Build, Problem, Range, Rule, fit

if TYPE_CHECKING:
    from .contracts import Callback, CheckpointFormat, Logger, Strategy


def _counts_devices(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(index >= 0 for index in value)
    if isinstance(value, str):
        return value in ("auto", "-1") or (value.isdecimal() and int(value) > 0)
    return bool(value == -1 or value > 0)


# numbers beside words: YAML reads 32 without quotes as a number, and Lightning takes both
PrecisionName = Literal[
    "32", "32-true", 32, "64", "64-true", 64, "16-mixed", "bf16-mixed", "bf16-true", "16-true", "bf16", "16", 16
]
AcceleratorName = Literal["auto", "cpu", "cuda", "gpu", "mps", "xpu", "hpu", "npu", "mtia"]
ACCELERATORS: tuple[str, ...] = get_args(AcceleratorName)
"""Words for trainer.accelerator; an extension of torch may bring others."""


def _may_be_a_kind(word: str) -> bool:
    # torch alone knows the kinds that its extensions add: without it only a word that looks misspelt is refused
    kind = word.partition(":")[0]
    return kind in ACCELERATORS[1:] or not did_you_mean(kind, ACCELERATORS)


Accelerator = AcceleratorName | Annotated[str, Rule("a kind of torch's extensions", _may_be_a_kind)]
Devices = Annotated[int | str | list[int], Rule("a positive count, a list of indices, -1 or 'auto'", _counts_devices)]
Batches = Annotated[int, Range(0)] | Annotated[float, Range(0.0, 1.0)]
"""A count of batches (int), or a fraction of all (float)."""
Interval = Annotated[int, Range(1)] | Annotated[float, Range(0.0, 1.0, exclusive=True)] | Duration


@dataclass(kw_only=True, eq=False)
class TrainerArguments:
    """Trains, validates, tests and predicts; the fields are the arguments of the Trainer.

    Args:
        max_epochs: Stop after this many epochs. -1: no limit. Without max_epochs, max_steps and max_time: 1000.
        min_epochs: Do not stop early before this many epochs.
        max_steps: Stop after this many optimizer steps. -1: no limit.
        min_steps: Do not stop early before this many optimizer steps.
        max_time: Stop after this much time: "DD:HH:MM:SS", a timedelta, or its arguments as a mapping.
        fast_dev_run: Run this many batches of each stage (True: 1), without checkpoints and logs, as a quick test.
        strategy: Placement of replicas on devices: "auto", a name such as "ddp" or "fsdp", or a mapping of `name` and
            options.
        accelerator: "cpu", "cuda" (or "gpu"), "mps", "xpu", any other kind that torch supports, or "auto": the one it
            sees. "cuda:1" is one device.
        devices: Number of devices on this machine, their indices, or "auto": all of an accelerator, one process on
            CPU. Several processes share a device whose index is there several times.
        num_nodes: Number of machines.
        replicas: Logical data-parallel workers, constant for the whole run. None: one per data-parallel process at
            the start.
        precision: 32, 64, "bf16-mixed", "16-mixed", "bf16-true", "16-true".
        seed: Determines, with config and data, the order of samples and every random number.
        reproducible: Same on any number of processes: "order" (samples, random numbers), "bitwise" (every bit) or
            nothing ("off").
        threads: Intra-op threads of each process. None: torch's choice, or 1 with "bitwise": their number changes
            last bits.
        deterministic: Use torch's deterministic kernels only; "warn" instead of an error if there is none.
        recheck_every: Compute every n-th step, and the first one, twice before its update; end the run where bits
            differ, as on hardware that computes wrong. Needs deterministic=True or "bitwise". None: never.
        accumulate_grad_batches: Batches that each replica accumulates for one optimizer step.
        gradient_clip_val: Clip gradients to this norm or value before each step. None or 0: no clipping.
        gradient_clip_algorithm: "norm": clip the total norm; "value": clip each value.
        nan: Effect of a NaN or infinity: "raise" ends the run at a loss, "skip" skips a step with such a gradient.
        nan_skips: Steps in a row that nan=skip may skip before the run ends with an error.
        detect_anomaly: Let autograd name the operation whose gradient is NaN (slow).
        activation_checkpointing: Classes of blocks whose activations are recomputed in backward to save memory.
        compile: Compile the task's modules in place with torch.compile; a mapping holds its options, and `blocks`:
            classes.
        sync_batchnorm: Compute batch norm statistics over the batches of all replicas; each replica needs a process
            of its own.
        limit_train_batches: Batches per epoch of each replica: a count (int) or a fraction (float).
        limit_val_batches: Validation batches, counted over all replicas: a count (int) or a fraction (float).
        limit_test_batches: Test batches, counted over all replicas: a count (int) or a fraction (float).
        limit_predict_batches: Prediction batches, counted over all replicas: a count (int) or a fraction (float).
        overfit_batches: Train and validate on this many batches only; those of training are in a fixed order.
        use_distributed_sampler: Deal samples out to replicas, but for loaders that are seen to yield each process its
            own share. False: all training loaders do. "even": deal out, and repeat an epoch's first samples until each
            replica has equally many, as steps need that gather from all replicas.
        loader: Options of every DataLoader that is dealt out by sample, instead of its own: num_workers,
            prefetch_factor, persistent_workers, pin_memory. They change the speed and not the samples.
        prefetch_to_device: Copy a batch to a device with streams while it computes the one before; takes memory for
            one more batch there.
        reload_dataloaders_every_n_epochs: Call the loader hooks of the task or data module again every n epochs. 0:
            never. A resume calls them once more for the resumed epoch, with `current_epoch` as it was then.
        leave_out_samples: Indices of the training dataset that are in no batch of any epoch; all other samples keep
            their step.
        resume_at: Point at which to resume if the samples of a step have changed (batch size, data, limits). "step":
            refuse this within an epoch; "epoch": end that epoch and begin the next one.
        val_check_interval: Validate after this fraction of an epoch (float), this many training batches of a replica
            (int), or this time: "DD:HH:MM:SS", a timedelta or a mapping such as {"minutes": 30}.
        check_val_every_n_epoch: Validate every n epochs. None: count val_check_interval's batches over epochs.
        num_sanity_val_steps: Validation batches to run before training. -1: all of them; 0: none.
        inference_mode: Evaluate under torch.inference_mode; False: under torch.no_grad.
        default_root_dir: The folder that holds run directories, or an address such as s3://bucket/runs.
        run_name: The run directory is default_root_dir/run_name/version_N.
        logger: True: TensorBoard and metrics.jsonl in the run directory. False or None: nothing. Or your own.
        save_code: Store the git commit and uncommitted changes in the run directory. `run.save_code` in a config.
        log_every_n_steps: Optimizer steps between two logging points; values are read from the device only then. The
            last step is one.
        callbacks: Callbacks of the run.
        enable_checkpointing: Add a Checkpoint callback if none is given.
        checkpoint_format: Format of the checkpoints, an object of your own class. None: Legato's directories.
        enable_progress_bar: Add a ProgressBar callback if none is given.
        enable_model_summary: Add a ModelSummary callback if none is given.
        cluster: Join the processes that torchrun, SLURM or MPI started ("auto"), or ignore their variables ("off").
        max_restarts: Number of times that Legato's launcher restarts failed workers, each time from the newest
            complete checkpoint.
        hang_timeout: Seconds without progress after which to end the run; more than the longest step, save or hook.
            None: never.
        requeue: Under SLURM, requeue the job when it is told to end (SIGTERM, SIGUSR1), once its checkpoint is saved.
    """

    # --- how long ---------------------------------------------------------------------------------------------------
    max_epochs: Annotated[int, Range(-1)] | None = None
    min_epochs: Annotated[int, Range(0)] | None = None
    max_steps: Annotated[int, Range(-1)] = -1
    min_steps: Annotated[int, Range(0)] | None = None
    max_time: Duration | None = None
    fast_dev_run: bool | Annotated[int, Range(0)] = False

    # --- where ------------------------------------------------------------------------------------------------------
    strategy: "str | Mapping[str, Any] | Strategy" = "auto"
    accelerator: Accelerator = "auto"
    devices: Devices = "auto"
    num_nodes: Annotated[int, Range(1)] = 1
    replicas: Annotated[int, Range(1)] | None = None
    precision: PrecisionName = 32

    # --- the same result --------------------------------------------------------------------------------------------
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    reproducible: Literal["off", "order", "bitwise"] = "order"
    threads: Annotated[int, Range(1)] | None = None
    deterministic: bool | Literal["warn"] = False
    recheck_every: Annotated[int, Range(1)] | None = None

    # --- the step ---------------------------------------------------------------------------------------------------
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

    # --- what is written --------------------------------------------------------------------------------------------
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
        """Overridden by the Trainer, which builds its parts from the arguments."""


ARGUMENT_NAMES: tuple[str, ...] = tuple(TrainerArguments.__dataclass_fields__)
LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches")
LOADER_OPTIONS = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
TORCH_OPTIONS = {
    "broadcast_buffers": "Leave it out: after each step all processes have the buffers of the first replica.",
    "find_unused_parameters": "Add 0.0 times the parameters that a batch does not use to its loss.",
    "comm_hook": "A subclass of DDPStrategy registers its hook: see docs/how-to/own-strategy.md.",
    "comm_hook_options": "A subclass of DDPStrategy registers its hook: see docs/how-to/own-strategy.md.",
    "device_ids": "trainer.devices names the devices.",
    "output_device": "The outputs meet on the first of trainer.devices.",
    "dim": "Batches are scattered along their first dimension.",
    "join": "Leave it out: max_restarts replaces processes that die; an elastic run stays on one machine.",
    "min_processes": "Leave it out: an elastic run goes on with any number of processes.",
    "process_group": "Call torch.distributed.init_process_group before fit: its group is the one that is used.",
    "static_graph": "Leave it out: the graph of each step is taken as it comes.",
}
"""Arguments of torch's DataParallel and DistributedDataParallel that strategies lack, and what serves instead."""
INSTEAD = {
    "benchmark": "Set torch.backends.cudnn.benchmark in the task's setup.",
    "channels_last": "Call to(memory_format=torch.channels_last) on the task in __init__, and on its images.",
    "garbage_collection_seconds": "Legato collects by itself; call gc.disable() in the script to decide yourself.",
    "gpus": 'Say accelerator="gpu", devices=...',
    "hang_report_seconds": "Reports come after 120 s; hang_timeout ends the run.",
    "optimizer_kernels": "Give fused=True or foreach=True to the optimizer in configure_optimizers.",
    "plugins": "Give options or an object to `strategy`, a word to `precision`.",
    "profiler": "Say callbacks=[legato.callbacks.Profile()], a trace by torch.profiler.",
    "signal_grace_seconds": "A run has 30 s to answer SIGTERM, and a save that makes progress is finished.",
    "resume_from_checkpoint": "Say trainer.fit(..., ckpt_path=...).",
    "write_csv": "Add legato.loggers.CSVLogger() to logger; in a config loggers: {csv: {_target_: "
    "legato.loggers.CSVLogger}} beside those that you keep.",
}
"""What to write instead of arguments that Lightning's Trainer has, or that this one had."""


@cache
def argument_types() -> dict[str, Any]:
    """Return the type of each argument; of a class from a room above, which is not imported for it, Any."""
    above = dict.fromkeys(("Strategy", "Callback", "CheckpointFormat", "Logger"), Any)
    return get_type_hints(TrainerArguments, localns=above, include_extras=True)


def read_strategy(trainer: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the name and the options of the strategy of a checked trainer section; None for one of the user's own."""
    strategy = trainer["strategy"]
    options = dict(strategy) if isinstance(strategy, Mapping) else {"name": strategy}
    return options.pop("name", None), options


@cache
def argument_texts() -> dict[str, str]:
    """Return what the docstring says of each argument."""
    return documented_arguments(TrainerArguments.__doc__)


def documented_arguments(docstring: str | None) -> dict[str, str]:
    """Return what the section "Args:" of a docstring says of each argument, by name."""
    section = inspect.cleandoc(docstring or "").partition("Args:\n")[2]
    entries = re.findall(r"(?m)^    ([\w, `]+): (.*(?:\n {6,}.*)*)", section)
    return {name.strip(" `"): re.sub(r"\s+", " ", text) for names, text in entries for name in names.split(",")}


def problems(given: Mapping[str, Any], build: Build = lambda value, key, base: (value, [])) -> list[Problem]:
    """Return each mistake in arguments of the Trainer, under the key ("trainer", name).

    build: checks a mapping with `_target_`, or leaves that for later.
    """
    mistakes: list[Problem] = []
    for name, value in given.items():
        if name in ARGUMENT_NAMES:
            mistakes += fit(argument_types()[name], value, ("trainer", name), build)[1]
        else:
            mistakes.append(Problem(("trainer", name), f"is no argument of Trainer.{instead_of(name)}"))
    return mistakes


def instead_of(name: object) -> str:
    """Suggest, as a sentence, what to write instead of an unknown argument of the Trainer."""
    return f" {INSTEAD[str(name)]}" if name in INSTEAD else did_you_mean(str(name), ARGUMENT_NAMES)


def with_suggestions(function: Callable[..., Any], owner: str, instead: Callable[[str], str]) -> Callable[..., Any]:
    """Wrap a function to suggest what to write instead of an unknown argument, as Python does from 3.13 on."""
    names = inspect.signature(function).parameters

    @wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        for name in options.keys() - names.keys():
            raise TypeError(f"{owner} has no argument {name!r}.{instead(name)}")
        return function(*arguments, **options)

    return checked


def suggesting(cls: type, *methods: str) -> None:
    """Let methods of a class suggest the name of a misspelt argument."""
    for method in methods:
        function = getattr(cls, method)
        nearest = partial(did_you_mean, known=[*inspect.signature(function).parameters][1:])
        setattr(cls, method, with_suggestions(function, method, nearest))


# Here and not in the class, whose source config/classes.py reads as that of a plain dataclass.
TrainerArguments.__init__ = with_suggestions(TrainerArguments.__init__, "Trainer", instead_of)  # type: ignore[method-assign]
