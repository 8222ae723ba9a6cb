"""Forking from and ending a process that has a process group, whose threads need the interpreter after a collective.

The threads of gloo and NCCL take a thread state from the interpreter when they drop the last reference to a tensor. Up
to CPython 3.12 a child that is forked at that moment (loader workers are forked from ranks) inherits the interpreter's
lock for it, closed for good, and hangs before its first line. A fork shortly after a collective hung once in 1,500
times here (2 ranks on 2 busy cores), and a run whose loader workers start anew each epoch froze after 32 epochs. And
where the interpreter is gone when such a thread asks for it, the process is aborted ("terminate called without an
active exception"; once in 24 exits).
"""

import atexit
import os
import time

SETTLE = 0.01
"""Seconds that the interpreter lock is given up before a fork or the end, so that such threads are done: they need much
less."""
BURST = 0.1
"""Seconds within which several forks (a loader's workers) count as one."""


class Settling:
    """Lets a process group's threads finish with the interpreter before this process forks or ends."""

    def __init__(self) -> None:
        self.installed = False
        self.settled_at = 0.0

    def install(self) -> None:
        """Watch over every fork of this process from now on, and over its end."""
        if self.installed:
            return
        self.installed = True
        atexit.register(time.sleep, SETTLE)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self.settle)

    def settle(self) -> None:
        """Wait a moment, unless that was just done."""
        if time.monotonic() - self.settled_at > BURST:
            time.sleep(SETTLE)
            self.settled_at = time.monotonic()


settling = Settling()
