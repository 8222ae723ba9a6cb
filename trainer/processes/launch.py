"""Starts, monitors and stops local worker processes together, and raises the first failure in the caller.

The caller serializes the function with cloudpickle and sends it through a file in a private folder. A worker returns
the result or exception in the same way. As a result, lambdas, notebooks and classes in the caller's script work, and
the script runs only once. `set_worker_environment` sets a worker's environment variables, including its rank.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver, reduction
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from ...base.environment import all_variables, get_variable, read_int, replace_variables
from ...base.errors import ConfigError, CorruptionError, TaskError, WorkerError, describe_import
from ...base.place import Place, variables_of
from . import signals
from .failures import alive_file, leave, set_report_file, write_atomically
from .rendezvous import host_store
from .signals import END_SIGNALS, handling_end_signals, raise_for_signal
from .signals import RESUME_ME as RESUME_ME
from .stacks import DUMP
from .transport import Failure, Settings, pack, pickled_by_value, unpack

log = logging.getLogger("legato")
T = TypeVar("T")

# Modules that every worker needs; the fork server imports them once. Legato's modules come last; if they were not
# listed, each worker would need 0.2 s to import them, and there may be many workers per core.
PRELOAD = ["torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", __name__]
PRELOAD += ["legato.trainer.trainer", "legato.trainer.strategies.ddp"]
PRELOAD.insert(0, f"{__package__}.fork_server")  # before the slow imports, because it blocks signals in the server
_CAUSE_WAIT = 2.0  # seconds for the rank that caused a broken connection to report the cause
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL: a process waiting in a collective does not handle SIGTERM
_ALIVE_TIMEOUT = 3.0  # seconds without a touch of its alive file after which a worker that should exit is killed
_DUMPING = 0.5  # seconds for that worker to write its stacks first
_INTERRUPT_GRACE = 60.0  # seconds for workers after Ctrl-C: they may be writing a checkpoint
_RESUME_GRACE = 15.0  # seconds for workers after one has saved and exited to be resumed
# on other systems a process that has loaded torch (Metal, Accelerate) must not fork, and neither must a server
START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"


def warm_up(more: Sequence[str] = ()) -> None:
    """Start the fork server and return immediately. The server then imports torch and the modules in `more`."""
    if START_METHOD == "forkserver":
        forkserver.set_forkserver_preload([*PRELOAD, *more])
        with _without_main():
            forkserver.ensure_running()


def warm_up_for(strategy: str, arguments: Mapping[str, Any]) -> None:
    """Start the fork server for a run with the given strategy and Trainer arguments.

    The server also imports torch's compiler if every worker would, because importing it takes as long as importing
    torch.
    """
    compiles = any(arguments[name] for name in ("compile", "deterministic", "activation_checkpointing"))
    is_eager = strategy in ("auto", "ddp") and arguments["reproducible"] != "bitwise" and not compiles
    warm_up([] if is_eager else ["torch._dynamo"])


def launch_workers(
    function: Callable[[], Any],
    ranks: range,
    world_size: int,
    enter: Callable[[int, Any], Callable[[], None]],
    *,
    max_restarts: int = 0,
    make_group: "Callable[[Path, range, int, SignalRelay], WorkerGroup] | None" = None,
) -> Any:
    """Call `function` in a process for each of `ranks`, and return the first rank's result.

    A worker calls the result of `enter(attempt, rank)` before it unpickles `function`. `make_group` creates a group
    that survives a worker's failure. A worker that does not respond to SIGTERM or SIGHUP within `signals.GRACE`
    seconds terminates itself or is killed. A second Ctrl-C terminates all workers immediately. This function
    returns only after all workers have exited.

    Raises the exception of the first worker to fail. Its cause is a WorkerError with the worker's traceback. If the
    exception cannot be unpickled, raises only the WorkerError. Raises SystemExit(75) if the workers asked to be
    resumed, and KeyboardInterrupt after Ctrl-C.
    """
    warm_up()
    folder = Path(tempfile.mkdtemp(prefix="legato-"))  # mode 0700
    try:
        _write_payload(folder / "function", function)
        relay, attempt = SignalRelay(), 0
        with handling_end_signals(relay.forward):
            while True:
                group = (make_group or WorkerGroup)(folder, ranks, world_size, relay)
                group.restarts_left = max_restarts - attempt
                try:
                    group.start(functools.partial(enter, attempt))
                    group.watch()
                finally:
                    group.end()
                failure = group.find_failure()
                if failure is None:
                    return group.value()
                # a mistake in the config or task would fail again, and training must not continue on faulty hardware
                is_final = isinstance(failure, (SystemExit, KeyboardInterrupt, ConfigError, TaskError, CorruptionError))
                if group.restarts_left <= 0 or is_final or relay.received:
                    raise failure
                attempt = max_restarts - group.restarts_left + 1
                log.warning("%s Restarting workers: restart %d of %d.", group.failure_summary, attempt, max_restarts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_payload(path: Path, function: Callable[[], Any]) -> None:
    with pickled_by_value() as modules, path.open("wb") as file:
        file.write(pack((modules, Settings(START_METHOD))))
        try:
            file.write(pack(function, placed=modules))
        except (TypeError, AttributeError, pickle.PicklingError, RecursionError) as error:
            raise ConfigError(
                f"The task cannot be sent to worker processes: {type(error).__name__}: {error}. Do not store open "
                "files, locks, connections or generators on the task, the data or a callback. Create them in the "
                "workers, in setup() or on first use, or start the script with torchrun."
            ) from error
        except OSError as error:
            raise ConfigError(
                f"The task and its data cannot be written to {path.parent}, where worker processes read them: "
                f"{error.strerror or error}. Set TMPDIR to a folder with enough space."
            ) from error


@dataclass(eq=False)
class Worker:
    """A worker process and the file where it reports how it exited."""

    rank: int
    process: Any
    report: Path
    has_ended: bool = False
    unanswered: int = 0
    """Signal that the worker failed to respond to before it was killed; 0 if there is none."""

    def send(self, number: int) -> None:
        """Send a signal, unless the process has exited."""
        with suppress(ProcessLookupError):
            if self.process.exitcode is None:
                os.kill(self.process.pid, number)

    def kill_group(self) -> None:
        """Kill the process and its child processes, such as loader workers, which would otherwise continue to run."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.send(signal.SIGKILL)

    def is_responsive(self) -> bool:
        """Return whether the process has touched its alive file within _ALIVE_TIMEOUT seconds."""
        try:
            return time.time() < alive_file(self.report).stat().st_mtime + _ALIVE_TIMEOUT
        except FileNotFoundError:
            return False

    def read_end(self) -> "int | Failure":
        """Return how the process exited: 0, RESUME_ME or a Failure."""
        self.process.join()
        if self.report.exists():
            end: int | Failure = unpack(self.report)
            return end
        if self.unanswered:
            name = signal.Signals(self.unanswered).name
            event = f"did not respond to {name}, was holding Python's global lock, and was killed; its stack is above"
            return Failure(event, signal=self.unanswered, is_forced=True)
        if self.process.exitcode == 255:
            # multiprocessing reports 255 if the fork server, which waits for the worker, has died first
            with suppress(OSError):
                os.kill(self.process.pid, 0)
                return Failure("lost its fork server, which another process killed: rerun the command")
        return Failure.of_exit(self.process.exitcode)


