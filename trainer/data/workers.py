"""What a loader's worker processes do with signals that are meant for the trainer, and with what they cannot send."""

import faulthandler
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import IO, Any

from torch.utils.data import default_collate, default_convert

from ..errors import DataError
from ..processes.signals import END_SIGNALS
from ..processes.stacks import DUMP
from ..torch_private import replace_feeder_error, serves_memory, wrapped_error

WorkerInit = Callable[[int], None] | None

_dump: IO[str] | None = None


class Shield:
    """A worker_init_fn: the worker outlives signals to which the trainer attends by itself; then `then` has its turn.

    A terminal's Ctrl-C and a scheduler's SIGTERM reach every process of a job. A worker that died of them would take
    the last step with it, which is yet to be finished and saved; the trainer ends its workers when it is done. While
    the trainer does not attend to signals (or when it is gone), a worker ends by them as usual.

    Nor does it say that the trainer has ended while it was being sent something.

    And what a worker cannot pickle ends the loop as an error. Of itself the thread that feeds the worker's queue drops
    such a batch, or such an error, with a traceback on stderr, and the trainer waits for it for ever. A loader that
    `keeps_state` (torchdata's) gets each batch with its worker's number and state.
    """

    def __init__(self, then: WorkerInit, keeps_state: bool = False) -> None:
        self.then, self.keeps_state = then, keeps_state
        self.attends = _attends()
        self.trainer = 0

    def __call__(self, worker_id: int) -> None:
        """Prepare the worker."""
        self.trainer = os.getppid()
        for number in END_SIGNALS:
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                signal.signal(number, self._hear)
        if _dump is not None:  # a forked worker has the file, and this module, from the trainer
            faulthandler.register(DUMP, _dump)
        sys.excepthook = functools.partial(_leave_out_partings, sys.excepthook)
        replace_feeder_error(functools.partial(_send_error, self.keeps_state))
        if self.then is not None:
            self.then(worker_id)

    def _hear(self, number: int, _: object) -> None:
        if not self.attends.value or os.getppid() != self.trainer:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _leave_out_partings(
    say: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Say what was raised, but not that the trainer has gone while the thread that hands out memory served it."""
    if not (serves_memory(trace) and isinstance(error, (ConnectionError, EOFError))):
        say(kind, error, trace)


def _send_error(keeps_state: bool, queue: "Queue[Any]", drop: Callable[[], None], error: Exception, sent: Any) -> None:
    """Send the `error` that came up when `sent`, a batch's number and the batch, was pickled in the batch's place."""
    if not (isinstance(sent, tuple) and len(sent) == 2 and isinstance(sent[0], int)):
        drop()  # of a queue of the dataset's own
        return
    number, content = sent
    batch, *state = content if keeps_state else (content,)
    where = "in a DataLoader worker process, when it pickled a batch to send it"
    batch = wrapped_error(batch, error, where)
    try:
        ForkingPickler.dumps(batch)
    except Exception:  # the class of the exception is the script's own: its traceback, which says all, is a text
        batch.exc_type = RuntimeError
    queue.put((number, (batch, *state) if keeps_state else batch))


class GuardedCollate:
    """A collate_fn that raises DataError where the user's own raises StopIteration, which ends a loader in silence."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        """Return the batch."""
        try:
            return self.collate(samples)
        except StopIteration as error:
            name = getattr(self.collate, "__qualname__", type(self.collate).__name__)
            raise DataError(
                f"The collate_fn {name} raised StopIteration, which would pass for the end of the data: an iterator "
                f"that it reads from is used up."
            ) from error


def guarded(collate: Any) -> Any:
    """Return a collate_fn that cannot end its loader; torch's own ones cannot anyway."""
    return collate if collate in (default_collate, default_convert, None) else GuardedCollate(collate)


def dump_stacks_to(file: IO[str] | None) -> None:
    """Let workers that are forked from now on write their stacks to `file` when they get the signal DUMP."""
    global _dump
    _dump = file if DUMP else None


@functools.cache
def _attends() -> Any:
    """Return a flag that this process's loader workers share with it: whether it attends to signals."""
    from multiprocessing.sharedctypes import RawValue

    return RawValue("b", 0)


@contextmanager
def signals_attended() -> Iterator[None]:
    """Let loader workers leave signals to this process."""
    _attends().value = 1
    try:
        yield
    finally:
        _attends().value = 0


@contextmanager
def shielded(loader: Any) -> Iterator[None]:
    """Shield the workers that a user's loader starts within this context, and guard its collate_fn."""
    before = {name: getattr(loader, name) for name in ("worker_init_fn", "collate_fn") if hasattr(loader, name)}
    if len(before) == 2:
        loader.collate_fn = guarded(before["collate_fn"])
        if getattr(loader, "num_workers", 0):
            loader.worker_init_fn = Shield(before["worker_init_fn"], keeps_state=hasattr(loader, "state_dict"))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(loader, name, value)
