"""Signals that ask a process to end: which ones, who hears them, and what a run that was ended so answers."""

import faulthandler
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType

from ..checkpoints.progress import SAVES
from .failures import end_by_force, touch_alive_file

RESUME_ME = 75
"""The exit code of a run that was stopped from outside and wants to be started again (EX_TEMPFAIL of sysexits.h)."""
INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 + SIGINT, as shells have it."""
END_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
)
"""The signals that ask a run to end: Ctrl-C, a scheduler's notice, SLURM's early warning, the end of the terminal."""
DUMP = getattr(signal, "SIGUSR2", 0)
"""The signal at which a process writes down its stacks, where somebody wants to know them."""


@contextmanager
def handling_end_signals(handler: Callable[[int], None], watch: "SignalWatch | None" = None) -> Iterator[None]:
    """Let `handler` have the signals that ask this process to end, in the main thread; elsewhere do nothing.

    `watch` ends the process where it does not answer them.

    What is ignored stays ignored, as SIGINT is in a job that a shell has put into the background. A process that was
    forked meanwhile ends by a signal as if nobody attended to it: whoever forked it means to end it so.
    """
    before = {}
    own = os.getpid()

    def attend(number: int, _: object) -> None:
        if os.getpid() == own:
            if watch is not None:  # whose thread may not get to run, in code that only looks at signals
                watch.hear(number)
                watch.look()
            handler(number)
        else:
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
            os.kill(os.getpid(), number)

    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            if watch is not None:
                stack.enter_context(watch)
            for number in END_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, attend)
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, signal.SIG_DFL if old is None else old)


def raise_for_signal(number: int) -> None:
    """Raise what ends a run that has nothing to save: KeyboardInterrupt after Ctrl-C, otherwise SystemExit(75)."""
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(RESUME_ME)


def exit_at_once(number: int) -> None:
    """End this process, which has nothing to save and may be anywhere, for instance in an import that ends badly."""
    if number != signal.SIGINT:
        name = signal.Signals(number).name
        os.write(2, f"{name}: nothing was being trained. Exit code {RESUME_ME} asks for a new start.\n".encode())
    os._exit(INTERRUPTED if number == signal.SIGINT else RESUME_ME)


NOTHING_TO_SAVE = 5.0
"""Seconds that a process has to answer while there is nothing to save yet, where the grace time is not shorter."""
ONE_PRESS = 0.5
"""Seconds within which two SIGINT are one press of Ctrl-C: launchers pass on what the terminal has sent already."""
_TICK = 0.1
_STOP = 0

_entered: "list[SignalWatch]" = []


def _forget() -> None:
    """Keep signals of a forked child from being read by its parent, with which it shares the pipe."""
    if _entered:
        _entered.clear()
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class SignalWatch:
    """Ends this process after a second Ctrl-C at once, and when `grace` seconds have passed since SIGTERM or SIGHUP.

    A save that is under way is finished first, as long as it moves. As a context, in the main thread; elsewhere it does
    nothing.
    """

    def __init__(self, grace: float, attends: bool = True) -> None:
        """`attends`: whether this process attends to SIGTERM and SIGHUP; else they end it anyway."""
        self.grace, self.attends = grace, attends
        self.nothing_to_save = True
        self.presses: list[float] = []
        """When Ctrl-C was pressed."""
        self.told = 0
        """The signal that must be answered; 0: none."""
        self.told_at = self.answered_at = float("-inf")
        self.ended = False
        self._reader = self._writer = self._before = -1
        self._thread: threading.Thread | None = None
        self._main = threading.main_thread().ident

    def __enter__(self) -> "SignalWatch":
        if threading.current_thread() is threading.main_thread():
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
        """Note that the run does as it was told; from now on it has the grace time once more."""
        self.answered_at = time.monotonic()

    def hear(self, number: int) -> None:
        """Take in a signal, from the thread or from a handler: either may be the only one that gets to run."""
        now = time.monotonic()
        if number == signal.SIGINT:
            if not self.presses or now > self.presses[-1] + ONE_PRESS:
                self.presses.append(now)
        elif self.attends and not self.told and number in (signal.SIGTERM, getattr(signal, "SIGHUP", None)):
            self.told, self.told_at = number, now

    def look(self) -> None:
        """End this process where it is due."""
        number = self._due()
        if number and not self.ended:
            self.ended = True
            self._end(number)

    # --- the thread -------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        while True:
            heard = bool(self.told or self.presses)
            ready, _, _ = select.select([self._reader], [], [], _TICK if heard else None)
            if ready:
                numbers = os.read(self._reader, 4096)
                if _STOP in numbers:
                    return
                if self._before >= 0:  # an event loop's, which waits for them too
                    with suppress(OSError):
                        os.write(self._before, numbers)
                for number in numbers:
                    self.hear(number)
            if heard:
                touch_alive_file()
            self.look()

    def _due(self) -> int:
        """Return the signal by which this process is to be ended now; 0: none."""
        if SAVES.moves(self.grace) or (SAVES.under_way and self._waits()):
            return 0
        if len(self.presses) > 1:
            return signal.SIGINT
        since = max(self.told_at, self.answered_at, SAVES.moved_at)
        return self.told if self.told and time.monotonic() > since + self._patience() else 0

    def _patience(self) -> float:
        return min(self.grace, NOTHING_TO_SAVE) if self.nothing_to_save else self.grace

    def _waits(self) -> bool:
        """Return whether the main thread waits for other ranks, of which one may be writing."""
        from .watchdog import describe_stack, stack_of

        return self._main is not None and describe_stack(stack_of(self._main), alone=False)[1]

    def _end(self, number: int) -> None:
        name = signal.Signals(number).name
        late = f"it has not answered for {self._patience():g} s"
        why = "Ctrl-C was pressed again" if number == signal.SIGINT else late
        said = (
            f"{name}: this process is ended in the midst of its work, since {why}. Exit code {128 + number}; what the "
            f"run has saved is whole: resume=auto goes on. All threads stand here:\n"
        )
        with suppress(OSError):
            os.write(2, said.encode())
            faulthandler.dump_traceback(2, all_threads=True)
        end_by_force(number, why)
