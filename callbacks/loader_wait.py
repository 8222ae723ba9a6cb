"""LoaderWait: measures how long training waits for batches, and says once what to raise."""

import logging
import os
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger("legato")

LEAST_STEPS, LEAST_SECONDS = 20, 5.0
"""Least steps and seconds to measure before the wait is judged."""
WARM_UP = 5
"""Batches that are not counted: workers start, kernels are chosen."""
MOST_SHARE = 0.25


class LoaderWait:
    """The time from the end of a batch to the arrival of the next one, as a share of the whole.

    On CUDA a wait counts only if the device had nothing left to do when it was over: the program may be waiting for a
    batch while the device is still busy. The time of logging steps, saves and validations is left out.
    """

    def __init__(self, device: Any = None) -> None:
        self._device_is_idle: Callable[[], bool] = lambda: True
        self._on_cuda = device is not None and device.type == "cuda"
        if self._on_cuda:
            import torch

            self._device_is_idle = torch.cuda.current_stream(device).query
        self._batches, self._told = 0, False
        self._waited = self._total = 0.0
        self._ended: float | None = None
        """Time at which the newest batch ended; None: the next wait is not measured."""
        self._arrived: float | None = None

    def pause(self) -> None:
        """Leave out the time up to the next batch."""
        self._ended = None

    def batch_arrived(self) -> None:
        """Measure the wait for this batch."""
        if self._told:
            return
        self._batches += 1
        self._arrived = time.monotonic() if self._batches > WARM_UP else None
        if self._arrived is not None and self._ended is not None:
            wait = self._arrived - self._ended
            self._total += wait
            self._waited += wait if self._device_is_idle() else 0.0

    def batch_ended(self) -> float:
        """Begin to wait for the next batch; return the time."""
        self._ended = now = time.monotonic()
        if self._arrived is not None:
            self._total += now - self._arrived
            self._arrived = None
        return now

    def tell(self, loader: Any) -> None:
        """Warn, once, if the share is large; `loader`: what can be asked for its settings."""
        share = self._waited / max(self._total, 1e-9)
        if self._told or self._batches < LEAST_STEPS or self._total < LEAST_SECONDS or share < MOST_SHARE:
            return
        self._told = True
        workers, pinned = getattr(loader, "num_workers", None), getattr(loader, "pin_memory", None)
        advice = ["make the loader faster"]
        if workers is not None:
            more = workers < (os.cpu_count() or 1)
            advice = [
                f"raise its num_workers ({workers} now)" if more else f"its dataset is slow for {workers} workers"
            ]
        if self._on_cuda and pinned is False:
            advice.append("set its pin_memory=True")
        log.warning(
            "Training waits for the training loader in %.0f %% of its time: %s.", 100 * share, ", and ".join(advice)
        )
