"""Signal handling and error reporting in a DataLoader's worker processes."""

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any

from torch.utils.data import default_collate, default_convert

from ...base.errors import DataError
from ...base.torch_private import replace_feeder_error, serves_memory, wrapped_error
from ..processes.signals import END_SIGNALS
from ..processes.stacks import answer_dumps

WorkerInit = Callable[[int], None] | None


class WorkerSetup:
    """A worker_init_fn that ignores signals the trainer handles, reports pickling errors, and then calls `then`.

    Ctrl-C and a scheduler's SIGTERM reach every process of a job. A worker that died of them would take down the last
    step, which the trainer still has to finish and save. While the trainer does not handle signals (or is gone), they
    end a worker as usual.

    torch's queue thread drops a batch or error that it cannot pickle, with a traceback on stderr, and the trainer then
    waits forever; here it is sent as an error instead. `keeps_state` is for torchdata's loader, which sends each batch
    with the worker's number and state.
    """

    def __init__(self, then: WorkerInit, keeps_state: bool = False) -> None:
        self.then, self.keeps_state = then, keeps_state
        self.attends = _attends()
        self.trainer = 0

    def __call__(self, worker_id: int) -> None:
        """Set up the worker."""
        self.trainer = os.getppid()
        for number in END_SIGNALS:
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                signal.signal(number, self._on_signal)
        answer_dumps()
        # a thread of multiprocessing's sends memory after the trainer has ended, and prints a traceback that nobody can
        # act on
        sys.excepthook = functools.partial(_report_unless_disconnected, sys.excepthook)
        replace_feeder_error(functools.partial(_send_error, self.keeps_state))
        if self.then is not None:
            self.then(worker_id)

    def _on_signal(self, number: int, _: object) -> None:
        # another parent: the trainer has ended, and this worker with it, though it cannot have heard of it
        if not self.attends.value or os.getppid() != self.trainer:
            signal.signal(number, signal.SIG_DFL)  # nobody else handles it: end as by default
            os.kill(os.getpid(), number)


def _report_unless_disconnected(
    report: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report an uncaught error, except a broken connection of the memory-sharing thread after the trainer has ended."""
    if not (serves_memory(trace) and isinstance(error, (ConnectionError, EOFError))):
        report(kind, error, trace)


def _send_error(keeps_state: bool, queue: "Queue[Any]", drop: Callable[[], None], error: Exception, sent: Any) -> None:
    """Send the pickling `error` of an item in place of it, where `sent` is (number, batch)."""
    if not (isinstance(sent, tuple) and len(sent) == 2 and isinstance(sent[0], int)):
        drop()  # from some other queue, made by the dataset
        return
    number, content = sent
    batch, *state = content if keeps_state else (content,)
    where = "in a DataLoader worker process, when it pickled a batch to send it"
    batch = wrapped_error(batch, error, where)
    try:
        ForkingPickler.dumps(batch)
    except Exception:  # the exception's class cannot be pickled; its traceback is text and says all
        batch.exc_type = RuntimeError
    # in the batch's place: the trainer waits for this number
    queue.put((number, (batch, *state) if keeps_state else batch))


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
            loader.worker_init_fn = WorkerSetup(before["worker_init_fn"], keeps_state=hasattr(loader, "state_dict"))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(loader, name, value)
