"""Keeps signals to a whole process group from ending the server that workers are forked from; only that imports this.

What a scheduler sends to every process of a job would end the server in the middle of starting a worker, which then has
no exit code. The server ends with the process that started it.
"""

import os
import signal

from .signals import ENDING

_before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING if number != signal.SIGINT}


def _put_back() -> None:
    """Let a forked process, but not its own children, have the signals as the server found them."""
    while _before:
        number, handler = _before.popitem()
        signal.signal(number, handler)


os.register_at_fork(after_in_child=_put_back)
