"""Handles signals that ask a process to exit: handlers, deadlines and exit codes."""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import connection
from types import TracebackType

from .failures import end_by_force, touch_alive_file
from .save_progress import SAVES
from .stacks import describe_stack, stack_of

RESUME_ME = 75
"""Exit code of a run that was stopped externally and can be resumed (EX_TEMPFAIL in sysexits.h)."""
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as in shells."""
END_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
"""Signals that ask a run to end: Ctrl-C, a scheduler's request, SLURM's early warning, a closed terminal."""


@contextmanager
def handling_end_signals(handler: Callable[[int], None], watch: "SignalWatch | None" = None) -> Iterator[None]:
    """Call `handler` for signals that ask this process to exit. Does nothing outside the main thread.

    `watch` terminates the process if it does not respond to a signal. If `watch` is None, the outer context's watch is
    suspended.

    Signals that were already ignored, such as SIGINT in a shell's background job, remain ignored. Forked children use
    the default handlers, because their parent terminates them with signals.
    """
    previous = {}
    process = os.getpid()

    def attend(number: int, _: object) -> None:
        if os.getpid() == process:
            if watch is not None:  # its thread may not run while the main thread holds the interpreter lock
                watch.record(number)
                watch.end_if_due()
            handler(number)
        else:
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
            os.kill(os.getpid(), number)

    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            if watch is not None:
                stack.enter_context(watch)
            else:  # a watch of an outer context would terminate this process while its workers are still saving
                stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(-1))
            for number in END_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    previous[number] = signal.signal(number, attend)
        try:
            yield
        finally:
            for number, old in previous.items():
                signal.signal(number, signal.SIG_DFL if old is None else old)


def raise_for_signal(number: int) -> None:
    """Raise KeyboardInterrupt for Ctrl-C, or SystemExit(75) for other signals. Used when there is nothing to save."""
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(RESUME_ME)


def exit_at_once(number: int) -> None:
    """Exit without cleanup. Used when there is nothing to save and exceptions may be swallowed, as during imports."""
    if number != signal.SIGINT:
        name = signal.Signals(number).name
        os.write(2, f"{name}: no training had started. Exit code {RESUME_ME} requests a restart.\n".encode())
    # not sys.exit: code that imports a module may treat SystemExit as a missing module
    os._exit(INTERRUPTED if number == signal.SIGINT else RESUME_ME)


GRACE, NOTHING_TO_SAVE = 30.0, 5.0
"""Seconds after which a process that has not responded to SIGTERM or SIGHUP is killed: in general, and if there is
nothing to save."""
ONE_PRESS = 0.5
"""Seconds within which two SIGINTs are treated as one Ctrl-C, because launchers forward a signal that the terminal also
sends."""
_TICK = 0.1
_STOP = 0

_entered: "list[SignalWatch]" = []


def _forget() -> None:
    """Reset the wakeup pipe in a forked child, which would otherwise send its signals to the parent."""
    if _entered:
        _entered.clear()
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)


class SignalWatch:
    """Terminates this process on a second Ctrl-C, or if it has not responded to SIGTERM or SIGHUP within GRACE seconds.

    A save in progress is allowed to finish first, unless it gets stuck. Use the watch as a context manager in the main
    thread. In other threads, it does nothing.
    """

    def __init__(self, attends: bool = True) -> None:
        """Prepare to watch for signals.

        Args:
            attends: True if this process handles SIGTERM and SIGHUP. If False, these signals terminate the process
                without involving the watch.
        """
        self.attends = attends
        self.nothing_to_save = True
        self.presses: list[float] = []
        """Times at which Ctrl-C was pressed."""
        self.signal_to_answer = 0
        """Signal that this process must respond to; 0 if there is none."""
        self.received_at = self.answered_at = float("-inf")
        self.ended = False
        self._reader = self._writer = self._before = -1
        self._thread: threading.Thread | None = None
        self._main = threading.main_thread().ident

    def __enter__(self) -> "SignalWatch":
        if threading.current_thread() is threading.main_thread():
            # Python runs handlers in the main thread between bytecodes, so a thread that is waiting in gloo or a C
            # library, or in a loop that swallows exceptions, does not react to signals. Python's C code writes each
            # signal's number to this pipe at once.
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._watch, name="legato-signals", daemon=True)
            self._thread.start()
            _entered.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        _entered.remove(self)
        signal.set_wakeup_fd(self._before)
        os.write(self._writer, bytes([_STOP]))
        self._thread.join()
        self._thread = None
        os.close(self._reader)
        os.close(self._writer)

    def answer(self) -> None:
        """Restart the grace period, because the run has started responding to the signal."""
        self.answered_at = time.monotonic()

    def record(self, number: int) -> None:
        """Record a signal. Both the thread and the signal handlers call this, because one of them may be blocked."""
        now = time.monotonic()
        if number == signal.SIGINT:
            if not self.presses or now > self.presses[-1] + ONE_PRESS:
                self.presses.append(now)
        elif self.attends and not self.signal_to_answer and number in (signal.SIGTERM, signal.SIGHUP):
            self.signal_to_answer, self.received_at = number, now

    def end_if_due(self) -> None:
        """Terminate this process if the time is up."""
        number = self._due()
        if number and not self.ended:
            self.ended = True
            self._end(number)

    # --- the thread -------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        while True:
            has_signal = bool(self.signal_to_answer or self.presses)
            # not select.select, which supports only file descriptors below 1024
            if connection.wait([self._reader], _TICK if has_signal else None):
                numbers = os.read(self._reader, 4096)
                arrived = numbers.replace(bytes([_STOP]), b"")  # a signal may come just before the end
                if arrived and self._before >= 0:  # forward to an event loop's wakeup pipe
                    with suppress(OSError):
                        os.write(self._before, arrived)
                if _STOP in numbers:
                    return
                for number in arrived:
                    self.record(number)
            if has_signal:  # a launcher kills a process that does not touch its file
                touch_alive_file()
            self.end_if_due()

    def _due(self) -> int:
        """Return the signal that requires this process to exit now, or 0 if there is none."""
        # finish a save rather than exit early, but do not wait for a save without progress
        if SAVES.has_progressed(GRACE) or (SAVES.under_way and self._waits_for_ranks()):
            return 0
        if len(self.presses) > 1:
            return signal.SIGINT
        # after a save, the run gets the full grace period again for the work that follows
        since = max(self.received_at, self.answered_at, SAVES.progressed_at)
        return (
            self.signal_to_answer
            if self.signal_to_answer and time.monotonic() > since + self._seconds_to_answer()
            else 0
        )

    def _seconds_to_answer(self) -> float:
        return min(GRACE, NOTHING_TO_SAVE) if self.nothing_to_save else GRACE

    def _waits_for_ranks(self) -> bool:
        """Return whether the main thread is waiting for other ranks, which may be writing a checkpoint."""
        return self._main is not None and describe_stack(stack_of(self._main), alone=False)[1]

    def _end(self, number: int) -> None:
        name = signal.Signals(number).name
        late = f"it has not responded for {self._seconds_to_answer():g} s"
        reason = "Ctrl-C was pressed again" if number == signal.SIGINT else late
        message = (
            f"{name}: this process is exiting before its work is done, because {reason}. Exit code {128 + number}. "
            f"The run's checkpoints are complete: resume=auto continues the run. Stacks of all threads:\n"
        )
        with suppress(OSError):
            os.write(2, message.encode())
            faulthandler.dump_traceback(2, all_threads=True)
        end_by_force(number, reason)
