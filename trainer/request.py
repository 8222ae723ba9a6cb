"""Request: stores the arguments of a call to fit, validate, test or predict, so that a process can repeat the call."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError
from ..tasks.data_module import DataModule
from ..tasks.task import Task

if TYPE_CHECKING:
    from ..base.contracts import Trainer

DOING_OF_STAGE = {"fit": "train", "validate": "validation", "test": "test", "predict": "predict"}
"""The name of each stage in hooks, steps and loaders."""


@dataclass
class Request:
    """Arguments of one call to fit, validate, test or predict."""

    stage: str
    task: Task
    datamodule: DataModule | None = None
    loaders: dict[str, Any] = field(default_factory=dict)
    """Loaders passed to the call, keyed by "train", "validation", "test", "predict"."""
    source: Any = None
    """The checkpoint to resume from or to evaluate: a keyword, a path, or a `StoredRun`."""
    keep_outputs: bool = False
    """Whether to return predictions."""
    verbose: bool = False
    """Whether to print an evaluation's metrics."""

    @classmethod
    def of(cls, stage: str, task: Task, datamodule: DataModule | None, loader: Any = None, **where: Any) -> "Request":
        """Create a request. As in Lightning, a data module may be passed in place of the loaders."""
        request = cls(stage, task, datamodule, **where)
        request.take_loaders(**{DOING_OF_STAGE[stage]: loader})
        return request

    @classmethod
    def of_evaluation(
        cls,
        trainer: "Trainer",
        stage: str,
        task: Task | None,
        loader: Any,
        datamodule: DataModule | None,
        keep_outputs: bool | None = False,
        **options: Any,
    ) -> "Request":
        """Create a request for an evaluation.

        If no task is given, the request uses the last run's task with its best weights, as in Lightning.
        """
        keep_outputs = keep_outputs is not False  # None, Lightning's default of return_predictions, keeps them
        if task is not None:
            return cls.of(stage, task, datamodule, loader, keep_outputs=keep_outputs, **options)
        if trainer.run is None:
            raise ConfigError(f"{stage} needs a task. Pass one, or call fit first.")
        request = cls.of(stage, trainer.task, datamodule, loader, keep_outputs=keep_outputs, **options)
        callback = trainer.checkpoint_callback
        if request.source is None and callback is not None and callback.best_model_path:
            request.source = "best"
        return request

    def repeat(self, trainer: "Trainer") -> Any:
        """Make the same call on another trainer."""
        where = {"datamodule": self.datamodule, "ckpt_path": self.source}
        if self.stage == "fit":
            return trainer.fit(self.task, self.loaders.get("train"), self.loaders.get("validation"), **where)
        options = {"return_predictions": self.keep_outputs} if self.stage == "predict" else {"verbose": self.verbose}
        return getattr(trainer, self.stage)(self.task, self.loaders.get(DOING_OF_STAGE[self.stage]), **where, **options)

    def take_loaders(self, **loaders: Any) -> None:
        """Store the loaders, or the data module passed in their place."""
        for stage, loader in loaders.items():
            if isinstance(loader, DataModule):
                self.datamodule = loader
            elif loader is not None:
                self.loaders[stage] = loader
        if self.datamodule is not None and self.loaders:
            raise ConfigError(f"{self.stage} got both loaders and a data module. Pass only one of them.")
