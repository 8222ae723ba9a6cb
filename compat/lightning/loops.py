"""Loop objects, which provide a trainer's progress under Lightning's names. They do not run anything."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, tensor

from ... import CombinedLoader
from ...callbacks.prediction_writer import PredictionWriter
from .aliases import alias
from .attributes import TrainerAttributes
from .connectors import DataLoaderSource
from .placeholders import OwnParts, UnsupportedError, refuse_overrides
from .results import only_logged, print_results
from .states import RunningStage, TrainerFn


class Counts:
    """Base class for counts that are read from a run. Setting a count raises UnsupportedError."""

    def __init__(self, **counts: Any) -> None:
        vars(self).update(counts)

    # an error, because a program that sets counts expects a run to continue from them
    def __setattr__(self, name: str, value: Any) -> None:
        raise UnsupportedError(
            f"{type(self).__name__}.{name} = {value!r}: a run's counters cannot be set. To resume, call "
            "fit(ckpt_path=...). You can set only fit_loop.max_epochs and fit_loop.epoch_loop._batches_that_stepped."
        )


class Tracker(Counts):
    """Counts of ready, started, processed and completed items."""

    ready: int
    completed: int
    started: int
    processed: int


class Progress(Counts):
    """Counts for the entire run (`total`) and for the current epoch or call (`current`)."""

    total: Tracker
    current: Tracker


class BatchProgress(Progress):
    """Counts of batches."""

    is_last_batch: bool


class OptimizerProgress(Counts):
    """Counts of optimizer steps."""

    step: Progress

    @property
    def optimizer(self) -> "OptimizerProgress":
        """This object itself, because there is a single count for all optimizers."""
        return self

    @property
    def optimizer_steps(self) -> int:
        """The number of completed steps."""
        return self.step.total.completed


def _tracker(done: int, begun: bool, ending: bool = False) -> Tracker:
    return Tracker(ready=done + begun, completed=done - ending, started=done + begun, processed=done)


CALLED_BY_LIGHTNING = ("run", "advance", "on_run_start", "on_advance_start", "on_advance_end", "on_run_end", "reset")
"""Methods of a loop that a run calls in Lightning but not in Legato."""


class Loop(OwnParts):
    """Base class for loops."""

    restarting = is_resuming = False

    def __init__(self, trainer: TrainerAttributes) -> None:
        refuse_overrides(self, CALLED_BY_LIGHTNING, "use hooks of a callback or of the module to change a run.")
        self.trainer = trainer


class FitLoop(Loop):
    """The training epochs."""

    restarted_mid_epoch = restarted_on_epoch_start = restarted_on_epoch_end = resumed_on_epoch_end = False

    def __init__(self, trainer: TrainerAttributes) -> None:
        super().__init__(trainer)
        self.epoch_loop = TrainingEpochLoop(trainer)

    # limits, which programs can set, and counts
    max_epochs, min_epochs, max_steps, min_steps = map(
        alias, ("trainer.max_epochs", "trainer.min_epochs", "trainer.max_steps", "trainer.min_steps")
    )
    max_batches = alias("trainer.num_training_batches")
    batch_idx, total_batch_idx = alias("epoch_loop.batch_idx"), alias("epoch_loop.total_batch_idx")
    _should_accumulate = alias("epoch_loop._should_accumulate")

    @property
    def epoch_progress(self) -> Progress:
        """Completed epochs."""
        trainer, run, done, inside = self.trainer, self.trainer.run, self.trainer.current_epoch, self.trainer.in_epoch
        in_batch, some = run is not None and run.metrics.in_step, trainer.state.epoch_steps > 0
        begun, at_end = inside and (in_batch or some), inside and some and not in_batch and trainer.training
        tracker = Tracker(ready=done + inside, completed=done, started=done + begun, processed=done + at_end)
        return Progress(total=tracker, current=tracker)

    @property
    def done(self) -> bool:
        """Whether a limit has been reached."""
        limit, steps, epochs = self.trainer.max_epochs, self.trainer.max_steps, self.epoch_progress.current.processed
        by_epochs = limit not in (None, -1) and epochs >= (limit or 0)
        return by_epochs or (steps != -1 and self.trainer.global_step >= steps)

    @property
    def skip(self) -> bool:
        """Whether fit would have nothing to train."""
        return self.done or self.trainer.limit_train_batches == 0

    @property
    def _combined_loader(self) -> CombinedLoader | None:  # private in Lightning; programs read its loaders
        loader = None if self.trainer.run is None else self.trainer.run.data.loaders.get("train")
        return (
            loader if loader is None or isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle")
        )

    @property
    def _data_source(self) -> DataLoaderSource:  # private in Lightning; programs read the source of the loaders
        return DataLoaderSource(self.trainer, "train", "train_dataloader")

    def setup_data(self) -> None:
        """Do nothing, because the run creates its loaders when it starts."""


class TrainingEpochLoop(Loop):
    """The batches of a training epoch."""

    def __init__(self, trainer: TrainerAttributes) -> None:
        super().__init__(trainer)
        self.val_loop = EvaluationLoop(trainer, TrainerFn.FITTING, RunningStage.VALIDATING)
        self.automatic_optimization = self.manual_optimization = Optimizing(trainer)

    max_steps, min_steps, global_step, is_last_batch = map(
        alias, ("trainer.max_steps", "trainer.min_steps", "trainer.global_step", "trainer.is_last_batch")
    )

    @property
    def _batches_that_stepped(self) -> int:  # private in Lightning; many programs read and set it
        """Number of batches that ended with an optimizer step: the logs' x-axis. Updated after on_train_batch_end."""
        return self.trainer.state.global_step - self.trainer.step_is_ending + self.trainer.logged_ahead

    @_batches_that_stepped.setter
    def _batches_that_stepped(self, value: int) -> None:
        self.trainer.logged_ahead += value - self._batches_that_stepped

    def _should_accumulate(self) -> bool:  # private in Lightning; programs with their own steps call it
        accumulated = self.batch_progress.current.ready % self.trainer.accumulate_grad_batches == 0
        return not accumulated and not self.done_by_batches

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_should_check_val_fx":
            raise UnsupportedError(
                "_should_check_val_fx cannot be replaced, because Legato's schedule decides when to validate. Set "
                "val_check_interval and check_val_every_n_epoch, or call trainer.validate after fit."
            )
        super().__setattr__(name, value)

    @property
    def batch_progress(self) -> BatchProgress:
        """Completed batches."""
        trainer = self.trainer
        in_epoch, of_run, begun = trainer.batches_done()
        ending = trainer.step_is_ending and trainer.training
        trackers = _tracker(of_run, begun, ending), _tracker(in_epoch, begun, ending)
        return BatchProgress(total=trackers[0], current=trackers[1], is_last_batch=trainer.is_last_batch)

    @property
    def batch_idx(self) -> int:
        """The index of the latest batch in its epoch."""
        return self.batch_progress.current.ready - 1

    @property
    def total_batch_idx(self) -> int:
        """The index of the latest batch in the run."""
        return self.batch_progress.total.ready - 1

    @property
    def done_by_batches(self) -> bool:
        """Whether the epoch's last batch is in progress or has completed."""
        return self.batch_progress.current.ready == self.trainer.num_training_batches or self.trainer.is_last_batch

    @property
    def done(self) -> bool:
        """Whether all of the epoch's batches have been completed or a limit has been reached."""
        return self.done_by_batches or FitLoop(self.trainer).done