class SignalRelay:
    """Forwards termination signals to the workers instead of interrupting the caller."""

    def __init__(self) -> None:
        self.due_at, self.due_by = float("inf"), 0
        """Time by which every worker must have ended or touched its alive file, and the signal that set this time."""
        self.received: list[int] = []
        self.interrupted_at = float("inf")
        self.workers: list[Worker] = []

    def forward(self, number: int) -> None:
        """Send a signal to all workers. Signals other than Ctrl-C are sent only once."""
        now, is_first = time.monotonic(), number not in self.received
        if is_first:
            self.received.append(number)
        elif number != signal.SIGINT:
            return
        due_at = float("inf")
        if number == signal.SIGINT:
            self.interrupted_at = min(self.interrupted_at, now)
            # workers finish a checkpoint before a second Ctrl-C terminates them, and detect a press that arrives twice
            due_at = due_at if is_first else now
        elif number != signal.SIGUSR1:
            due_at = now + signals.GRACE
        if due_at < self.due_at:
            self.due_at, self.due_by = due_at, number
        for worker in self.workers:
            worker.send(number)


class WorkerGroup:
    """The worker processes in one attempt to run the function."""

    def __init__(self, folder: Path, ranks: range, world_size: int, relay: SignalRelay) -> None:
        self.failure_summary = ""
        self.restarts_left = 0
        self.workers: list[Worker] = []
        self._folder = folder
        self._ranks = ranks
        self._world_size = world_size
        self._relay = relay
        relay.workers = self.workers
        self._failures: list[Failure] = []
        self._preempted_at: float | None = None
        self._stopped_at: float | None = None

    @property
    def running(self) -> list[Worker]:
        """Workers whose exit has not been recorded yet."""
        return [worker for worker in self.workers if not worker.has_ended]

    def start(self, enter: Callable[..., Callable[[], None]]) -> None:
        """Start a process for each rank. Each process first calls the function returned by `enter(rank)`."""
        for rank in self._ranks:
            self._start_one(rank, enter(rank))

    def _start_one(self, rank: int, enter: Callable[[], None]) -> None:
        report = self._folder / f"end-{rank}"
        report.unlink(missing_ok=True)
        context: Any = multiprocessing.get_context(START_METHOD)
        process = context.Process(target=_serve, args=(report, _Streams(), enter), name=f"legato-{rank}")
        try:
            with _without_main():
                process.start()
        except (EOFError, OSError) as error:
            if self._relay.received:
                raise_for_signal(max(self._relay.received))
            raise WorkerError(
                f"Rank {rank} of {self._world_size} could not be started: the fork server has exited "
                f"({type(error).__name__}: {error}). If another process killed it, rerun the command."
            ) from error
        worker = Worker(rank, process, report)
        self.workers.append(worker)
        for number in self._relay.received:  # signals received before the worker started
            worker.send(number)

    def watch(self) -> None:
        """Wait until all workers have exited. Terminate the remaining workers if one fails, or a while after Ctrl-C."""
        is_killed = False
        while self._is_running():
            # returns as soon as a process exits
            ended = connection.wait([worker.process.sentinel for worker in self.running], timeout=self._pause())
            for worker in self.running:
                if worker.process.sentinel in ended:
                    worker.has_ended = True
                    self._record_end(worker, worker.read_end())
            self._poll()
            self._kill_unresponsive()
            now = time.monotonic()
            if self._stopped_at is None and now > self._due_at():
                self._stopped_at = now
                self._send(signal.SIGTERM)
            elif self._stopped_at is not None and not is_killed and now > self._stopped_at + _GRACE:
                is_killed = True
                self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for worker in self.running:
            worker.send(number)

    def _is_running(self) -> bool:
        return bool(self.running)

    def _pause(self) -> float:
        return 0.1 if self._failures else 1.0

    def _poll(self) -> None:
        """Hook that `watch` calls at each pause, for subclasses to override."""

    def _due_at(self) -> float:
        """Return the time when workers that are still running must be stopped."""
        due_at = self._relay.interrupted_at + _INTERRUPT_GRACE
        if self._preempted_at is not None:
            due_at = min(due_at, self._preempted_at + _RESUME_GRACE)
        if not self._failures:
            return due_at
        if any(not (failure.communication or failure.interrupted) for failure in self._failures):
            return 0.0
        # a rank that lost a connection does not know the cause, so the failed rank gets _CAUSE_WAIT seconds to report
        first = self._failures[0]
        return min(due_at, first.when + (_RESUME_GRACE if first.interrupted else _CAUSE_WAIT))

    def _kill_unresponsive(self) -> None:
        """Dump the stacks of workers that neither exit after a signal nor touch their alive files, then kill them."""
        if time.monotonic() < self._relay.due_at + _ALIVE_TIMEOUT:
            return
        unresponsive = [worker for worker in self.running if not worker.is_responsive()]
        for number in (DUMP, signal.SIGKILL) if unresponsive else ():
            for worker in unresponsive:
                worker.unanswered = self._relay.due_by
                worker.send(number)
            time.sleep(_DUMPING)

    def _record_end(self, worker: Worker, end: "int | Failure") -> None:
        if isinstance(end, Failure):
            # if no signal came from outside, this process sent the signal that the worker did not respond to
            is_stopped = end.signal in (signal.SIGTERM, signal.SIGKILL) and not (end.is_forced and self._relay.received)
            if self._stopped_at is None or not is_stopped:
                end.rank, end.world_size = worker.rank, self._world_size
                self._failures.append(end)
        elif end == RESUME_ME:
            self._preempted_at = self._preempted_at or time.monotonic()

    def value(self) -> Any:
        """Return the first worker's result."""
        return unpack(self.workers[0].report, 1)

    def end(self) -> None:
        """Kill workers that are still running, and children of failed workers."""
        all_done = not self._failures and all(worker.process.exitcode is not None for worker in self.workers)
        for worker in self.workers:
            if not all_done:
                worker.kill_group()
            worker.process.join()

    def find_failure(self) -> BaseException | None:
        """Return the exception to raise for this attempt, or None if every worker succeeded."""
        # a failure after the request to stop is a consequence
        stopped_at = self._stopped_at or float("inf")
        # Other errors come before broken connections: the rank that failed is often not the first to report, because
        # the others notice within 0.01 s that it is gone.
        if not self._failures:
            return SystemExit(RESUME_ME) if self._preempted_at is not None else None
        first = min(
            self._failures, key=lambda failure: (failure.when > stopped_at, failure.communication, failure.when)
        )
        self.failure_summary = first.summary
        # a rank that is waiting for a rank that the signal has ended cannot respond to the signal
        has_ended_others = self._preempted_at is not None or (first.signal in END_SIGNALS and not first.is_forced)
        for forced in self._failures:
            if forced.is_forced and (forced.signal == signal.SIGINT or not has_ended_others):
                log.warning("%s", forced.summary)
                return KeyboardInterrupt() if forced.signal == signal.SIGINT else SystemExit(128 + forced.signal)
        is_consequence = first.communication or first.signal in (signal.SIGTERM, signal.SIGKILL)
        if first.signal == signal.SIGINT or (signal.SIGINT in self._relay.received and is_consequence):
            return KeyboardInterrupt()
        if self._preempted_at is not None and (first.communication or first.is_forced):
            return SystemExit(RESUME_ME)
        if first.signal in END_SIGNALS:
            log.warning("%s Only the steps after the newest checkpoint are lost.", first.summary)
            return SystemExit(RESUME_ME)
        return first.to_raise()


