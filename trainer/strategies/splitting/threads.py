"""One thread a device, kept from step to step."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch


class DeviceThreads:
    """A thread for each device, named legato-device-0, legato-device-1, ... A thread starts with its first job.

    What torch keeps for each thread (grad mode, inference mode, autocast) is taken over from the caller at each `run`.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self.here = threading.local()
        self._workers = [
            ThreadPoolExecutor(1, initializer=_name_thread, initargs=(f"legato-device-{index}",))
            for index in range(len(self.devices))
        ]

    def run(self, jobs: Sequence[Callable[[], Any]], at_once: bool) -> list[Any]:
        """Run job i in the thread of device i and return the results in that order.

        at_once: start all together; else each begins when the one before it has ended, so that draws from the random
        generators that threads share fall in one order.

        Raises the error of the first job that failed, with that job's own traceback and a note that names its device,
        when no job is running any more.
        """
        state = _ThreadState(self.devices)
        running: list[Future[Any]] = []
        for index, job in enumerate(jobs):
            running.append(self._workers[index].submit(self._run_one, index, job, state))
            if not at_once:
                wait(running)
                if running[-1].exception() is not None:
                    break
        wait(running)
        for index, future in enumerate(running):
            error = future.exception()
            if error is not None:
                _add_note(error, f"This was raised on device {index} of {len(self.devices)} ({self.devices[index]}).")
                raise error
        return [future.result() for future in running]

    def current_device(self) -> torch.device | None:
        """Return the device of the thread that asks, None outside of these threads."""
        device: torch.device | None = getattr(self.here, "device", None)
        return device

    def close(self) -> None:
        """End the threads, after the jobs that are running."""
        for worker in self._workers:
            worker.shutdown()

    def _run_one(self, index: int, job: Callable[[], Any], state: "_ThreadState") -> Any:
        self.here.device = self.devices[index]
        with state.entered(index):
            return job()


class _ThreadState:
    """What torch keeps for each thread, as it is in the thread that makes this object."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        kinds = {"cpu", devices[0].type}
        self.autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
        self.cache = torch.is_autocast_cache_enabled()
        on_host = devices[0].type == "cpu"
        self.streams = [] if on_host else [torch.accelerator.current_stream(device) for device in devices]

    @contextmanager
    def entered(self, index: int) -> Iterator[None]:
        """Hold for the thread of device `index`."""
        with ExitStack() as stack:
            stack.enter_context(on_device(self.devices[index]))
            if self.streams:
                stack.enter_context(self.streams[index])
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.cache))
            yield


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which new tensors and kernels go to this device of its kind; nothing on CPU."""
    return ExitStack() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def _name_thread(name: str) -> None:
    threading.current_thread().name = name


def _add_note(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.__cause__ is None:  # 3.10 prints no notes, but it prints the cause
        error.__cause__ = RuntimeError(note)
