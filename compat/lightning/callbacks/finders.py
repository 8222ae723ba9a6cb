"""LearningRateFinder and BatchSizeFinder: callbacks that run the Tuner's searches before or during a run."""

from typing import TYPE_CHECKING, Any, ClassVar

from ....trainer.setup.data import make_loaders
from ..rank_zero import rank_zero_warn
from ..tuner import Tuner
from .callback import Callback

if TYPE_CHECKING:
    from .... import Trainer
    from ....tasks.task import Task


def data_of_run(trainer: Any) -> dict[str, Any]:
    """Return the current run's data as keyword arguments for a search."""
    loaders = trainer.run.request_loaders
    if trainer.run.stage == "fit":
        data = {"train_dataloaders": loaders.get("train")}
    else:
        data = {"dataloaders": loaders.get(trainer.run.loop.doing)}
    return {"datamodule": trainer.datamodule, **data}


class Finder(Callback):
    """Base class for callbacks that search for a setting before a run starts.

    If a subclass overrides the hook where Lightning searches, that override determines when the search runs. If a
    subclass overrides the search method, or if `configure_callbacks` returns the callback, the search runs in the hook.
    """

    HOOKS: ClassVar[dict[str, str]] = {"fit": "on_fit_start"}
    SEARCH: ClassVar[str]
    has_searched = False
    """Whether the callback has searched for the current run."""

    def searches_before(self, method: str) -> bool:
        """Return whether to search before the given Trainer method: fit, validate, test or predict."""
        owner = next(kind for kind in type(self).__mro__ if "SEARCH" in vars(kind))
        names = (self.HOOKS.get(method, ""), self.SEARCH)
        return all(hasattr(owner, name) and getattr(type(self), name) is getattr(owner, name) for name in names)

    def search(self, trainer: Any, model: Any, method: str, **data: Any) -> None:
        """Search with the data passed to fit, validate, test or predict."""
        raise NotImplementedError

    def search_once(self, trainer: Any, pl_module: Any) -> None:
        """Search in the current run unless the callback has already searched."""
        # a search before the run has already set the value
        done, self.has_searched = self.has_searched, False
        if not done and trainer.world_size == 1:
            getattr(self, self.SEARCH)(trainer, pl_module)
        elif not done:
            rank_zero_warn(f"{type(self).__name__} supports only one process, so it was skipped in this run.")

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Run the search."""
        self.search_once(trainer, task)


class LearningRateFinder(Finder):
    """Runs a learning rate sweep before fit and sets the suggested rate."""

    SUPPORTED_MODES = ("linear", "exponential")
    SEARCH = "lr_find"

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        if mode.lower() not in self.SUPPORTED_MODES:
            raise ValueError(f"`mode` should be either of {self.SUPPORTED_MODES}")
        self._options: dict[str, Any] = {
            "min_lr": min_lr,
            "max_lr": max_lr,
            "num_training": num_training_steps,
            "mode": mode.lower(),
            "early_stop_threshold": early_stop_threshold,
            "update_attr": update_attr,
            "attr_name": attr_name,
        }
        self.optimal_lr: Any = None

    def search(self, trainer: Any, model: Any, method: str, **data: Any) -> None:
        """Run the sweep and store the result in `optimal_lr`."""
        self.optimal_lr = Tuner(trainer).lr_find(model, **data, **self._options)

    def lr_find(self, trainer: Any, pl_module: Any) -> None:
        """Run the sweep during fit and continue with the suggested rate."""
        self.search(trainer, pl_module, "fit", **data_of_run(trainer))
        suggestion = None if self.optimal_lr is None else self.optimal_lr.suggestion()
        if suggestion is not None and self._options["update_attr"]:
            for group in (group for optimizer in trainer.optimizers for group in optimizer.param_groups):
                group["lr"] = suggestion


class BatchSizeFinder(Finder):
    """Finds and sets the largest batch size that fits in memory."""

    HOOKS: ClassVar[dict[str, str]] = {
        "fit": "on_fit_start",
        "validate": "on_validation_start",
        "test": "on_test_start",
        "predict": "on_predict_start",
    }
    SUPPORTED_MODES = ("power", "binsearch")
    SEARCH = "scale_batch_size"

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        if mode.lower() not in self.SUPPORTED_MODES:
            raise ValueError(f"`mode` should be either of {self.SUPPORTED_MODES}")
        self._options: dict[str, Any] = {
            "mode": mode.lower(),
            "steps_per_trial": steps_per_trial,
            "init_val": init_val,
            "max_trials": max_trials,
            "batch_arg_name": batch_arg_name,
            "margin": margin,
            "max_val": max_val,
        }
        self.optimal_batch_size: int | None = init_val

    def search(self, trainer: Any, model: Any, method: str, **data: Any) -> None:
        """Run the search and store the result in `optimal_batch_size`."""
        self.optimal_batch_size = Tuner(trainer).scale_batch_size(model, method=method, **data, **self._options)

    def scale_batch_size(self, trainer: Any, pl_module: Any) -> None:
        """Search during a run and continue with loaders that use the resulting batch size."""
        self.search(trainer, pl_module, trainer.state.fn.value, **data_of_run(trainer))
        make_loaders(trainer.run)

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Run the search unless validation is part of fit."""
        if trainer.stage == "validate":
            self.search_once(trainer, task)

    def on_test_start(self, trainer: "Trainer", task: "Task") -> None:
        """Search before a test."""
        self.search_once(trainer, task)

    def on_predict_start(self, trainer: "Trainer", task: "Task") -> None:
        """Search before a prediction."""
        self.search_once(trainer, task)
