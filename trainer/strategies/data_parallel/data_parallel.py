"""Data parallel: one process, one thread a device; each batch is scattered over the devices as nn.DataParallel does."""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ....base.errors import ConfigError, add_note
from ....base.torch_private import is_compiled
from ...data.sampling import Layout
from ...data.transfer import count_samples
from ..pieces import chunk_sizes, combine, combine_losses, split
from ..strategy import Strategy
from .copies import LogRecorder, copy_to_devices, find_metrics, keep_buffers, share_metrics

if TYPE_CHECKING:
    from ....tasks.task import Task


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
        # also for those behind a failed one: no thread may use the task when its caller handles the error
        wait(running)
        for index, future in enumerate(running):
            error = future.exception()
            if error is not None:
                add_note(error, f"This was raised on device {index} of {len(self.devices)} ({self.devices[index]}).")
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
    """Snapshot of torch's thread-local state (grad mode, autocast, streams) in the thread that makes it."""

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
        """Enter this state in the thread of device `index`."""
        with ExitStack() as stack:
            stack.enter_context(device_context(self.devices[index]))
            if self.streams:
                stack.enter_context(self.streams[index])
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.cache))
            yield


def device_context(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which new tensors and kernels go to this device of its kind; nothing on CPU."""
    return ExitStack() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def _name_thread(name: str) -> None:
    threading.current_thread().name = name


class DataParallelStrategy(Strategy):
    """One process, a thread for each device.

    Every batch is split over the devices, whatever the number of replicas.

    Random numbers: on accelerators the threads run at once, and each device draws from its own generator, keyed by
    step, replica and chunk. CPU devices share the generators of the host (Python's, NumPy's, torch's), so there the
    chunks take turns, unless `reproducible` is "off", and the draws of a batch come in one order. Another number of
    devices divides the draws of a batch in another way.
    """

    name = "data_parallel"

    def __init__(self) -> None:
        # before super().__init__(), which assigns `device`, a property here
        self.root = torch.device("cpu")
        self.threads: DeviceThreads | None = None
        super().__init__()
        self.metrics: list[tuple[str, str, Any]] = []
        self.metrics_lock = threading.Lock()
        self.checked_steps: set[str] = set()

    @property
    def device(self) -> torch.device:
        """The device of the thread that asks; outside of the threads, the first one."""
        return (self.threads.current_device() if self.threads is not None else None) or self.root

    @device.setter
    def device(self, device: torch.device) -> None:
        self.root = device

    # --- the task ---------------------------------------------------------------------------------------------------
    def prepare(
        self, task: "Task", optimizers: Sequence[Optimizer], layout: Layout, one_order: bool = False
    ) -> list[Optimizer]:
        """Prepare the task and a thread for each device; raises ConfigError for what several devices cannot do."""
        prepared = super().prepare(task, optimizers, layout, one_order)
        if len(self.devices) > 1:
            self._refuse_what_copies_cannot_do(task)
        self.cuts_batches = len(self.devices) > 1
        self.metrics = find_metrics(task)
        self.checked_steps = set()
        self._close_threads()  # of an earlier run, whose devices may have been others
        self.threads = DeviceThreads(self.devices)
        return prepared

    def teardown(self) -> None:
        """End the threads and drop what they worked on."""
        self._close_threads()
        self.metrics = []
        super().teardown()

    def _close_threads(self) -> None:
        if self.threads is not None:
            self.threads.close()
            self.threads = None

    def _refuse_what_copies_cannot_do(self, task: "Task") -> None:
        where = f"strategy data_parallel on {len(self.devices)} devices"
        if not task.automatic_optimization:
            raise ConfigError(
                f"{where} cannot run a task with automatic_optimization=False: its step would update copies of the "
                f"weights that are dropped after each batch. Use strategy ddp, or devices: 1."
            )
        if task.trainer.compile or any(map(is_compiled, task.modules())):
            raise ConfigError(
                f"{where} cannot run compiled steps: they stay tied to the weights on one device, not to the copies. "
                f"Use strategy ddp, or compile: false."
            )
        if task.trainer.reproducible == "bitwise":
            raise ConfigError(
                f"{where} splits each batch, so the bits of its results would depend on the number of devices; "
                f"reproducible: bitwise does not allow that. Use strategy ddp, or reproducible: order."
            )

    # --- the step ---------------------------------------------------------------------------------------------------
    def training_step(self, arguments: Sequence[Any], replica: int | None, last: bool) -> Any:
        """Run training_step on the batch's chunks and return what it would return for the whole batch."""
        if self.by_replica:
            self._open_replica(replica)
        with self.precision.forward_context():
            return self._run_split("training_step", arguments)

    def evaluation_step(self, name: str, arguments: Sequence[Any]) -> Any:
        """Run the step `name` on the batch's chunks and return their outputs together, in order."""
        with self.precision.forward_context():
            return self._run_split(name, arguments)

    def _run_split(self, name: str, arguments: Sequence[Any]) -> Any:
        task, root = self.task, self.root
        assert task is not None
        assert self.threads is not None
        if len(self.devices) == 1:
            return getattr(task, name)(*arguments)
        batch, *others = arguments
        sizes = chunk_sizes(count_samples(batch), len(self.devices))
        chunks = split(batch, sizes, self.devices[: len(sizes)])
        if len(chunks) == 1:
            return getattr(task, name)(*arguments)
        # copied in each step: gradients flow back through the copy (Broadcast), and weights have changed since
        copies = copy_to_devices(task, self.devices[: len(sizes)])
        recorders = [LogRecorder() for _ in copies]
        for copy, recorder in zip(copies, recorders, strict=True):
            copy.__dict__["log"] = recorder.log
            share_metrics(copy, self.metrics, root, self.metrics_lock)
        attributes = dict(copies[0].__dict__)
        # drawn from the host's generator, which is keyed by step and replica: every device gets a key of its own
        keys = [None] * len(copies) if root.type == "cpu" else torch.randint(2**62, (len(copies),)).tolist()
        jobs = [
            partial(_run_chunk, _step_of(copy, task, name), [chunk, *others], device, key)
            for copy, chunk, device, key in zip(copies, chunks, self.devices, keys, strict=False)
        ]
        outputs = self.threads.run(jobs, at_once=root.type != "cpu" or task.trainer.reproducible == "off")
        keep_buffers(task, copies[0])
        for recorder, size in zip(recorders, sizes, strict=True):
            recorder.replay(task, size)
        if name not in self.checked_steps:
            self.checked_steps.add(name)
            _warn_of_lost_attributes(name, attributes, copies[0].__dict__)
        return (combine_losses if name == "training_step" else combine)(outputs, sizes, root)


def _run_chunk(step: Any, arguments: list[Any], device: torch.device, key: int | None) -> Any:
    if key is not None:
        torch.get_device_module(device).manual_seed(key)
    return step(*arguments)


def _step_of(copy: "Task", task: "Task", name: str) -> Any:
    """Return the step of `copy`; one that was set on the instance is still tied to `task`."""
    step = getattr(copy, name)
    return MethodType(step.__func__, copy) if getattr(step, "__self__", None) is task else step


def _warn_of_lost_attributes(name: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    lost = [key for key, value in after.items() if key not in before or before[key] is not value]
    if lost:
        warnings.warn(
            f"{name} assigned self.{', self.'.join(lost)} under strategy data_parallel, which runs it on copies of the "
            f"task that are dropped after each batch. Use self.log, a registered buffer or strategy ddp to keep it.",
            stacklevel=2,
        )
