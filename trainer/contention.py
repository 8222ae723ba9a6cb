"""Contention: a word where other programs use the cores that torch's threads compute on."""

import logging
import resource
import time

import torch

log = logging.getLogger("legato")

PREEMPTIONS = 100.0
"""Involuntary context switches a second above which threads wait for cores; 0 to 5 on a quiet machine."""


class Contention:
    """Looks at each logging point whether threads of this process wait for cores, and says so once.

    Threads that share an operation wait for the last of them, and spin while they wait, so that neither wall time nor
    CPU time tells a slowed step from a large one. The system counts how often it has taken a core away.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self.threads = torch.get_num_threads()
        self.looks = self.threads > 1 and device.type == "cpu" and rank == 0
        self.before = 0.0, 0
        self.step = -1
        """Step of the look before; -1: none yet."""

    def look(self, step: int) -> None:
        """Count the context switches since the look before, which was after another step."""
        if not self.looks:
            return
        now = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        seconds, switches = now[0] - self.before[0], now[1] - self.before[1]
        steps, self.step, self.before = step - self.step if self.step >= 0 else 0, step, now
        if steps > 0 and switches > PREEMPTIONS * seconds:
            self.looks = False
            log.warning(
                "A step takes %.2g s: other programs use the cores too, and torch's %d threads wait for each other. "
                "Set trainer.threads=1, which can be many times faster on a busy machine.",
                seconds / steps,
                self.threads,
            )
