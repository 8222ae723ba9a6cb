"""Local worker processes: started together, watched, ended together; the first that failed is the one that is reported.

The caller's function travels by cloudpickle through a file in a private folder, and what it returns or raises comes
back the same way, so lambdas, notebooks and classes of the caller's script work, and the script itself runs once.
Nothing here knows of ranks in a process group or of the environment: launch.py gives each worker its place.
"""

import faulthandler
import functools
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver, reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from ..errors import ConfigError, TaskError
from .ending import report_to, take_down, write_whole
from .parcel import Failure, Settings, pack, place_classes, travelling_by_value, unpack
from .signals import ENDING
from .signals import RESUME_ME as RESUME_ME

logger = logging.getLogger("legato")

# What every worker needs: torch._dynamo because the first optimizer imports it, which takes a second.
_PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "torch.utils.data", __name__]
_SETTLE = 2.0  # seconds in which the rank that broke a connection may still say why
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL: a process that waits in a collective does not see the first
_PATIENCE = 60.0  # seconds that workers have after Ctrl-C: they may be writing a checkpoint
_FAREWELL = 15.0  # seconds that workers have once one has ended to be resumed: it did so after all that was to be saved


def warm_up() -> None:
    """Start the server from which workers are forked, and return at once: it imports torch beside the caller's work."""
    if _start_method() == "forkserver":
        forkserver.set_forkserver_preload(_PRELOAD)
        with _main_hidden():
            forkserver.ensure_running()


def _start_method() -> str:
    # Outside Linux a process that has loaded torch (Metal, Accelerate) must not be forked, not even by a server.
    return "forkserver" if sys.platform == "linux" else "spawn"


