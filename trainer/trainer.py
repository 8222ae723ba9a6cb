"""Trainer: how training works, from top to bottom.

`fit` is the training loop, `train_step` one optimizer step, `evaluate` one pass over evaluation loaders.
`lifecycle.begin` sets up everything that these methods use. `view.TrainerView` has the read-only properties.
"""

from pathlib import Path
from typing import Any

from ..base.arguments import TrainerArguments, suggesting
from ..base.location import to_location
from ..callbacks.callback import Callback
from ..tasks.data_module import DataModule
from ..tasks.task import Task
from . import evaluation, lifecycle, masked, remote_call
from .data.randomness import seed_generators
from .data.sampling import mix
from .data.steps import ReplicaBatch, StepInput
from .hooks import check_names
from .metrics.reduce import Reduced
from .optimization.outputs import as_outputs, losses_of
from .request import Request
from .resume.saver import Saver
from .runs.record import command_of_process
from .setup.checks import check_arguments
from .setup.data import make_loaders
from .setup.outputs import note_epoch
from .setup.parts import make_callbacks, make_loggers, make_strategy
from .state import State
from .view import TrainerView

EVALUATION, EPOCH = 0x6576616C, 0x65706F6368
"""Keys that separate the random numbers of evaluations and of epoch starts from those of training."""

Source = str | Path | None
"""A checkpoint, a folder of checkpoints, or a keyword such as "auto", "last" or "best"."""