class Optimizing(Loop):
    """Counts of optimizer steps."""

    @property
    def optim_progress(self) -> OptimizerProgress:
        """An object whose `optimizer_steps` is the number of completed steps."""
        return OptimizerProgress(step=self.optim_step_progress)

    @property
    def optim_step_progress(self) -> Progress:
        """Completed steps in manual optimization."""
        steps = _tracker(self.trainer.global_step, begun=False)
        return Progress(total=steps, current=steps)


class EvaluationLoop(Loop):
    """The batches of a validation or test run. Subclasses may override how results are printed."""

    def __init__(
        self,
        trainer: TrainerAttributes,
        trainer_fn: TrainerFn,
        stage: RunningStage,
        verbose: bool = True,
        inference_mode: bool = True,  # the trainer's value is used
    ) -> None:
        super().__init__(trainer)
        self.stage, self.verbose = stage, verbose
        self.doing = "test" if stage is RunningStage.TESTING else "validation"

    @staticmethod
    def _print_results(results: list[dict[str, Tensor]], stage: str) -> None:  # programs override it
        """Print the results of each loader."""
        print_results(results, stage)

    def show_results_of(self, run: Callable[[], list[dict[str, float]]], verbose: bool) -> list[dict[str, float]]:
        """Run an evaluation and return its results. If `verbose` is True, also print them."""
        # Lightning returns the values passed to loggers, Legato returns every value
        results = only_logged(run(), self.trainer.logged_metrics)
        if verbose and self.trainer.is_global_zero:
            shown = [{name: tensor(value) for name, value in metrics.items()} for metrics in results]
            self._print_results(shown, self.stage.value)
        return results

    inference_mode = alias("trainer.inference_mode")

    @staticmethod
    def _get_keys(data: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:  # private in Lightning; programs call it
        for name, value in data.items():
            if isinstance(value, Mapping):
                yield from ((name, *inner) for inner in EvaluationLoop._get_keys(value))
            else:
                yield (name,)

    @staticmethod
    def _find_value(data: Any, target: Sequence[str]) -> Any:  # private in Lightning; programs call it
        for name in target:
            if name not in data:
                return None
            data = data[name]
        return data

    @property
    def _data_source(self) -> DataLoaderSource:  # private in Lightning; programs read the source of the loaders
        method = "test_dataloader" if self.doing == "test" else "val_dataloader"
        return DataLoaderSource(self.trainer, self.doing, method)

    @property
    def max_batches(self) -> list[int | float]:
        """The number of batches in each loader."""
        return {"validation": self.trainer.num_val_batches, "test": self.trainer.num_test_batches}[self.doing]

    @property
    def num_dataloaders(self) -> int:
        """The number of loaders."""
        return len(self.max_batches)

    @property
    def batch_progress(self) -> Progress:
        """Completed batches in the latest pass over the loaders."""
        done = self.trainer.evaluation_batches_done(self.doing)
        return Progress(total=_tracker(done, begun=False), current=_tracker(done, begun=False))

    @property
    def skip(self) -> bool:
        """Whether there is nothing to evaluate."""
        return sum(self.max_batches) == 0


class PredictionLoop(Loop):
    """The batches of a prediction."""

    return_predictions = False

    @property
    def _loop_state(self) -> Any:
        """The state of the prediction in progress."""
        run = self.trainer.run
        return run.loop if run is not None and run.loop.open and run.stage == "predict" else None

    @property
    def _predictions(self) -> list[list[Any]]:  # private in Lightning; programs read and clear it
        outputs = [] if self._loop_state is None else self._loop_state.outputs
        if not outputs and self._writer is not None:
            written: list[list[Any]] = self._writer.kept_for_epoch()[0]
            return written
        return [[output for index, *_, output in outputs if index == loader] for loader in range(self.num_dataloaders)]

    @_predictions.setter
    def _predictions(self, value: list[list[Any]]) -> None:
        if any(value):
            raise UnsupportedError("trainer.predict_loop._predictions can only be cleared. Edit predict_step instead.")
        if self._loop_state is not None:
            self._loop_state.outputs.clear()

    @property
    def _writer(self) -> Any:
        writers = (callback for callback in self.trainer.callbacks if isinstance(callback, PredictionWriter))
        return next((item for item in writers if hasattr(item, "kept_for_epoch") and item.interval != "batch"), None)

    @property
    def current_batch_indices(self) -> Sequence[int]:
        """The dataset indices of the latest batch, or an empty list if the data has no indices."""
        item = None if self._loop_state is None else self._loop_state.item
        return [] if item is None or item.indices is None else item.indices

    @property
    def epoch_batch_indices(self) -> list[list[Any]]:
        """The dataset indices of each batch so far, as one list per loader.

        The lists are empty unless a callback writes predictions.
        """
        return [[] for _ in range(self.num_dataloaders)] if self._writer is None else self._writer.kept_for_epoch()[1]

    @property
    def batch_progress(self) -> Progress:
        """Completed batches."""
        done = self.trainer.evaluation_batches_done("predict")
        return Progress(total=_tracker(done, begun=False), current=_tracker(done, begun=False))

    inference_mode = alias("trainer.inference_mode")

    max_batches = alias("trainer.num_predict_batches")

    @property
    def num_dataloaders(self) -> int:
        """The number of loaders."""
        return len(self.max_batches)

    @property
    def predictions(self) -> list[Any]:
        """This process's predictions so far or, after the call, the final result.

        If there are multiple loaders, there is one list per loader.
        """
        if self._loop_state is None:
            return self.trainer.predictions
        lists = self._predictions
        return lists[0] if len(lists) == 1 else lists

    @property
    def skip(self) -> bool:
        """Whether there is nothing to predict."""
        return not any(self.max_batches)


def check_finite_loss(loss: Any) -> None:
    """Raise ValueError if the loss is not finite."""
    if isinstance(loss, Tensor) and not loss.isfinite().all():
        raise ValueError(f"The loss returned in training_step is {loss}.")