class _Streams:
    """The caller's standard output and error, which may differ from those of the fork server."""

    def __getstate__(self) -> dict[str, Any]:
        copies = {}
        for number in (1, 2):
            with suppress(OSError):  # the stream is closed
                os.fstat(number)
                copies[str(number)] = reduction.DupFd(number)
        return copies

    def adopt(self) -> None:
        """Use the given streams in this process."""
        for number, copy in self.__dict__.items():
            descriptor = copy.detach()
            if descriptor != int(number):  # a spawned process inherits the same numbers
                os.dup2(descriptor, int(number))
                os.close(descriptor)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from rerunning the caller's script in a new process.

    Objects from `__main__` that the worker needs are pickled by value.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _serve(report: Path, streams: _Streams, enter: Callable[[], None]) -> None:
    """Run a worker: set up the process, call the function and write the report."""
    # With a process group of its own, the worker gets Ctrl-C only from the caller, once (the terminal would also kill
    # loader workers in the middle of the step to be saved), and its children can be killed with it.
    os.setpgid(0, 0)
    threading.Thread(target=_exit_with_caller, args=(report.parent,), daemon=True).start()
    set_report_file(report)
    try:
        end = _work(report, streams, enter)
    except RuntimeError as error:  # torch raises from a signal handler, at any moment, when a loader worker dies
        end = Failure.of_exception(error)
    if end != 0:
        with suppress(OSError, ValueError):
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
        # skips the exit handlers of threading and multiprocessing, which join threads that may never exit
        leave(RESUME_ME if end == RESUME_ME else 1, end)