class Trainer(TrainerView):  # noqa: D101 - arguments and docstring come from TrainerArguments
    def __post_init__(self) -> None:
        check_arguments(self)
        self.state = State()
        self.run = self.run_dir = self.assigned_dir = self.config_text = self.explicit_config = None
        self.command = command_of_process()
        self.agreed_metrics, self.logged_metrics, self.progress_bar_metrics, self.lengths = {}, {}, {}, {}
        self.should_stop = False
        self.strategy = make_strategy(self, self.strategy)
        self.loggers = make_loggers(self.logger)
        self.logger = self.loggers[0] if self.loggers else None
        self.callbacks = make_callbacks(self, self.callbacks)
        self.saver = Saver(self)

    def fit(
        self,
        model: Task,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: Source = None,
        resume: Source = None,
    ) -> None:
        """Train a task.

        `resume="auto"` continues the run with this name from its newest complete checkpoint, if there is one, in the
        same run directory. If `resume` is a path, training starts from that checkpoint in a new run directory.
        Lightning calls this argument `ckpt_path`.
        """
        request = Request.of("fit", model, datamodule, source=resume or ckpt_path)
        request.take_loaders(train=train_dataloaders, validation=val_dataloaders)
        if remote_call.needs_workers(self, request):
            remote_call.run_in_workers(self, request)
            return
        self.state, self.run_dir, self.should_stop = self.new_state(), self.assigned_dir, False
        with lifecycle.begin(self, request) as run, run.preemption:
            state, schedule = self.state, run.schedule
            run.hooks.call("on_fit_start")
            self.sanity_check()
            run.start_training()
            while run.loop.remaining != "nothing":
                with run.membership:  # an elastic run re-enters the loop here when processes leave or join
                    while not schedule.is_done():
                        self.begin_epoch()
                        for step in run.steps_left():
                            self.train_step(step)
                            # before validation, which may save: a step is logged before its checkpoint is written
                            if state.global_step % self.log_every_n_steps == 0:
                                self.log_step()
                            if schedule.validation_is_due():
                                self.validate_now()
                            schedule.after_validation()
                            if run.loop.epoch_skipped or schedule.stops_here():
                                break
                        self.end_epoch()
                    run.end_training()

    def validate(
        self,
        model: Task | None = None,
        dataloaders: Any = None,
        ckpt_path: Source = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the validation data. Return each loader's metrics, and print them if `verbose` is true."""
        return self.evaluate_alone("validate", model, dataloaders, datamodule, source=ckpt_path, verbose=verbose)

    def test(
        self,
        model: Task | None = None,
        dataloaders: Any = None,
        ckpt_path: Source = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the test data. Return each loader's metrics, and print them if `verbose` is true."""
        return self.evaluate_alone("test", model, dataloaders, datamodule, source=ckpt_path, verbose=verbose)

    def predict(
        self,
        model: Task | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: Source = None,
        return_predictions: bool | None = None,
    ) -> list[Any]:
        """Return predict_step's output for each batch, in loader order; with multiple loaders, one list per loader."""
        return self.evaluate_alone("predict", model, dataloaders, datamodule, return_predictions, source=ckpt_path)

    # --- methods that a subclass may override ------------------------------------------------------------------------
    def new_state(self) -> State:
        """Return the initial state of a fit."""
        return State()

    def check(self, *owners: Task | DataModule | Callback) -> None:
        """Raise TaskError for a method with a misspelled hook name, or a hook with the wrong arguments."""
        for owner in owners:
            check_names(owner)

    # --- one optimizer step -----------------------------------------------------------------------------------------
    def train_step(self, step: StepInput) -> None:
        """Run the forward and backward passes for every batch of this process's replicas, then update the weights."""
        run, output, batch = self.current_run, None, None
        run.begin_step(step)
        if step.masked:  # other processes' batches, run here only to take part in their collectives
            masked.begin_step(run, step)
        for item in step.batches:
            batch = run.open_batch(item)  # selects the replica, seeds random numbers, moves the batch to the device
            if run.hooks["on_train_batch_start"] and run.leaves_epoch(batch, item.batch_idx):
                return
            output = self.train_batch(step, item, batch)
            if item is not step.batches[-1]:
                run.hooks.call("on_train_batch_end", as_outputs(output), batch, item.batch_idx)
        if not step.batches and step.samples:
            masked.stand_in(run, step)
        run.strategy.end_step()
        run.optimization.step(step)  # guard, clipping, hooks, optimizers, loss scale
        run.schedule.count(step)
        run.end_step(step, output, batch)  # on every process, even one without a batch

    def train_batch(self, step: StepInput, item: ReplicaBatch, batch: Any) -> Any:
        """Run a batch's forward and backward passes, and return training_step's output. A Closure calls this again."""
        run = self.current_run
        hooks, strategy, optimization, is_last = run.hooks, run.strategy, run.optimization, item is step.batches[-1]
        output = strategy.training_step((batch, item.batch_idx)[: run.arity], item.replica, is_last)
        if not optimization.automatic:
            return output
        if optimization.clears_late and item is step.batches[0]:
            optimization.zero_gradients(step)
        losses = losses_of(output, len(optimization.loss_inputs))
        weight = item.samples * run.gradient_scale / step.samples  # also correct for short batches and accumulation
        if optimization.weights.used is not False or (isinstance(output, dict) and "weight" in output):
            weight = optimization.weights.take(output, item, step)
        for index, loss in enumerate(losses):
            for hook in hooks["on_before_backward"]:
                hook(loss)
            scaled = loss if isinstance(weight, float) and weight == 1.0 else loss * weight
            if optimization.watches_losses:
                run.metrics.watch(loss)
            if optimization.losses is not None:
                optimization.losses.append((index, scaled.detach()))
            inputs = None if len(losses) == 1 else optimization.loss_inputs[index]
            strategy.backward(scaled, is_last, inputs, index + 1 < len(losses))
            for hook in hooks["on_after_backward"]:
                hook()
        if not losses:
            run.metrics.leave_out_batch()
            strategy.leave_out(is_last, after_forward=True)
        return output

    # --- around the steps -------------------------------------------------------------------------------------------
    def begin_epoch(self) -> None:
        """Begin an epoch, or continue one that was interrupted."""
        run, state, every = self.current_run, self.state, self.reload_dataloaders_every_n_epochs
        if every and state.epoch and state.epoch % every == 0 and not state.epoch_steps:
            make_loaders(run)
        run.metrics.open("train", fresh=False)
        seed_generators(mix(state.seed, EPOCH, state.epoch))
        note_epoch(run)
        run.hooks.call("on_train_epoch_start")
        if state.epoch_steps and run.schedule.validation_is_due():  # resumed between a step and its validation
            self.validate_now()
        run.schedule.after_validation()

    def end_epoch(self) -> None:
        """End the epoch. If the run stops mid-epoch, call the end hooks but don't count the epoch."""
        run, schedule = self.current_run, self.current_run.schedule
        run.end_steps()
        complete = run.loop.epoch_skipped or not schedule.stops_here() or schedule.epoch_is_full
        if complete:
            schedule.step_by_epoch()
        if schedule.validation_ends_epoch(complete):
            run.save_cut_epoch(complete)  # before validation: a resumed run continues as if it had not happened
            self.validate_now()
        schedule.after_validation(ends_epoch=True)
        run.call_epoch_end("train")
        # a partial epoch is not written: the resumed run logs the complete one
        self.publish(run.metrics.reduce_epoch(keep=not complete), write=complete)
        if complete:
            schedule.end_epoch()
        for hook in run.hooks.late["on_train_epoch_end"]:  # these hooks decide by the epoch's metrics
            hook()
        schedule.count_epoch()
        run.agree_on_stop()  # a callback may have set should_stop

    def log_step(self) -> None:
        """Write the latest step's values, which have remained on their device until now."""
        run, state = self.current_run, self.state
        if state.logged_at == state.global_step:  # the last step may also be a multiple of log_every_n_steps
            return
        reduced = run.log_point()
        state.logged_at = state.global_step
        self.publish(reduced)

    def publish(self, reduced: Reduced, write: bool = True) -> None:
        """Publish reduced values to callbacks and the progress bar and, if `write` is true, to loggers."""
        self.agreed_metrics.update(reduced.tensors())
        self.current_run.metrics.measured_at.update(dict.fromkeys(reduced.all, self.state.global_step))
        self.progress_bar_metrics.update(reduced.progress_bar)
        if write:
            self.logged_metrics.update(reduced.loggers)
        if write and reduced.loggers and self.running and not self.sanity_checking:
            self.current_run.write_point(reduced.loggers)

    # --- evaluation -------------------------------------------------------------------------------------------------
    def sanity_check(self) -> None:
        """Run a few validation batches before training to catch mistakes early, and discard their metrics."""
        run, batches = self.current_run, self.num_sanity_val_steps
        if batches == 0 or "validation" not in run.data.evaluations or run.source is not None:
            return
        run.loop.doing = "sanity_check"
        run.hooks.call("on_sanity_check_start")
        self.evaluate("validation", None if batches in (-1, float("inf")) else batches)
        run.hooks.call("on_sanity_check_end")
        self.agreed_metrics, self.logged_metrics, self.progress_bar_metrics = {}, {}, {}

    def validate_now(self) -> None:
        """Validate in the middle of training."""
        run = self.current_run
        run.begin_validation()
        self.evaluate("validation")
        run.end_validation()

    def evaluate_alone(self, stage: str, model: Task | None, *data: Any, **options: Any) -> list[Any]:
        """Run validate, test or predict. If no task is passed, use the previous run's task with its best weights."""
        request = Request.of_evaluation(self, stage, model, *data, **options)
        if remote_call.needs_workers(self, request):
            outputs: list[Any] = remote_call.run_in_workers(self, request)
            return outputs
        with lifecycle.begin(self, request) as run:
            if run.loop.doing not in run.data.evaluations:
                return []  # no batches, so no hooks either
            self.evaluate(run.loop.doing, keep_outputs=request.keep_outputs)
            return evaluation.results(run, request)

    def evaluate(self, stage: str, limit: int | None = None, keep_outputs: bool = False) -> None:
        """Run one pass over the "validation", "test" or "predict" loaders, counting each sample exactly once."""
        run, state = self.current_run, self.state
        hooks, metrics, data, outputs = run.hooks, run.metrics, run.data.evaluations, run.loop.outputs
        step, (arity, begin, end) = f"{stage}_step", evaluation.calls_of(run, stage)
        with evaluation.no_gradients(run):
            run.strategy.align_buffers()
            run.remember_training_mode()
            run.seed_hooks(f"on_{stage}_start")
            hooks.call(f"on_{stage}_model_eval")
            metrics.open(stage, loaders=len(data[stage].loaders))
            hooks.call(f"on_{stage}_start")
            hooks.call(f"on_{stage}_epoch_start")
            for item in masked.counted(run, data[stage].batches(state.epoch, limit), step, arity):
                arguments = item.batch_idx, item.dataloader_idx
                metrics.open_batch(item.replica, item.samples)
                metrics.open_loader(item.dataloader_idx)
                seed_generators(mix(state.seed, EVALUATION, state.global_step, item.replica, *arguments))
                batch = item.batch if run.transfer is None else run.transfer(item.batch, item.dataloader_idx)
                for hook in begin:
                    hook(batch, *arguments)
                output = run.strategy.evaluation_step(step, (batch, *arguments)[:arity])
                for hook in end:
                    hook(output, batch, *arguments)
                if keep_outputs:
                    outputs.append((item.dataloader_idx, item.batch_idx, item.replica, evaluation.kept(run, output)))
            run.call_epoch_end(stage)
        reduced = metrics.reduce_epoch()  # outside inference mode, so that metrics are reset to ordinary tensors
        if run.loop.doing == "validation":
            run.schedule.note_validation()
        self.publish(reduced)
        hooks.call(f"on_{stage}_end")
        hooks.call(f"on_{stage}_model_train")

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def save_checkpoint(self, path: str | Path, weights_only: bool = False, asynchronous: bool = False) -> None:
        """Write a checkpoint of the current state. All ranks must call this."""
        self.saver.save(to_location(path), weights_only, asynchronous)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint that this run wrote. Any rank may call this, but only rank 0 deletes the files."""
        self.saver.remove(to_location(path))


suggesting(Trainer, "fit", "validate", "test", "predict")
Trainer.__doc__ = TrainerArguments.__doc__  # the arguments are documented there only
