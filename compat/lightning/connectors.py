"""Connectors, which provide loaders, checkpoints and metrics under the private Lightning names that programs read."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...callbacks.checkpoint_callback import CheckpointCallback
from ...tasks.data_hooks import DataHooks
from ...trainer.hooks import overrides
from .aliases import alias
from .attributes import TrainerAttributes
from .checkpoint import read
from .placeholders import internal_name_message


class Connector:
    """Base class for connectors. Connectors have only the attributes that published programs use."""

    def __init__(self, trainer: TrainerAttributes) -> None:
        self.trainer = trainer

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(internal_name_message(self, name), name=name, obj=self)


class DataLoaderSource(Connector):
    """The source of one kind of loader: a module or a data module."""

    def __init__(self, trainer: TrainerAttributes, word: str, name: str) -> None:
        super().__init__(trainer)
        self.word, self.name = word, name

    @property
    def instance(self) -> Any:
        """The loaders that the program passed, if any; otherwise, the data module or the module."""
        loader = None if self.trainer.run is None else self.trainer.run.request_loaders.get(self.word)
        return self.owner if loader is None else loader

    @property
    def owner(self) -> Any:
        """The data module, or the module if there is none."""
        return self.trainer.datamodule or self.trainer.lightning_module

    def is_module(self) -> bool:
        """Return True if a method creates the loaders, and False if the program passed them."""
        return self.trainer.run is None or self.trainer.run.request_loaders.get(self.word) is None

    def is_defined(self) -> bool:
        """Return whether loaders were passed or a method creates them."""
        return not self.is_module() or overrides(self.owner, DataHooks, self.name)

    def dataloader(self) -> Any:
        """Return the run's loaders. Before a run, return the loaders that were passed or that the method creates."""
        run = self.trainer.run
        candidates = () if run is None else (run.data.loaders.get(self.word), run.request_loaders.get(self.word))
        # compared with None, because a stream loader has no length and no truth value
        loaders = next((loader for loader in candidates if loader is not None), None)
        return getattr(self.owner, self.name)() if loaders is None else loaders


class CheckpointConnector(Connector):
    """Creates the contents of a checkpoint."""

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """On rank 0, return the current state as the contents of a Lightning checkpoint. Every rank must call this."""
        with TemporaryDirectory() as folder:
            path = Path(folder, "contents.ckpt")
            self.trainer.saver.save(path, bool(weights_only), False)
            # safe, because this process has just written any code in the file
            saved: dict[str, Any] = read(path, weights_only=False) if path.exists() else {}
        return saved


class LoggerConnector(Connector):
    """Provides the logged values."""

    # programs also read the private names
    callback_metrics = _callback_metrics = alias("trainer.callback_metrics")
    logged_metrics = _logged_metrics = alias("trainer.logged_metrics")
    progress_bar_metrics = _progress_bar_metrics = alias("trainer.progress_bar_metrics")

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics for callbacks, loggers and the progress bar."""
        return {"callback": self.callback_metrics, "log": self.logged_metrics, "pbar": self.progress_bar_metrics}

    def reset_metrics(self) -> None:
        """Delete all values."""
        trainer = self.trainer
        trainer.agreed_metrics, trainer.logged_metrics, trainer.progress_bar_metrics = {}, {}, {}

    @property
    def should_update_logs(self) -> bool:
        """Whether values will be logged after the current step."""
        steps = self.trainer.state.global_step + 1
        return steps % (self.trainer.log_every_n_steps or 1) == 0 or bool(self.trainer.should_stop)


class CallbackConnector(Connector):
    """Connector that orders callbacks and adds a module's callbacks."""

    def _reorder_callbacks(self, callbacks: list[Any]) -> list[Any]:
        return sorted(callbacks, key=lambda callback: isinstance(callback, CheckpointCallback))