def _work(report: Path, streams: _Streams, enter: Callable[[], None]) -> "int | Failure":
    """Call the function and report its result. Return 0, RESUME_ME or a Failure."""
    named: frozenset[str] = frozenset()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        streams.adopt()
        if sys.stderr is not None:
            faulthandler.enable()
        faulthandler.register(DUMP, file=2, all_threads=True)
        enter()
        named, function = _read_payload(report.with_name("function"))
        value = function()
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the work is done, and only the report is left
        _answer(report, pack(value, named))
        return 0
    except SystemExit as error:
        return RESUME_ME if error.code == RESUME_ME else Failure.of_exception(error, named)
    except BaseException as error:
        return Failure.of_exception(error, named)


def _answer(report: Path, value: bytes) -> None:
    try:
        write_atomically(report, pack(0), value)
    except OSError as error:
        raise WorkerError(
            f"The work is done, but its result ({len(value):,} bytes) cannot be written to {report.parent}, where "
            f"the caller reads it: {error.strerror or error}. The run's checkpoints are complete. Set TMPDIR to "
            f"a folder with enough space."
        ) from error


def _read_payload(path: Path) -> tuple[frozenset[str], Callable[[], Any]]:
    try:
        with path.open("rb") as file:
            named, settings = pickle.load(file)
            settings.apply()
            function = pickle.load(file)
    except ImportError as error:
        text = describe_import(error)
        if not isinstance(error, ModuleNotFoundError) or "because of" in text:
            raise ConfigError(
                f"A worker process cannot import a module that the task needs: {text}. A package is broken or "
                f"incompatible with another package. To see where, run the same import in a new Python process."
            ) from error
        raise ConfigError(
            f"A worker process cannot import {error.name!r}, which the task needs ({error}). Install it, or add its "
            f"folder to PYTHONPATH, so that a new Python process can import it."
        ) from error
    return named, function


