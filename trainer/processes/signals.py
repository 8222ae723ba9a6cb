"""Signals that ask a process to end: which ones, who hears them, and what a run that was ended so answers."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .signal_watch import SignalWatch

RESUME_ME = 75
"""The exit code of a run that was stopped from outside and wants to be started again (EX_TEMPFAIL of sysexits.h)."""
INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 + SIGINT, as shells have it."""
ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name))
"""The signals that ask a run to end: Ctrl-C, a scheduler's notice, SLURM's early warning, the end of the terminal."""
DUMP = getattr(signal, "SIGUSR2", 0)
"""The signal at which a process writes down its stacks, where somebody wants to know them."""


@contextmanager
def attended(handler: Callable[[int], None], watch: "SignalWatch | None" = None) -> Iterator[None]:
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
            for number in ENDING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, attend)
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, signal.SIG_DFL if old is None else old)


def leave(number: int) -> None:
    """Raise what ends a run that has nothing to save: KeyboardInterrupt after Ctrl-C, otherwise SystemExit(75)."""
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(RESUME_ME)


def leave_at_once(number: int) -> None:
    """End this process, which has nothing to save and may be anywhere, for instance in an import that ends badly."""
    if number != signal.SIGINT:
        name = signal.Signals(number).name
        os.write(2, f"{name}: nothing was being trained. Exit code {RESUME_ME} asks for a new start.\n".encode())
    os._exit(INTERRUPTED if number == signal.SIGINT else RESUME_ME)
