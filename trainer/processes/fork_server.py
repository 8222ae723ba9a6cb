"""Signals that reach the server from which workers are forked, or a worker that is not ready; only that imports this.

What a scheduler sends to every process of a job would end the server in the middle of starting a worker, which then has
no exit code; and a worker that is just being forked would lose it. Both have the signals blocked: the server never gets
them (it ends with the process that started it), a worker does as soon as it has handlers of its own.
"""

import os
import signal

from .signals import END_SIGNALS

_blocked = set(END_SIGNALS) - signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
_heeds_ctrl_c = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # multiprocessing's server ignores it from now on


def _let_through() -> None:
    """Let a forked process, but not its own children, have the signals: by default they end it."""
    if _blocked:
        if _heeds_ctrl_c:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _blocked)
        _blocked.clear()


os.register_at_fork(after_in_child=_let_through)