def run(
    function: Callable[[], Any],
    ranks: range,
    world_size: int,
    enter: Callable[[int, Any], Callable[[], None]],
    *,
    max_restarts: int = 0,
    start_method: str | None = None,
    gather: "Gather | None" = None,
) -> Any:
    """Call `function` in one process for each of `ranks`, and return what the first of them returned.

    `enter(attempt, rank)` is what a worker calls before it unpickles `function`. `gather` makes another kind of crew
    than one that ends when a worker fails. Raises what the first failing worker
    raised, with that worker's frames in the traceback, WorkerError where it left nothing to raise, SystemExit(75) where
    the workers asked to be resumed, and KeyboardInterrupt. No worker lives on when this ends, however it does.
    """
    method = start_method or _start_method()
    if method == "forkserver":
        warm_up()
    folder = Path(tempfile.mkdtemp(prefix="legato-"))  # mode 0700
    try:
        _write_payload(folder / "function", function, method)
        with Relay() as relay:
            attempt = 0
            while True:
                crew = (gather or Crew)(folder, ranks, world_size, relay)
                crew.restarts_left = max_restarts - attempt
                try:
                    crew.start(multiprocessing.get_context(method), functools.partial(enter, attempt))
                    crew.watch()
                finally:
                    crew.end()
                failure = crew.find_failure()
                if failure is None:
                    return crew.value()
                final = isinstance(failure, (SystemExit, KeyboardInterrupt, ConfigError, TaskError))
                if crew.restarts_left <= 0 or final or relay.received:
                    raise failure
                attempt = max_restarts - crew.restarts_left + 1
                logger.warning("%s Starting again: restart %d of %d.", crew.told, attempt, max_restarts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_payload(path: Path, function: Callable[[], Any], method: str) -> None:
    with travelling_by_value() as modules, path.open("wb") as file:
        file.write(pack((modules, Settings(method))))
        try:
            file.write(pack(function))
        except (TypeError, AttributeError, pickle.PicklingError, RecursionError) as error:
            raise ConfigError(
                f"The task cannot be sent to worker processes: {type(error).__name__}: {error}. Make open files, "
                "locks, connections and generators inside the workers, in setup() or when first used, instead of "
                "keeping them on the task, the data or a callback; or start the script with torchrun."
            ) from error


class Relay:
    """Passes SIGINT, SIGTERM and SIGUSR1 on to the workers while they run; nothing happens to the caller itself."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.interrupted_at: float | None = None
        self.processes: list[BaseProcess] = []
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Relay":
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) is not signal.SIG_IGN:  # a background job ignores SIGINT: so do we
                    self._handlers[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def add(self, process: BaseProcess) -> None:
        """Take in a process that has just started, and tell it what came before."""
        self.processes.append(process)
        for number in self.received:
            _send(process, number)

    def _forward(self, number: int, _: FrameType | None) -> None:
        if number in self.received:
            return  # a second Ctrl-C must not hit a worker that is writing its checkpoint
        self.received.append(signal.Signals(number))
        if number == signal.SIGINT:
            self.interrupted_at = time.monotonic()
        for process in self.processes:
            _send(process, number)


def _send(process: BaseProcess, number: int) -> None:
    with suppress(ProcessLookupError):
        if process.pid is not None and process.exitcode is None:
            os.kill(process.pid, number)


class Crew:
    """The workers of one attempt."""

    def __init__(self, folder: Path, ranks: range, world_size: int, relay: Relay) -> None:
        self.told = ""
        self.restarts_left = 0
        self._folder = folder
        self._ranks = ranks
        self._world_size = world_size
        self._relay = relay
        self._context: Any = None
        self._processes: list[BaseProcess] = []
        self._pending: dict[Any, tuple[int, BaseProcess]] = {}
        """Those that have not ended yet, by their sentinels."""
        self._failures: list[Failure] = []
        self._preempted_at: float | None = None
        self._stopped_at: float | None = None

    def start(self, context: Any, enter: Callable[..., Callable[[], None]]) -> None:
        """Start one process for each rank, which begins with what `enter(rank)` returns."""
        self._context, self._relay.processes = context, []
        for rank in self._ranks:
            self._start_one(rank, rank == self._ranks[0], enter(rank))

    def _start_one(self, rank: int, answers: bool, enter: Callable[[], None]) -> None:
        _report(self._folder, rank).unlink(missing_ok=True)
        arguments = (rank, answers, self._folder, _Streams(), enter)
        process = self._context.Process(target=_serve, args=arguments, name=f"legato-{rank}")
        with _main_hidden():
            process.start()
        self._processes.append(process)
        self._pending[process.sentinel] = rank, process
        self._relay.add(process)

    def watch(self) -> None:
        """Wait until all have ended; when one fails, or Ctrl-C was long ago, end the others."""
        killed = False
        while self._goes_on():
            ready = connection.wait(list(self._pending), timeout=self._pause())
            for sentinel in ready:
                self._note_end(*self._pending.pop(sentinel))
            self._look_around()
            now, interrupted_at = time.monotonic(), self._relay.interrupted_at
            late = interrupted_at is not None and now > interrupted_at + _PATIENCE
            if self._stopped_at is None and (late or self._must_stop(now)):
                self._stopped_at = now
                self._signal(signal.SIGTERM)
            elif self._stopped_at is not None and not killed and now > self._stopped_at + _GRACE:
                killed = True
                self._signal(signal.SIGKILL)

    def _goes_on(self) -> bool:
        return bool(self._pending)

    def _pause(self) -> float:
        return 0.1 if self._failures else 1.0

    def _look_around(self) -> None:
        """Do what else is to be done about once in a pause."""

    def value(self) -> Any:
        """Return what the first worker returned."""
        return unpack(self._folder / f"value-{self._ranks[0]}")

    def end(self) -> None:
        """See that no process lives on, nor any that a failed one has started."""
        orderly = not self._failures and all(process.exitcode is not None for process in self._processes)
        for process in self._processes:
            if not orderly and process.pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                _send(process, signal.SIGKILL)
            process.join()

    def find_failure(self) -> BaseException | None:
        """Return what to raise for this attempt, or None where every worker has done its work."""
        # What a rank says after it was told to stop is a consequence.
        stopped_at = self._stopped_at or float("inf")
        first = min(self._failures, key=lambda one: (one.when > stopped_at, one.communication, one.when), default=None)
        if first is None:
            return SystemExit(RESUME_ME) if self._preempted_at is not None else None
        self.told = first.summary
        consequence = first.communication or first.killed_by in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
        if first.interrupted or (self._relay.interrupted_at is not None and consequence):
            return KeyboardInterrupt()
        if self._preempted_at is not None and first.communication:
            return SystemExit(RESUME_ME)
        if first.killed_by in (signal.SIGTERM, getattr(signal, "SIGUSR1", None)):
            logger.warning("%s Nothing is lost but what came after the newest checkpoint.", first.summary)
            return SystemExit(RESUME_ME)
        return first.to_raise()

    def _must_stop(self, now: float) -> bool:
        if self._preempted_at is not None and now > self._preempted_at + _FAREWELL:
            return True
        if not self._failures:
            return False
        if any(not (failure.communication or failure.interrupted) for failure in self._failures):
            return True
        first = self._failures[0]
        return now > first.when + (_FAREWELL if first.interrupted else _SETTLE)

    def _read_end(self, rank: int, process: BaseProcess) -> Any:
        """Return how a worker ended: 0, RESUME_ME or a Failure."""
        process.join()
        report = _report(self._folder, rank)
        return unpack(report) if report.exists() else Failure.of_exit(process.exitcode)

    def _note_end(self, rank: int, process: BaseProcess) -> None:
        end = self._read_end(rank, process)
        if end == RESUME_ME:
            self._preempted_at = self._preempted_at or time.monotonic()
        elif isinstance(end, Failure):
            if self._stopped_at is not None and end.killed_by in (signal.SIGTERM, signal.SIGKILL):
                return  # that was us
            end.rank, end.world_size = rank, self._world_size
            self._failures.append(end)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            _send(process, number)


Gather = Callable[[Path, range, int, Relay], Crew]
"""Makes the crew of one attempt."""


class _Streams:
    """The caller's standard output and error, which need not be those with which the fork server was started."""

    def __getstate__(self) -> dict[str, Any]:
        return {str(number): reduction.DupFd(number) for number in (1, 2) if os.name == "posix" and _is_open(number)}

    def adopt(self) -> None:
        """Make them this process's own."""
        for number, copy in self.__dict__.items():
            descriptor = copy.detach()
            if descriptor != int(number):  # a spawned process inherits them as they are
                os.dup2(descriptor, int(number))
                os.close(descriptor)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep multiprocessing from telling a new process to run the caller's script again.

    What of `__main__` the worker needs travels by value.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _serve(rank: int, answers: bool, folder: Path, streams: _Streams, enter: Callable[[], None]) -> None:
    """Do a worker's work: take its place, call the function, leave a report in `folder`."""
    # A group of its own: a terminal's Ctrl-C reaches the caller alone, who passes it on once (a loader's workers would
    # die of it, in the middle of the step that is to be saved), and what this process starts can be ended with it.
    if os.name == "posix":
        os.setpgid(0, 0)
    threading.Thread(target=_die_with_caller, args=(folder,), daemon=True).start()
    report_to(_report(folder, rank))
    try:
        end = _work(rank, answers, folder, streams, enter)
    except RuntimeError as error:  # torch says by a signal, at any moment, that a loader's worker died
        end = take_down(error, frozenset())
    write_whole(_report(folder, rank), pack(end))
    if end != 0:
        # Not by way of threading's and multiprocessing's exits: they wait for threads that may never end.
        for child in multiprocessing.active_children():
            child.kill()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(RESUME_ME if end == RESUME_ME else 1)


def _work(rank: int, answers: bool, folder: Path, streams: _Streams, enter: Callable[[], None]) -> Any:
    """Call the function and leave its value; return how that ended: 0, RESUME_ME or a Failure."""
    named: frozenset[str] = frozenset()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        streams.adopt()
        faulthandler.enable()
        enter()
        named, function = _read_payload(folder / "function")
        value = function()
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)  # the work is done; only the report is missing
        if answers:
            write_whole(folder / f"value-{rank}", pack(value, named))
        return 0
    except SystemExit as error:
        return RESUME_ME if error.code == RESUME_ME else Failure.of_exception(error, named)
    except BaseException as error:
        return take_down(error, named)


def _read_payload(path: Path) -> tuple[frozenset[str], Callable[[], Any]]:
    try:
        with path.open("rb") as file:
            named, settings = pickle.load(file)
            settings.apply()
            function = pickle.load(file)
    except ImportError as error:
        raise ConfigError(
            f"A worker process cannot import {error.name or 'a module'!r}, which the task needs ({error}). Install it, "
            "or put its folder on PYTHONPATH, so that a fresh Python finds it."
        ) from error
    place_classes(named)
    return named, function


def _report(folder: Path, rank: int) -> Path:
    return folder / f"end-{rank}"


def _die_with_caller(folder: Path) -> None:
    """Wait until the process that called `run` is gone, however it went, and then end this one and its children."""
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    shutil.rmtree(folder, ignore_errors=True)
    if os.name == "posix" and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
