"""Profilers under Lightning's names."""

from abc import ABC, abstractmethod
from typing import Any

from ...trainer import profiling
from ...trainer.profiling import AdvancedProfiler, ModuleMarks, PyTorchProfiler, SimpleProfiler


class Profiler(profiling.Profiler, ABC):
    """Base class of profilers: `start` and `stop` are called around each action, `summary` is the report."""

    @abstractmethod
    def start(self, action_name: str) -> None:
        """Begin to record an action."""

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """End recording an action."""

    @property
    def local_rank(self) -> int:
        """The local rank of this process."""
        return self.rank or 0


class PassThroughProfiler(Profiler):
    """Measures nothing."""

    def start(self, action_name: str) -> None:
        """Do nothing."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""


for kind in (SimpleProfiler, AdvancedProfiler, PyTorchProfiler):
    Profiler.register(kind)


class RegisterRecordFunction:
    """Marks each call of a model's parts in a trace of torch, within a context."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._marks: ModuleMarks | None = None

    def __enter__(self) -> None:
        self._marks = ModuleMarks(self._model)

    def __exit__(self, *error: object) -> None:
        if self._marks is not None:
            self._marks.remove()
