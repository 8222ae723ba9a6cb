"""DataModule: where the data of a run comes from."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .data_hooks import DataHooks
from .hyperparameters import Hyperparameters

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


DataModuleType = TypeVar("DataModuleType", bound="DataModule")


class DataModule(DataHooks, Hyperparameters):
    """The loaders of each stage and what prepares them. Every method may be left out that is not needed."""

    prepare_data_per_node = True
    """Call `prepare_data` once on each machine; False: once in all, for a shared file system."""

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
        """Build the data module from the hyperparameters in a checkpoint; `kwargs` replace some.

        Raises CheckpointError where some are missing.
        """
        from ..trainer.checkpoints.restore import rebuild_data_module

        return rebuild_data_module(cls, Path(checkpoint_path), hparams_file, kwargs)

    def setup(self, stage: str) -> None:
        """Build datasets, in every process; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Release what `setup` built."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs: JSON values and tensors."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""

    def on_exception(self, exception: BaseException) -> None:
        """The run is about to end by this exception."""