def _exit_with_caller(folder: Path) -> None:
    """Wait until the caller of `launch_workers` has exited, then terminate this process and its children."""
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpid(), signal.SIGKILL)


# --- workers of a run -------------------------------------------------------------------------------------------------
def run_workers(
    function: Callable[[], T],
    processes: int,
    *,
    threads: int | None = None,
    max_restarts: int = 0,
    nodes: int = 1,
) -> T:
    """Call `function` in `processes` new processes on this machine and return the first rank's result.

    Each process uses `threads` intra-op threads. The default is OMP_NUM_THREADS or, if it is not set, the process's
    share of the cores, but at most the caller's number of threads. After a failure, all processes are stopped and
    restarted, up to `max_restarts` times. If `nodes` > 1, every node must make the same call, with NODE_RANK,
    MASTER_ADDR and MASTER_PORT set.

    Raises the same errors as `launch_workers`.
    """
    if processes < 1:
        raise ConfigError(f"The number of processes must be at least 1, got {processes}.")
    if nodes > 1 and max_restarts:
        raise ConfigError("max_restarts supports only one node. With num_nodes > 1, use torchrun --max-restarts.")
    warm_up()
    node_rank, host, port = find_node(nodes)
    store: Any = None
    if node_rank == 0:
        # Not in rank 0, which may die: after a restart the workers meet at the same store. No worker is forked from
        # this process, because a child of a process that serves a TCPStore may hang (in 6 of 12 rounds in a test).
        store = host_store(host, port, nodes == 1)
        port = store.port
    environment = all_variables()
    threads = threads or threads_of_worker(processes)
    ranks = range(node_rank * processes, (node_rank + 1) * processes)

    def enter(attempt: int, rank: int) -> Callable[[], None]:
        place = Place(rank, rank - ranks[0], node_rank, processes * nodes, processes, nodes, "legato")
        return functools.partial(set_worker_environment, place, environment, host, port, attempt, threads)

    result: T = launch_workers(function, ranks, processes * nodes, enter, max_restarts=max_restarts)
    return result


def find_node(nodes: int) -> tuple[int, str, int]:
    """Return the rank of this machine among `nodes`, and the host and port of their store (port 0 means any port).

    Raises ConfigError if the environment variables are missing.
    """
    if nodes == 1:
        return 0, "127.0.0.1", 0
    node_rank = read_int("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
    host, port = (get_variable("MASTER_ADDR") or ""), read_int("MASTER_PORT")
    if node_rank is None or not host or not port:
        raise ConfigError(
            f"With num_nodes={nodes}, each node needs NODE_RANK (0 to {nodes - 1}), MASTER_ADDR (the address of node 0)"
            " and MASTER_PORT (a free port on node 0) in its environment. You can also use torchrun or srun."
        )
    if node_rank >= nodes:
        raise ConfigError(f"NODE_RANK={node_rank} must be less than num_nodes={nodes}.")
    return node_rank, host, port


def threads_of_worker(processes: int) -> int:
    """Return the number of intra-op threads for each worker, which is at most the caller's number of threads."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(read_int("OMP_NUM_THREADS") or max(1, cores // processes), torch.get_num_threads())


def set_worker_environment(
    place: Place, environment: dict[str, str], host: str, port: int, attempt: int, threads: int
) -> None:
    """Set a worker's environment variables from the caller's and `place`, because the fork server's may be outdated."""
    import torch

    variables = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "LEGATO_WORKER": f"{os.getpid()}:{attempt}",
    }
    replace_variables(environment | variables_of(place) | variables)
    # OpenMP read its variable when the fork server imported torch
    torch.set_num_threads(threads)
