"""Tuner: before a run, searches for a good learning rate or the largest batch size that fits in memory.

Each search trains a copy of the module with a copy of the trainer. The original module and trainer and the random
number generators are left unchanged, and nothing is written to disk.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...base.errors import ConfigError, DataError
from ...callbacks.callback import Callback
from ...tasks.data_module import DataModule
from ...tasks.task import Task
from .rank_zero import rank_zero_warn
from .utilities import garbage_collection_cuda, is_oom_error, isolate_rng

if TYPE_CHECKING:
    from ... import Trainer

log = logging.getLogger("legato")

METHODS = ("fit", "validate", "test", "predict")
SMOOTHING = 0.98
"""Weight of past losses in the moving average of a sweep."""


class LearningRateSweep(Callback):
    """Increases the learning rate from `lr_min` to `lr_max` and records the smoothed loss at each step.

    Smith, Cyclical Learning Rates for Training Neural Networks (https://arxiv.org/abs/1506.01186).

    Args:
        mode: "exponential" or "linear".
        diverges_at: Stop when the smoothed loss exceeds this factor times its minimum. None: never stop early.

    Raises ConfigError for any other mode, for fewer than 2 steps, and if `0 < lr_min < lr_max` does not hold.
    """

    def __init__(
        self, mode: str, lr_min: float, lr_max: float, num_training: int, diverges_at: float | None = None
    ) -> None:
        if mode not in ("exponential", "linear"):
            raise ConfigError(f"mode must be 'exponential' or 'linear', got {mode!r}.")
        if not 0 < lr_min < lr_max or num_training < 2:
            raise ConfigError(
                f"Expected 0 < lr_min < lr_max and num_training >= 2, got {lr_min=}, {lr_max=}, {num_training=}."
            )
        self.mode, self.lr_min, self.lr_max, self.num_training = mode, lr_min, lr_max, num_training
        self.diverges_at = diverges_at
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        """The learning rate and the smoothed loss of each step."""
        self._average, self._best, self._losses = 0.0, math.inf, list[float]()

    def rate(self, step: int) -> float:
        """Return the learning rate for a step. Steps are counted from 0."""
        share = (step + 1) / self.num_training if step else 0.0
        if self.mode == "linear":
            return self.lr_min + share * (self.lr_max - self.lr_min)
        return float(self.lr_min * (self.lr_max / self.lr_min) ** share)

    # --- the run ----------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: "Trainer", task: Task) -> None:
        """Remove the schedulers and set the first rate. Raises ConfigError unless there is exactly one optimizer."""
        if len(trainer.optimizers) != 1:
            raise ConfigError(f"A learning rate sweep needs one optimizer, but the task has {len(trainer.optimizers)}.")
        trainer.lr_scheduler_configs.clear()
        self._set_rate(trainer, self.rate(0))

    def on_before_backward(self, trainer: "Trainer", task: Task, loss: torch.Tensor) -> None:
        """Store the loss of a batch."""
        self._losses.append(float(loss.detach()))

    def on_step_end(self, trainer: "Trainer", task: Task) -> None:
        """Record the step's loss and set the next learning rate."""
        rates, losses = self.results["lr"], self.results["loss"]
        if len(losses) >= self.num_training or trainer.should_stop:
            return
        # a sweep on multiple processes uses the batches of all processes, like Lightning's mean across ranks
        values = [loss for rank in trainer.strategy.data_ranks.gather_objects(self._losses) for loss in rank]
        self._losses = []
        loss = sum(values) / len(values) if values else math.nan
        if not math.isnan(loss):
            self._average = SMOOTHING * self._average + (1 - SMOOTHING) * loss
        rates.append(self.rate(len(losses)))
        # the average starts at 0: the division corrects that bias, with Lightning's exponent
        losses.append(loss if math.isnan(loss) else self._average / (1 - SMOOTHING ** (len(losses) + 2)))
        if self.diverges_at is not None and len(losses) > 1 and losses[-1] > self.diverges_at * self._best:
            trainer.should_stop = True
        self._best = min(self._best, losses[-1])
        self._set_rate(trainer, self.rate(len(losses)))

    def _set_rate(self, trainer: "Trainer", rate: float) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return the results so that the parent process can load them."""
        return {"results": {name: list(values) for name, values in self.results.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the results."""
        self.results = {name: list(values) for name, values in state_dict["results"].items()}

    # --- results ----------------------------------------------------------------------------------------------------
    def best_step(self, skip_begin: int = 10, skip_end: int = 1) -> int | None:
        """Return the step at which the loss decreases fastest, or None if there are fewer than 2 steps."""
        chosen = range(len(self.results["loss"]))[skip_begin : len(self.results["loss"]) - skip_end]
        finite = [index for index in chosen if math.isfinite(self.results["loss"][index])]
        if len(finite) < 2:
            return None
        losses = torch.tensor([self.results["loss"][index] for index in finite])
        rates = torch.tensor([self.results["lr"][index] for index in finite])
        return finite[int(torch.gradient(losses, spacing=[rates])[0].argmin())]

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate at which the loss decreases fastest, or None if there are too few steps."""
        step = self.best_step(skip_begin, skip_end)
        if step is None:
            log.error("The sweep has too few steps to suggest a learning rate. Use more steps or more data.")
            return None
        return self.results["lr"][step]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Return a matplotlib figure of loss against learning rate. `suggest` marks the suggested learning rate.

        Raises ConfigError if matplotlib is not installed.
        """
        try:
            from matplotlib import pyplot
        except ModuleNotFoundError:
            raise ConfigError("Plots require matplotlib: pip install matplotlib.") from None
        if ax is None:
            _, ax = pyplot.subplots()
        ax.plot(self.results["lr"], self.results["loss"])
        ax.set(xlabel="Learning rate", ylabel="Loss", xscale="log" if self.mode == "exponential" else "linear")
        step = self.best_step() if suggest else None
        if step is not None:
            ax.plot(self.results["lr"][step], self.results["loss"][step], markersize=10, marker="o", color="red")
        if show:
            pyplot.show()
        return ax.figure


class Tuner:
    """Searches for a learning rate or a batch size for a trainer's next run."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def scale_batch_size(  # noqa: PLR0913
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Set `batch_arg_name` to the largest batch size that fits in memory, and return that size.

        Args:
            mode: "power" doubles the size, starting at `init_val`, until memory runs out. "binsearch" then bisects
                between the largest size that fits and the smallest size that does not, and reduces the result by the
                fraction `margin`. Both modes also stop when a single batch contains all the data.

        Raises MisconfigurationException for any other mode, if loaders are passed (because their batch size is fixed),
        if no object has the attribute `batch_arg_name`, and if even the smallest size does not fit.
        """
        data = _data_of(method, train_dataloaders, val_dataloaders, dataloaders, datamodule)
        if mode not in ("power", "binsearch"):
            raise ConfigError(f"mode must be 'power' or 'binsearch', got {mode!r}.")
        if any(hasattr(source, "__iter__") for source in data.values()):
            raise ConfigError(
                "scale_batch_size cannot change the batch size of existing loaders. Define the loaders in the module "
                f"or a data module, and use its attribute {batch_arg_name!r} as their batch size."
            )
        if self._trainer.fast_dev_run:
            rank_zero_warn("Skipping batch size scaler since `fast_dev_run` is enabled.")
            return None
        holders_of(batch_arg_name, model, *data.values())
        with trial_of(self._trainer, model, *data.values()) as (trial, copied):
            trial.callbacks, trial.max_steps, trial.limit_train_batches = [], steps_per_trial, 1.0
            trial.limit_val_batches = trial.limit_test_batches = trial.limit_predict_batches = steps_per_trial

            def all_in_one(size: int) -> bool:
                trial.state = type(trial.state)()  # otherwise, a trainer may continue the counts of its last fit
                set_attribute(batch_arg_name, size, copied, *data.values())
                getattr(trial, method)(copied, **data)
                return method == "fit" and trial.num_training_batches <= 1

            size = _largest_size(all_in_one, mode, init_val, max_trials, max_val)
        if mode == "binsearch":
            size = max(1, int(size * (1 - margin)))
        set_attribute(batch_arg_name, size, model, *data.values())
        log.info("Batch size %d", size)
        return size

    def lr_find(  # noqa: PLR0913
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LearningRateSweep | None:
        """Run a learning rate sweep, set the suggested rate in the module, and return the sweep.

        Raises MisconfigurationException if there are multiple optimizers, and AttributeError if the module has no
        learning rate.
        """
        if method != "fit":
            raise ConfigError("method='fit' is the only valid configuration to run lr finder.")
        data = _data_of(method, train_dataloaders, val_dataloaders, dataloaders, datamodule)
        if self._trainer.fast_dev_run:
            rank_zero_warn("Skipping learning rate finder since `fast_dev_run` is enabled.")
            return None
        name = learning_rate_name(model, attr_name) if update_attr else ""
        sweep = LearningRateSweep(mode, min_lr, max_lr, num_training, early_stop_threshold)
        with trial_of(self._trainer, model, *data.values()) as (trial, copied):
            trial.callbacks, trial.max_steps, trial.limit_val_batches = [sweep], num_training, 0
            trial.max_epochs = -1 if self._trainer.max_epochs is None else self._trainer.max_epochs
            trial.fit(copied, **data)
        rate = sweep.suggestion() if update_attr else None
        if rate is not None:
            set_attribute(name, rate, model)
        return sweep


def learning_rate_name(model: Any, name: str = "") -> str:
    """Return the name of the learning rate in a module or its hparams. Raises AttributeError if there is none."""
    names = [name] if name else ["lr", "learning_rate"]
    for candidate in names:
        if _holders(candidate, model):
            return candidate
    raise AttributeError(
        f"When using the learning rate finder, either `model` or `model.hparams` should have one of these fields: "
        f"{names}. If your model has a different name for the learning rate, set it with `.lr_find(attr_name=...)`."
    )


def _data_of(method: str, train: Any, val: Any, evaluation: Any, datamodule: Any) -> dict[str, Any]:
    """Return the data as keyword arguments for the given Trainer method."""
    if method not in METHODS:
        raise ValueError(f"method {method!r} is invalid. Should be one of {METHODS}.")
    if method == "fit" and evaluation is not None:
        raise ConfigError("Tuning with method='fit' requires train_dataloaders and val_dataloaders, not dataloaders.")
    if method != "fit" and (train is not None or val is not None):
        raise ConfigError(f"With method={method!r}, pass dataloaders instead of train_dataloaders or val_dataloaders.")
    names = {"train_dataloaders": train, "val_dataloaders": val, "dataloaders": evaluation, "datamodule": datamodule}
    return {name: value for name, value in names.items() if value is not None}


def _largest_size(all_in_one: Callable[[int], bool], mode: str, start: int, trials: int, largest: int) -> int:
    """Return the largest size at which `all_in_one` fits in memory, or the first size for which it returns True."""
    best, failed, size = 0, 0, min(start, largest)
    for _ in range(trials):
        garbage_collection_cuda()
        try:
            complete = all_in_one(size)
        except (RuntimeError, DataError) as error:
            if isinstance(error, DataError) and best:  # with drop_last, there may be no batch of that size
                break
            if not is_oom_error(error):
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
    garbage_collection_cuda()
    if not best:
        raise ConfigError(f"A batch size of {max(size, 1)} does not fit in memory. Use a smaller model or input.")
    return best


# --- a trial ----------------------------------------------------------------------------------------------------------


@contextmanager
def trial_of(trainer: "Trainer", task: Task, *data: Any) -> Iterator[tuple["Trainer", Task]]:
    """Yield a copy of the trainer that writes nothing and a copy of the task, and discard both afterward.

    On exit, restores the random number generators and the `trainer` attribute of the data modules in `data`. Raises
    ConfigError if the trainer is running with multiple processes.
    """
    if trainer.running and trainer.world_size > 1:
        raise ConfigError("A search during a run can use only one process. Use the Tuner before the run.")
    modules = [(module, module.__dict__.get("trainer")) for module in data if isinstance(module, DataModule)]
    copied = copy.deepcopy(task)
    copied.__dict__["configure_callbacks"] = list  # a trial does not use the callbacks that the task adds
    try:
        with isolate_rng():
            yield _quiet_copy(trainer), copied
    finally:
        for module, before in modules:
            module.__dict__["trainer"] = before
        # drop the last reference to the copy, so that gc frees its memory below
        copied = task
        garbage_collection_cuda()


def _quiet_copy(trainer: "Trainer") -> "Trainer":
    trial = copy.copy(trainer)
    trial.strategy = copy.copy(trainer.strategy)
    for name, member in vars(trainer).items():
        if name != "run" and getattr(member, "trainer", None) is trainer:  # an object that reads from its trainer
            setattr(trial, name, copy.copy(member))
            vars(trial)[name].trainer = trial
    trial.saver, trial.state, trial.run = type(trainer.saver)(trial), type(trainer.state)(), None
    trial.run_dir = trial.assigned_dir = trial.config_text = trial.explicit_config = None
    trial.logger, trial.loggers, trial.callbacks, trial.enable_checkpointing = None, [], [], False
    trial.lengths, trial.agreed_metrics, trial.logged_metrics, trial.progress_bar_metrics = {}, {}, {}, {}
    trial.should_stop, trial.max_restarts, trial.nan = False, 0, "ignore"
    trial.max_epochs, trial.min_epochs, trial.min_steps, trial.num_sanity_val_steps = -1, None, None, 0
    return trial


# --- attributes -----------------------------------------------------------------------------------------------------


def _holders(name: str, *owners: Any) -> list[Any]:
    modules = [owner for owner in owners if isinstance(owner, (Task, DataModule))]
    places = [place for module in modules for place in (module, module.hparams)]
    return [place for place in places if (name in place if isinstance(place, Mapping) else hasattr(place, name))]


def holders_of(name: str, *owners: Any) -> list[Any]:
    """Return all objects that have the attribute: tasks and data modules in `owners`, or their `hparams`.

    Raises ConfigError if no object has the attribute.
    """
    holders = _holders(name, *owners)
    if not holders:
        raise ConfigError(f"The attribute {name!r} is missing. Define it in the module, data module or their hparams.")
    return holders


def set_attribute(name: str, value: Any, *owners: Any) -> None:
    """Set an attribute on all objects that `holders_of` returns."""
    for holder in holders_of(name, *owners):
        if isinstance(holder, MutableMapping):
            holder[name] = value
        else:
            setattr(holder, name, value)
