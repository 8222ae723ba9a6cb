"""Blocks termination signals in multiprocessing's fork server and in new workers. Imported only by the fork server.

A scheduler sends its signals to every process in a job. A signal could kill the server while it is forking a worker,
whose exit code would then be unknown. A worker that is being forked could also miss a signal. So the server and
its new workers block the termination signals. The server never receives them; it exits along with the process that
started it. A worker unblocks them after the fork.
"""

import os
import signal

from .signals import END_SIGNALS

_blocked = set(END_SIGNALS) - signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
# read now, because multiprocessing's server later ignores SIGINT
_handles_ctrl_c = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def _let_through() -> None:
    """Unblock termination signals in a new worker and let Ctrl-C terminate it. Do nothing in its children."""
    if _blocked:
        if _handles_ctrl_c:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _blocked)
        _blocked.clear()


os.register_at_fork(after_in_child=_let_through)
