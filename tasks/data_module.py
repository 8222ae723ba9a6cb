"""DataModule: the base class for objects that provide a run's loaders."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..base.location import to_location
from .data_hooks import DataHooks
from .hyperparameters import Hyperparameters

if TYPE_CHECKING:
    from ..base.contracts import Trainer


DataModuleType = TypeVar("DataModuleType", bound="DataModule")


class DataModule(DataHooks, Hyperparameters):
    """Base class for objects that prepare data and provide the loaders for each stage. Override only what you need."""

    prepare_data_per_node = True
    """True: `prepare_data` runs once per machine; False: once per run, for a shared file system."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None

    @classmethod
    def load_from_checkpoint(
        cls: type[DataModuleType],
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        **kwargs: Any,
    ) -> DataModuleType:
        """Build the data module from the hyperparameters in a checkpoint and restore its state.

        `kwargs` override the saved hyperparameters. Raises CheckpointError if an `__init__` argument is missing.
        """
        # an import at the top would be circular: trainer/resume imports data modules
        from ..trainer.resume.rebuild import rebuild_data_module

        return rebuild_data_module(cls, to_location(checkpoint_path), hparams_file, kwargs)

    def setup(self, stage: str) -> None:
        """Build datasets in every process. `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Clean up at the end of a stage."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: JSON values and tensors."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state when a run resumes."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when an exception ends the run."""
