"""Pauses before a fork and at exit, so that threads of gloo and NCCL are done with the interpreter.

The threads of gloo and NCCL take a thread state from the interpreter when they drop the last reference to a tensor. Up
to CPython 3.12 a child that is forked at that moment (loader workers are forked from ranks) inherits the interpreter's
lock for it, closed for good, and hangs before its first line. A fork shortly after a collective hung once in 1,500
times here (2 ranks on 2 busy cores), and a run whose loader workers start again each epoch froze after 32 epochs. And
where the interpreter is gone when such a thread asks for it, the process is aborted ("terminate called without an
active exception"; once in 24 exits).
"""

import atexit
import functools
import os
import time

PAUSE = 0.01
"""Seconds for which the interpreter lock is released before a fork or at exit; the threads need much less."""
BURST = 0.1
"""Seconds within which several forks (one for each loader worker) share one pause."""


_paused_at = 0.0


@functools.cache
def install() -> None:
    """Register a pause before each fork and at exit, once."""
    atexit.register(time.sleep, PAUSE)
    os.register_at_fork(before=_pause)


def _pause() -> None:
    """Sleep for a moment, unless that was just done."""
    global _paused_at
    if time.monotonic() - _paused_at > BURST:
        time.sleep(PAUSE)
        _paused_at = time.monotonic()
