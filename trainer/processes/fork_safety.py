"""Pauses before a fork and at exit, to let gloo's and NCCL's threads release the interpreter.

The threads acquire a thread state from the interpreter when they drop the last reference to a tensor. Up to CPython
3.12, a child process forked at that moment, such as a loader worker, inherits the interpreter's lock in the
locked state and hangs before it executes its first line. With two ranks on two busy cores, one in 1,500 forks made
shortly after a collective hung, and a run that restarted its loader workers in each epoch froze after 32 epochs. At
exit, such a thread may need an interpreter that no longer exists, which aborts the process ("terminate called without
an active exception"; once in 24 exits).
"""

import atexit
import functools
import os
import time

PAUSE = 0.01
"""Seconds to sleep, without the interpreter lock, before a fork or at exit; the threads need much less."""
BURST = 0.1
"""Seconds within which several forks (one for each loader worker) share a pause."""


_paused_at = 0.0


@functools.cache
def install() -> None:
    """Register a pause before each fork and at exit. Subsequent calls have no effect."""
    atexit.register(time.sleep, PAUSE)
    os.register_at_fork(before=_pause)


def _pause() -> None:
    """Sleep for PAUSE seconds, unless a pause has just ended."""
    global _paused_at
    if time.monotonic() - _paused_at > BURST:
        time.sleep(PAUSE)
        _paused_at = time.monotonic()
