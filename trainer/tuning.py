"""Searches before a run: for a learning rate, by a sweep, and for the largest batch size that memory holds.

Each search trains a copy of the task with a copy of the trainer, so that nothing of it is left in either of them, in
random number generators, or on the disk.
"""

import copy
import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..base.errors import ConfigError, DataError, WorkerError
from ..callbacks.callback import Callback
from ..tasks.data_module import DataModule
from ..tasks.task import Task
from .data.randomness import generator_states, set_generators
from .elastic.membership import Elasticity
from .resume.saver import Saver

if TYPE_CHECKING:
    from .trainer import Trainer

log = logging.getLogger("legato")

SMOOTHING = 0.98
"""Weight of the losses so far in the average that a sweep goes by."""


class LearningRateSweep(Callback):
    """Raises the learning rate from `lr_min` to `lr_max` step by step and records the smoothed loss of each step.

    mode: "exponential" or "linear".
    diverges_at: end when the smoothed loss is this many times the best one; None: never.

    After Smith, https://arxiv.org/abs/1506.01186. Raises ConfigError for another mode, fewer than 2 steps, or rates
    that do not rise from above 0.
    """

    after_every_step = True

    def __init__(
        self, mode: str, lr_min: float, lr_max: float, num_training: int, diverges_at: float | None = None
    ) -> None:
        if mode not in ("exponential", "linear"):
            raise ConfigError(f"mode must be 'exponential' or 'linear', got {mode!r}.")
        if not 0 < lr_min < lr_max or num_training < 2:
            raise ConfigError(
                f"A sweep of learning rates needs 0 < lr_min < lr_max and at least 2 steps; got {lr_min}, {lr_max} and "
                f"{num_training} steps."
            )
        self.mode, self.lr_min, self.lr_max, self.num_training = mode, lr_min, lr_max, num_training
        self.diverges_at = diverges_at
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        """The learning rate and the smoothed loss of each step."""
        self._average, self._best, self._step = 0.0, math.inf, 0
        self._losses: list[float] = []

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        share = (step + 1) / self.num_training if step else 0.0
        if self.mode == "linear":
            return self.lr_min + share * (self.lr_max - self.lr_min)
        return float(self.lr_min * (self.lr_max / self.lr_min) ** share)

    # --- the run ----------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: "Trainer", task: Task) -> None:
        """Take the learning rate over from the task's schedulers. Raises ConfigError for several optimizers."""
        if len(trainer.optimizers) != 1:
            raise ConfigError(f"A sweep of learning rates needs one optimizer; the task has {len(trainer.optimizers)}.")
        trainer.lr_scheduler_configs.clear()
        self._set_rate(trainer, self.rate(0))

    def on_train_batch_end(self, trainer: "Trainer", task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the loss, and after a step set the next learning rate."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if loss is not None:
            self._losses.append(float(loss))
        if trainer.global_step == self._step or self._step >= self.num_training or trainer.should_stop:
            return
        self._step = trainer.global_step
        ranks = trainer.strategy.data_ranks.gather_objects(self._losses)
        losses, self._losses = [one for rank in ranks for one in rank], []
        self._record(sum(losses) / len(losses) if losses else math.nan)
        if self.diverges_at is not None and self._step > 1 and self.results["loss"][-1] > self.diverges_at * self._best:
            trainer.should_stop = True
        self._best = min(self._best, self.results["loss"][-1])
        self._set_rate(trainer, self.rate(self._step))

    def _record(self, loss: float) -> None:
        if not math.isnan(loss):
            self._average = SMOOTHING * self._average + (1 - SMOOTHING) * loss
        self.results["lr"].append(self.rate(self._step - 1))
        # the average begins at 0: the division takes that off, with Lightning's exponent
        self.results["loss"].append(loss if math.isnan(loss) else self._average / (1 - SMOOTHING ** (self._step + 1)))

    def _set_rate(self, trainer: "Trainer", rate: float) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return the results, for the process that started the workers."""
        return {"results": {name: list(values) for name, values in self.results.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the results."""
        self.results = {name: list(values) for name, values in state_dict["results"].items()}

    # --- what it found ----------------------------------------------------------------------------------------------
    def best_step(self, skip_begin: int = 10, skip_end: int = 1) -> int | None:
        """Return the step at which the loss falls fastest with the learning rate; None with fewer than 2 points."""
        chosen = range(len(self.results["loss"]))[skip_begin : len(self.results["loss"]) - skip_end]
        finite = [index for index in chosen if math.isfinite(self.results["loss"][index])]
        if len(finite) < 2:
            return None
        losses = torch.tensor([self.results["loss"][index] for index in finite])
        rates = torch.tensor([self.results["lr"][index] for index in finite])
        return finite[int(torch.gradient(losses, spacing=[rates])[0].argmin())]

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate at which the loss falls fastest; None, with a message, with too few points."""
        step = self.best_step(skip_begin, skip_end)
        if step is None:
            log.error("The sweep has too few points to suggest a learning rate: give it more steps, or more data.")
            return None
        return self.results["lr"][step]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Return a matplotlib figure of loss against learning rate; `suggest` marks the suggestion.

        Raises ConfigError where matplotlib is not installed.
        """
        try:
            from matplotlib import pyplot
        except ModuleNotFoundError:
            raise ConfigError("A plot needs matplotlib: pip install matplotlib.") from None
        if ax is None:
            _, ax = pyplot.subplots()
        ax.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        step = self.best_step() if suggest else None
        if step is not None:
            point = self.results["lr"][step], self.results["loss"][step]
            ax.plot(*point, markersize=10, marker="o", color="red")
        if show:
            pyplot.show()
        return ax.figure


def sweep_learning_rates(
    trainer: "Trainer",
    task: Task,
    *data: Any,
    mode: str = "exponential",
    lr_min: float = 1e-8,
    lr_max: float = 1.0,
    steps: int = 100,
    epochs: int = -1,
    diverges_at: float | None = 4.0,
    **named_data: Any,
) -> LearningRateSweep:
    """Train a copy of the task for `steps` steps with rising learning rates, and return the losses found.

    epochs: end after this many epochs even if there are fewer steps; -1: no limit.
    data, named_data: the data, as `fit` takes it. The others are described at `LearningRateSweep`.
    """
    sweep = LearningRateSweep(mode, lr_min, lr_max, steps, diverges_at)
    with trial_of(trainer, task, *data, *named_data.values()) as (trial, copied):
        trial.callbacks, trial.max_steps, trial.max_epochs, trial.limit_val_batches = [sweep], steps, epochs, 0
        trial.fit(copied, *data, **named_data)
    return sweep


def find_batch_size(
    trainer: "Trainer",
    task: Task,
    *data: Any,
    stage: str = "fit",
    attribute: str = "batch_size",
    mode: str = "power",
    steps: int = 3,
    start: int = 2,
    trials: int = 25,
    margin: float = 0.05,
    largest: int = 8192,
    **named_data: Any,
) -> int:
    """Return the largest batch size that memory holds, and set it where it was found.

    stage: "fit", "validate", "test" or "predict".
    attribute: name of the batch size in the task, its `hparams`, the data module or its `hparams`.
    mode: "power" doubles from `start` until memory runs out; "binsearch" then halves the gap between the last size that
    fitted and the first that did not, and takes off the share `margin`.
    steps: batches to try of each size. trials: sizes to try at most. largest: the largest size to try.

    It ends, too, at a size that holds all of the data. Raises ConfigError for another mode, or where no such attribute
    is found, or where the smallest size does not fit.
    """
    if mode not in ("power", "binsearch"):
        raise ConfigError(f"mode must be 'power' or 'binsearch', got {mode!r}.")
    given = [*data, *named_data.values()]
    holders_of(attribute, task, *given)
    with trial_of(trainer, task, *given) as (trial, copied):
        trial.callbacks, trial.max_steps, trial.limit_train_batches = [], steps, 1.0
        trial.limit_val_batches = trial.limit_test_batches = trial.limit_predict_batches = steps

        def all_in_one(size: int) -> bool:
            trial.state = type(trainer.state)()  # a trainer may go on counting where its last fit ended
            set_attribute(attribute, size, copied, *given)
            getattr(trial, stage)(copied, *data, **named_data)
            return stage == "fit" and trial.num_training_batches <= 1

        found = _search(all_in_one, mode, start, trials, largest)
    size = max(1, int(found * (1 - margin))) if mode == "binsearch" else found
    set_attribute(attribute, size, task, *given)
    log.info("Batch size %d", size)
    return size


def _search(all_in_one: Callable[[int], bool], mode: str, start: int, trials: int, largest: int) -> int:
    """Return the largest size at which `all_in_one` does not run out of memory, or the first at which it is true."""
    best, failed, size = 0, 0, min(start, largest)
    for _ in range(trials):
        free_memory()
        try:
            complete = all_in_one(size)
        except (RuntimeError, DataError) as error:
            if isinstance(error, DataError) and best:  # with drop_last there may be no batch of this size
                break
            if not is_out_of_memory(error):
                raise
            failed = size
        else:
            best = size
            if complete or size >= largest:
                break
        if failed and best and (mode == "power" or failed - best <= 1):
            break
        size = (best + failed) // 2 if failed else min(2 * size, largest)
        if not size:
            break
    free_memory()
    if not best:
        raise ConfigError(f"Memory does not hold even a batch of {max(size, 1)}; make the model or its input smaller.")
    return best


# --- a trial ----------------------------------------------------------------------------------------------------------


@contextmanager
def trial_of(trainer: "Trainer", task: Task, *data: Any) -> Iterator[tuple["Trainer", Task]]:
    """Yield a trainer that writes nothing and a copy of the task, and forget both.

    Random number generators, and the trainer of data modules in `data`, are afterwards what they were. Raises
    ConfigError if the trainer is running on several processes.
    """
    if trainer.running and trainer.world_size > 1:
        raise ConfigError("On several processes a search for a learning rate or a batch size comes before a run.")
    modules = [one for one in data if isinstance(one, DataModule)]
    before = [(one, one.__dict__.get("trainer")) for one in modules]
    states = generator_states()
    copied = copy.deepcopy(task)
    copied.__dict__["configure_callbacks"] = list  # those that the task brings are not for a trial
    try:
        yield _quiet_copy(trainer), copied
    finally:
        for module, old in before:
            module.__dict__["trainer"] = old
        set_generators(states)
        # drops the last reference to the copy, so that its memory is freed below
        copied = task
        free_memory()


def _quiet_copy(trainer: "Trainer") -> "Trainer":
    trial = copy.copy(trainer)
    trial.strategy = copy.copy(trainer.strategy)
    trial.strategy.elastic = Elasticity()  # no process leaves or joins a trial
    for name, part in vars(trainer).items():
        if name != "run" and getattr(part, "trainer", None) is trainer:  # it reads the trainer that it belongs to
            setattr(trial, name, copy.copy(part))
            vars(trial)[name].trainer = trial
    trial.saver, trial.state, trial.run = Saver(trial), type(trainer.state)(), None
    trial.run_dir = trial.given_dir = trial.config_text = trial.given_config = None
    trial.logger, trial.loggers, trial.callbacks = None, [], []
    trial.lengths, trial.callback_metrics, trial.logged_metrics, trial.progress_bar_metrics = {}, {}, {}, {}
    trial.should_stop, trial.max_restarts, trial.nan = False, 0, "ignore"
    trial.max_epochs, trial.min_epochs, trial.min_steps, trial.num_sanity_val_steps = -1, None, None, 0
    return trial


# --- attributes and memory ------------------------------------------------------------------------------------------


def holders_of(name: str, *owners: Any) -> list[Any]:
    """Return what has the attribute: of tasks and data modules among `owners`, themselves and their `hparams`.

    Raises ConfigError where none has it.
    """
    every = [one for one in owners if isinstance(one, (Task, DataModule))]
    places = [place for owner in every for place in (owner, owner.hparams)]
    found = [one for one in places if (name in one if isinstance(one, Mapping) else hasattr(one, name))]
    if not found:
        raise ConfigError(f"Neither the task, its hparams, nor a data module has an attribute {name!r}.")
    return found


def set_attribute(name: str, value: Any, *owners: Any) -> None:
    """Set an attribute wherever `holders_of` finds it."""
    for holder in holders_of(name, *owners):
        if isinstance(holder, MutableMapping):
            holder[name] = value
        else:
            setattr(holder, name, value)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, also one of a worker, says that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, (RuntimeError, WorkerError)):
        return False
    words = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "CUDNN_STATUS_NOT_SUPPORTED")
    return any(word in str(error) for word in words)


def free_memory() -> None:
    """Free memory that nothing refers to any more, also on devices."""
    # before the cache is emptied: cycles, such as an exception and its frames, keep tensors alive
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
