"""Signal handling in a DataLoader's worker processes."""

import functools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..processes.signals import END_SIGNALS
from ..processes.stacks import answer_dumps

WorkerInit = Callable[[int], None] | None


class WorkerSetup:
    """A worker_init_fn that ignores signals handled by the trainer, and then calls `then`.

    Ctrl-C and a scheduler's SIGTERM reach every process in a job. If they terminated a worker, the trainer could not
    finish and save the last step. While the trainer does not handle signals, or once it has exited, these signals
    terminate a worker as usual.
    """

    def __init__(self, then: WorkerInit) -> None:
        self.then, self.attends = then, _attends()
        self.trainer = 0

    def __call__(self, worker_id: int) -> None:
        """Set up the worker."""
        self.trainer = os.getppid()
        for number in END_SIGNALS:
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._on_signal)
        answer_dumps()
        if self.then is not None:
            self.then(worker_id)

    def _on_signal(self, number: int, _: object) -> None:
        # with another parent, the trainer has exited, so this worker has no more work
        if not self.attends.value or os.getppid() != self.trainer:
            signal.signal(number, signal.SIG_DFL)  # the trainer doesn't handle it: take the default action
            os.kill(os.getpid(), number)


@functools.cache
def _attends() -> Any:
    """Return the flag that tells forked loader workers whether this process handles signals."""
    from multiprocessing.sharedctypes import RawValue

    # without a lock: a signal handler reads it, and could deadlock
    return RawValue("b", 0)


@contextmanager
def signals_attended() -> Iterator[None]:
    """Make loader workers ignore signals within this context."""
    _attends().value = 1
    try:
        yield
    finally:
        _attends().value = 0


@contextmanager
def prepared_workers(loader: Any) -> Iterator[None]:
    """Install WorkerSetup on the loader for workers that start within this context."""
    if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn"):
        yield
        return
    before, loader.worker_init_fn = loader.worker_init_fn, WorkerSetup(loader.worker_init_fn)
    try:
        yield
    finally:
        loader.worker_init_fn = before
