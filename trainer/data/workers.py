"""Signals and a user's StopIteration in a DataLoader's worker processes."""

import functools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import default_collate, default_convert

from ...base.errors import DataError
from ..processes.signals import END_SIGNALS
from ..processes.stacks import answer_dumps

WorkerInit = Callable[[int], None] | None


class WorkerSetup:
    """A worker_init_fn that ignores signals the trainer handles, and then calls `then`.

    Ctrl-C and a scheduler's SIGTERM reach every process of a job. A worker that died of them would take down the last
    step, which the trainer still has to finish and save. While the trainer does not handle signals (or is gone), they
    end a worker as usual.
    """

    def __init__(self, then: WorkerInit) -> None:
        self.then, self.attends = then, _attends()
        self.trainer = 0

    def __call__(self, worker_id: int) -> None:
        """Set up the worker."""
        self.trainer = os.getppid()
        for number in END_SIGNALS:
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                signal.signal(number, self._on_signal)
        answer_dumps()
        if self.then is not None:
            self.then(worker_id)

    def _on_signal(self, number: int, _: object) -> None:
        # another parent: the trainer has ended, and this worker with it, though it cannot have heard of it
        if not self.attends.value or os.getppid() != self.trainer:
            signal.signal(number, signal.SIG_DFL)  # nobody else handles it: end as by default
            os.kill(os.getpid(), number)


class GuardedCollate:
    """A collate_fn that turns the user's StopIteration, which would silently end the loader, into a DataError."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        """Return the collated batch."""
        try:
            return self.collate(samples)
        except StopIteration as error:
            name = getattr(self.collate, "__qualname__", type(self.collate).__name__)
            raise DataError(
                f"The collate_fn {name} raised StopIteration, which would pass for the end of the data: an iterator "
                f"that it reads from is exhausted."
            ) from error


def guard_collate(collate: Any) -> Any:
    """Wrap a collate_fn in GuardedCollate, unless it is one of torch's own."""
    return collate if collate in (default_collate, default_convert, None) else GuardedCollate(collate)


@functools.cache
def _attends() -> Any:
    """Return the flag, shared with forked loader workers, that tells whether this process handles signals."""
    from multiprocessing.sharedctypes import RawValue

    # without a lock, as it is read in a signal handler, which could wait for itself
    return RawValue("b", 0)


@contextmanager
def signals_attended() -> Iterator[None]:
    """Let loader workers ignore signals while this context is active."""
    _attends().value = 1
    try:
        yield
    finally:
        _attends().value = 0


@contextmanager
def prepared_workers(loader: Any) -> Iterator[None]:
    """Install WorkerSetup and GuardedCollate on the loader while its workers are started within this context."""
    before = {name: getattr(loader, name) for name in ("worker_init_fn", "collate_fn") if hasattr(loader, name)}
    if len(before) == 2:
        loader.collate_fn = guard_collate(before["collate_fn"])
        if getattr(loader, "num_workers", 0):
            loader.worker_init_fn = WorkerSetup(before["worker_init_fn"])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(loader, name, value)
