"""Choices that a subclass of Trainer may override: state, strategies, callbacks, run directory, points of the log.

A Trainer for programs that were written for another library overrides these; they change nothing by themselves. Editors
and help() show the docstring of the class for the Trainer, which has none of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..base.errors import TaskError
from ..callbacks.callback import Callback
from ..tasks.hyperparameters import Hyperparameters
from ..tasks.task import Task
from . import strategies
from .data.dealing import EvaluationData
from .metrics.reduce import Reduced
from .optimization.optimizers import ManualOptimizer
from .resume.convert import averaged_weights
from .resume.left_out import logged_hyperparameters
from .runs import places
from .state import State
from .view import TrainerView


class TrainerDefaults(TrainerView):
    """Trains, validates, tests and predicts.

    Args:
        max_epochs: Stop after this many epochs. -1: no limit. Without max_epochs, max_steps and max_time: 1000.
        min_epochs: Do not stop early before this many epochs.
        max_steps: Stop after this many optimizer steps. -1: no limit.
        min_steps: Do not stop early before this many optimizer steps.
        max_time: Stop after this much time: "DD:HH:MM:SS", a timedelta, or its arguments as a mapping.
        fast_dev_run: Run this many batches of each stage (True: 1), without checkpoints and logs, as a quick test.
        strategy: Placement of replicas on devices: "auto", a name such as "ddp" or "fsdp", or a mapping of
            `name` and options.
        accelerator: "cpu", "cuda" (or "gpu"), "mps", or "auto": the best available.
        devices: Number of devices on this machine, their indices, or "auto": all of an accelerator, one process on CPU.
        num_nodes: Number of machines.
        replicas: Logical data-parallel workers, constant for the whole run. None: one per data-parallel
            process at the start.
        precision: 32, 64, "bf16-mixed", "16-mixed", "bf16-true", "16-true".
        seed: Determines, with config and data, the order of samples and every random number.
        reproducible: Same on any number of processes: "order" (samples, random numbers), "bitwise" (every
            bit) or nothing ("off").
        threads: Intra-op threads of each process. None: torch's choice, or 1 with "bitwise": their
            number changes last bits.
        deterministic: Use torch's deterministic kernels only; "warn" instead of an error if there is none.
        accumulate_grad_batches: Batches that each replica accumulates for one optimizer step.
        gradient_clip_val: Clip gradients to this norm or value before each step. None or 0: no clipping.
        gradient_clip_algorithm: "norm": clip the total norm; "value": clip each value.
        nan: Effect of a NaN or infinity: "raise" ends the run at a loss, "skip" skips a step with such a gradient.
        nan_skips: Steps in a row that nan=skip may skip before the run ends with an error.
        detect_anomaly: Let autograd name the operation whose gradient is NaN (slow).
        activation_checkpointing: Classes of blocks whose activations are recomputed in backward to save memory.
        compile: Compile the task's modules in place with torch.compile; a mapping holds its options, and
            `blocks`: classes.
        sync_batchnorm: Compute batch norm statistics over the batches of all replicas; each replica
            needs a process of its own.
        limit_train_batches: Batches per epoch of each replica: a count (int) or a fraction (float).
        limit_val_batches: Validation batches, counted over all replicas: a count (int) or a fraction (float).
        limit_test_batches: Test batches, counted over all replicas: a count (int) or a fraction (float).
        limit_predict_batches: Prediction batches, counted over all replicas: a count (int) or a fraction (float).
        overfit_batches: Train and validate on this many training batches only, in a fixed order.
        use_distributed_sampler: Deal samples out to replicas, but for loaders that are seen to yield each
            process its own share. False: all training loaders do.
        loader: Options of every DataLoader that is dealt out by sample, instead of its own: num_workers,
            prefetch_factor, persistent_workers, pin_memory. They change the speed and not the samples.
        prefetch_to_device: Copy a batch to a CUDA device while it computes the one before; takes memory
            for one more batch there.
        reload_dataloaders_every_n_epochs: Call the loader hooks of the task or data module again every n
            epochs. 0: never.
        leave_out_samples: Indices of the training dataset that are in no batch of any epoch; all other
            samples keep their step.
        resume_at: Point at which to resume if the samples of a step have changed (batch size, data, limits).
        val_check_interval: Validate after this fraction of an epoch (float), this many training batches
            of a replica (int), or this time: "DD:HH:MM:SS", a timedelta or a mapping such as {"minutes":
            30}.
        check_val_every_n_epoch: Validate every n epochs. None: count val_check_interval's batches over epochs.
        num_sanity_val_steps: Validation batches to run before training. -1: all of them; 0: none.
        inference_mode: Evaluate under torch.inference_mode; False: under torch.no_grad.
        default_root_dir: The folder that holds run directories.
        run_name: The run directory is default_root_dir/run_name/version_N.
        logger: True: TensorBoard and metrics.jsonl in the run directory. False or None: nothing. Or your own.
        write_csv: Write `metrics.csv` besides. `run.csv` in a config.
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
        hang_timeout: Seconds without progress after which to end the run; more than the longest step,
            save or hook. None: never.
        hang_report_seconds: Report where each rank is after this many seconds, and 20 longest steps,
            without progress. None: never.
        garbage_collection_seconds: Run Python's full garbage collections about this often, on all ranks
            at once. None: as Python does, within steps.
        signal_grace_seconds: Seconds in which a run must react to SIGTERM or SIGHUP, or its process
            ends; a save in progress is finished.
        requeue: Under SLURM, requeue the job when it is told to end (SIGTERM, SIGUSR1), once its checkpoint is saved.
    """

    keeps_gradients: ClassVar[bool] = False
    """Whether the gradients of a step stay until the next step's first forward is done, for its hooks to read."""
    shows_newest_batch: ClassVar[bool] = False
    """Whether the value of a step is that of its newest batch rather than the mean over its batches."""
    refuses_near_names: ClassVar[bool] = True
    """Whether a method named almost like a hook is an error rather than a warning."""
    logs_cut_epochs: ClassVar[bool] = False
    """Whether the values of an epoch that ends within are written, though a resume will write those of all of it."""
    logs_evaluation_batches: ClassVar[bool] = False
    """Whether what an evaluation logs with `on_step` is written for each of its batches."""
    bar_names_steps: ClassVar[bool] = False
    """Whether the progress bar has names of steps, such as loss_step, for what is averaged over epochs, too."""
    splits_names: ClassVar[bool] = False
    """Whether a name logged both in steps and between them has a value of each, rather than being refused."""
    refuses_no_value: ClassVar[bool] = False
    """Whether log(on_step=False, on_epoch=False) is an error rather than the mean over the epoch."""
    shares_metrics: ClassVar[bool] = False
    """Whether training and validation may log the same metric object, whose samples are then mixed."""
    ends_at_length: ClassVar[bool] = False
    """Whether an epoch of training ends at the length of a DataLoader whose IterableDataset goes on beyond it."""
    knows_last_batch: ClassVar[bool] = False
    """Whether a run of one process reads a stream without a length one step ahead, to know its last batch."""
    refuses_empty_loaders: ClassVar[bool] = True
    """Whether loaders without a batch, and a run whose first epoch has no loss, are an error rather than a warning."""
    closure_runs_step: ClassVar[bool] = False
    """Whether a task's own optimizer_step begins before the forward and backward, which its closure then runs."""
    pads_shares: ClassVar[bool] = False
    """Whether an epoch's last round repeats samples rather than leaving a replica with fewer: in training, and in a
    validation or test whose steps call collectives."""

    reads_streams_whole: ClassVar[bool] = False
    """Whether each process trains on all that an IterableDataset gives it, rather than on one batch in turn."""
    hooks_see_scaled_loss: ClassVar[bool] = False
    """Whether on_before_backward gets the loss with its weight in the step rather than as training_step returned it."""
    ends_epoch_with_last_batch: ClassVar[bool] = False
    """Whether schedulers that go by epochs step before on_train_batch_end of an epoch's last batch."""
    schedulers_count_batches: ClassVar[bool] = False
    """Whether schedulers that go by steps count the batches of the epoch, and ReduceLROnPlateau waits for a validation
    that follows the step."""
    overfits_validation: ClassVar[bool] = True
    """Whether overfit_batches validates on the training batches, too, rather than on as many of the validation's."""
    keeps_seed: ClassVar[bool] = True
    """Whether a run that goes on must be given the seed that it began with."""
    validates_when_stopped: ClassVar[bool] = False
    """Whether a run that is asked to stop within an epoch validates before it ends."""
    evaluates_with_states: ClassVar[bool] = False
    """Whether callbacks and the data module are given their states of a checkpoint that is evaluated, too."""
    weights_skip_callbacks: ClassVar[bool] = False
    """Whether callbacks neither add to a checkpoint that holds the weights alone nor look at one."""
    keeps_added_code: ClassVar[bool] = False
    """Whether what hooks add to a checkpoint, and it cannot hold, stays in the process rather than being refused."""
    marks_output: ClassVar[bool] = True
    """Whether what ranks other than 0 print begins with `[rank N]`, line by line."""
    records_starts: ClassVar[bool] = True
    """Whether each call of fit, validate, test and predict adds a start to the record in its run directory."""
    fits_continue: ClassVar[bool] = False
    """Whether a second fit goes on where the first one ended, so that no point of the log is void."""
    skips_ended_training: ClassVar[bool] = False
    """Whether a fit in which nothing is left to train leaves out the hooks around training."""
    no_output: ClassVar[dict[str, Any] | None] = None
    """Output that on_train_batch_end gets for a batch whose training_step returned None."""
    optimizer_wrapper: ClassVar[type[ManualOptimizer]] = ManualOptimizer
    """Class of what a task gets from `optimizers()`."""
    logs_hyperparameters: bool = True
    """Whether loggers are given the hyperparameters when a run begins."""

    def new_state(self) -> State:
        """Return the state with which a fit begins."""
        return State()

    def keeps_generators(self, alone: bool) -> bool:
        """Return whether hooks that set a run up draw from the generators as the script has left them.

        alone: these are the only process's, or those of every process.
        """
        return False

    def stage_of_hooks(self, stage: str) -> str:
        """Return what `setup` and `teardown` are given as their stage."""
        return stage

    def validation_check(self) -> Callable[[], bool] | None:
        """Return what decides after each step whether to validate; None: the arguments do."""
        return None

    def strategy_class(self, name: str) -> type[Any]:
        """Return the class behind the name of a strategy."""
        found: type[Any] = getattr(strategies, strategies.STRATEGIES[name].split(":")[1])
        return found

    def counted(self, data: EvaluationData) -> list[int | float]:
        """Return what `num_val_batches` and its like say of evaluation data."""
        return data.counts()

    def configured(self, task: Task) -> Any:
        """Return what the task's configure_optimizers returns."""
        return task.configure_optimizers()

    def ordered(self, callbacks: list[Callback]) -> list[Callback]:
        """Return callbacks in the order in which their hooks are called."""
        return callbacks

    def tell_caller(self, request: Any) -> Any:
        """Return what rank 0 tells the process that started it besides the results of the run."""

    def hear_worker(self, request: Any, told: Any) -> None:
        """Take what rank 0 has told, in the process that started it."""

    def note_failure(self) -> None:
        """Called when a call has failed, before the hooks that hear of it."""

    def refuse(self, fault: str) -> None:
        """Raise TaskError for what a run that is resumed, or on another number of processes, would do otherwise."""
        raise TaskError(fault)

    def default_callbacks(self) -> list[tuple[bool, type[Any], dict[str, Any]]]:
        """Return the callbacks that the arguments ask for: whether to add it, its class, its arguments."""
        from .. import callbacks as known

        logs = bool(self.loggers)
        return [
            (self.enable_progress_bar, known.ProgressBar, {}),
            (self.enable_model_summary, known.ModelSummary, {}),
            (logs, known.LearningRateMonitor, {}),
            (logs, known.ThroughputMonitor, {}),
            (self.max_time is not None, known.Timer, {"duration": self.max_time}),
            (self.enable_checkpointing, known.Checkpoint, {}),
        ]

    def weights_of(self, saved: Mapping[str, Any]) -> Any:
        """Return the weights of a checkpoint from which a run begins.

        For an evaluation those that were evaluated then, unless a callback of this run takes the averages itself.
        """
        if self.stage == "fit":
            return saved.get("state_dict")
        return averaged_weights(saved, [callback.state_key for callback in self.callbacks])

    def new_run_dir(self) -> Path | None:
        """Return the directory of a new run, made now; None where nothing is to be written."""
        if self.loggers or self.checkpoint_callback is not None:
            return places.create(Path(self.default_root_dir), self.run_name)
        return None

    def hyperparameters_to_log(self, owners: Sequence[Hyperparameters]) -> dict[str, Any] | None:
        """Return what loggers are given when a run begins, of the data module and the task; None: nothing."""
        found: dict[str, Any] = {}
        for owner in owners:
            if owner.__dict__.get("_log_hyperparams", True):
                found |= logged_hyperparameters(owner)
        return found or None

    def was_measured_in_epoch(self, name: str) -> bool:
        """Return whether a metric was measured in the current epoch, for a scheduler that goes by it after each one."""
        state, measured_at = self.state, self.current_run.metrics.measured_at.get(name)
        if measured_at == -1:  # a value of the checkpoint: of training it is measured again, of validation perhaps not
            measured_at = state.validated_at
        return measured_at is None or measured_at > state.global_step - state.epoch_steps

    def logs_last_step(self) -> bool:
        """Return whether the last step of a run is a logging point in any case."""
        return True

    def publish_batch(self, reduced: Reduced, index: int) -> None:
        """Publish what rank 0 has logged for a batch of an evaluation, the `index`-th of its loader in this run."""
        self.logged_metrics.update(reduced.loggers)
        self.current_run.write(index, reduced.loggers)

    def log_point(self, values: dict[str, float]) -> tuple[int, dict[str, float]]:
        """Return the place of a point of the log on the x-axis, and its values."""
        step, epoch = self.current_run.evaluated_point or (self.state.global_step, self.state.epoch)
        return step, {**values, "epoch": epoch}
