"""Signal mask of multiprocessing's fork server and of workers that are not ready yet; imported only by that server.

A scheduler signals every process of a job. That would end the server while it forks a worker, which then has no exit
code, or be lost on a worker that is just being forked. So the end signals are blocked in both: the server never gets
them (it ends with the process that started it), a worker unblocks them once its handlers are installed.
"""

import os
import signal

from .signals import END_SIGNALS

_blocked = set(END_SIGNALS) - signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
# Read now, since multiprocessing's server ignores SIGINT from its start on.
_handles_ctrl_c = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def _let_through() -> None:
    """Unblock the signals in a forked worker, but not in its children, with their default handlers."""
    if _blocked:
        if _handles_ctrl_c:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _blocked)
        _blocked.clear()


os.register_at_fork(after_in_child=_let_through)
