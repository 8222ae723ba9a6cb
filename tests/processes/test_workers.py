"""Legato's workers: start, results, failures, end and clean-up."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import distributed
from waiting import children, wait_until

from legato.base.environment import restart_count
from legato.base.errors import ConfigError, TaskError, WorkerError
from legato.base.place import Place, find_place
from legato.trainer.processes import launch, transport
from legato.trainer.processes.launch import run_workers
from legato.trainer.processes.rendezvous import join_process_group

TIMEOUT = timedelta(seconds=20)


@dataclass
class Answer:
    value: Any


class Refusal(Exception):
    """Does not unpickle: its constructor takes other arguments than it passes to its base class."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run in a clean environment; the test leaves no process, temporary file or shared memory behind."""
    for name in ("RANK", "WORLD_SIZE", "LEGATO_WORKER", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    launch.warm_up()  # before the environment is this test's: the server keeps that which it began with
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert wait_until(lambda: len(children()) >= 2)  # the server and multiprocessing's resource tracker stay
    before, shared = children(), set(os.listdir("/dev/shm"))
    yield
    assert wait_until(lambda: children() <= before), f"left running: {children() - before}"
    assert not list(folder.glob("legato-*"))
    assert wait_until(lambda: set(os.listdir("/dev/shm")) <= shared)  # tests beside this one have some, for a moment


def join() -> Place:
    place = find_place()
    assert place is not None
    join_process_group(place, "gloo", TIMEOUT)
    return place


def all_reduce() -> float:
    total = torch.ones(1)
    distributed.all_reduce(total)
    return total.item()


def printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


# --- work and results -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_meet_and_the_first_one_answers() -> None:
    factor = 3

    def work() -> Answer:
        place = join()
        weight = torch.nn.Linear(2, 2).weight
        return Answer((place, factor * all_reduce(), weight, os.getpid()))

    answer = run_workers(work, 2)
    assert type(answer) is Answer
    place, total, weight, process = answer.value
    assert place == Place(0, 0, 0, 2, 2, 1, "legato")
    assert total == 6.0
    assert weight.shape == (2, 2)
    assert process != os.getpid()
    assert find_place() is None


@pytest.mark.slow
def test_workers_see_the_caller_as_it_is_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEGATO_TEST_WORD", "now")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--flag"])
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    torch.set_default_dtype(torch.float64)

    def work() -> dict[str, Any]:
        print("a line of the worker")
        with pytest.raises(UserWarning), warnings.catch_warnings():
            warnings.warn("an error, as the caller's filters say", stacklevel=1)
        return {
            "word": os.environ["LEGATO_TEST_WORD"],
            "variables": {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")},
            "argv": sys.argv,
            "cwd": os.getcwd(),
            "path": sys.path[-1],
            "dtype": torch.get_default_dtype(),
            "threads": torch.get_num_threads(),
        }

    try:
        seen = run_workers(work, 1, threads=2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == {
        "word": "now",
        "variables": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "2"},
        "argv": ["train.py", "--flag"],
        "cwd": str(tmp_path),
        "path": str(tmp_path),
        "dtype": torch.float64,
        "threads": 2,
    }
    assert "a line of the worker" in capfd.readouterr().out


@pytest.mark.slow
def test_a_module_arrives_without_hooks_on_its_parameters() -> None:
    """Torch's reduction gives each an empty dict of hooks, so that every backward calls Python."""
    module = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    module[1].weight, module[0].bias.requires_grad = module[0].weight, False
    module[0].weight.mark = "kept"  # type: ignore[assignment]

    def look() -> tuple[Any, ...]:
        first, second = module[0], module[1]
        hooks = [parameter._backward_hooks for parameter in module.parameters()]
        return hooks, first.weight is second.weight, first.weight.mark, first.bias.requires_grad, first.weight.tolist()

    assert run_workers(look, 1) == ([None] * 3, True, "kept", False, module[0].weight.tolist())


@pytest.mark.slow
def test_the_spawn_method_works_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "START_METHOD", "spawn")

    def enter(attempt: int, rank: int) -> Callable[[], None]:
        return print

    assert launch.launch_workers(lambda: Answer(7), range(1), 1, enter) == Answer(7)


def test_a_task_that_cannot_travel_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be sent to worker processes: .*lock.*setup\(\)"):
        run_workers(lambda: lock, 1)


@pytest.mark.slow
def test_a_module_that_workers_do_not_find_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller finds it with a custom finder, so it is sent by name."""
    from importlib.machinery import PathFinder

    (tmp_path / "hidden_module.py").write_text("def work(): return 1")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            return PathFinder.find_spec(name, [str(tmp_path)]) if name == "hidden_module" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    import hidden_module  # type: ignore[import-not-found]

    monkeypatch.delitem(sys.modules, "hidden_module")
    sys.modules["hidden_module"] = hidden_module
    with pytest.raises(ConfigError, match=r"cannot import 'hidden_module'.*PYTHONPATH"):
        run_workers(hidden_module.work, 1)


def test_a_module_of_an_earlier_working_directory_is_sent_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interactive Python searches "", the working directory, in which new processes start, too."""
    (tmp_path / "nearby_module.py").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    import nearby_module  # type: ignore[import-not-found]

    try:
        with transport.pickled_by_value() as names:
            assert nearby_module.__name__ not in names
        monkeypatch.chdir(tmp_path / "elsewhere")
        with transport.pickled_by_value() as names:
            assert nearby_module.__name__ in names
    finally:
        del sys.modules["nearby_module"]


@pytest.mark.slow
def test_a_broken_import_shows_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers reports that torchvision does not fit torch."""
    script = """
import os
if os.environ.get("BROKEN"):
    try:
        raise RuntimeError("operator torchvision::nms does not exist")
    except RuntimeError as error:
        raise ModuleNotFoundError("Could not import module 'Model'. Are its requirements defined?") from error
def work(): return 1
"""
    (tmp_path / "broken_module.py").write_text(script)
    monkeypatch.syspath_prepend(tmp_path)
    import broken_module  # type: ignore[import-not-found]

    monkeypatch.setenv("BROKEN", "1")
    expected = r"cannot import a module that the task needs: .*, because of RuntimeError: operator torchvi"
    with pytest.raises(ConfigError, match=expected):
        run_workers(broken_module.work, 1)


# --- failures -------------------------------------------------------------------------------------------------------


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A disk that is full for files of more than `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_task_for_which_there_is_no_room_is_refused() -> None:
    large = bytes(100_000)
    with largest_file(50_000), pytest.raises(ConfigError, match=r"cannot be written to .*Set TMPDIR"):
        run_workers(lambda: large, 1)


def test_an_answer_for_which_there_is_no_room_is_said_to_be_missing() -> None:
    def answer() -> bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        return bytes(100_000)

    with pytest.raises(WorkerError, match=r"its result \(100,.* bytes\) cannot be written .*Set TMPDIR"):
        run_workers(answer, 1)


@pytest.mark.slow
def test_an_error_whose_report_cannot_be_written_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        for folder in Path(os.environ["TMPDIR"]).glob("legato-*"):  # as what cleans up old files may do
            shutil.rmtree(folder)
        raise ValueError("what went wrong")

    with pytest.raises(WorkerError, match="Rank 0 of 1 ended with exit code 1"):
        run_workers(work, 1)
    assert "ValueError: what went wrong" in capfd.readouterr().err


class Composed(Exception):
    """Formats its argument into a message."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} requires a closure.")


@pytest.mark.slow
def test_a_message_that_a_constructor_composes_is_composed_once() -> None:
    def work() -> None:
        raise Composed("SAM")

    with pytest.raises(Composed, match=r"^SAM requires a closure\.$"):
        run_workers(work, 1)


@pytest.mark.slow
def test_the_rank_that_failed_is_shown_last_with_its_own_traceback() -> None:
    def work() -> None:
        if join().rank == 1:
            try:
                {}["a key"]
            except KeyError as error:
                raise ValueError("what rank 1 says") from error
        all_reduce()

    started = time.monotonic()
    with pytest.raises(ValueError, match="what rank 1 says") as caught:
        run_workers(work, 2)
    assert time.monotonic() - started < 40
    text = printed(caught.value)
    assert text.rstrip().splitlines()[-1] == "ValueError: what rank 1 says"
    origin = caught.value.__cause__
    assert isinstance(origin, WorkerError)
    assert origin.rank == 1
    assert str(origin).startswith("Rank 1 of 2 failed with ValueError.\n\nTraceback (most recent call last):")
    assert "in work\n" in str(origin)
    assert 'raise ValueError("what rank 1 says") from error' in str(origin)
    assert "KeyError: 'a key'" in str(origin)
    assert "onnection closed" not in text


@pytest.mark.slow
def test_a_connection_that_broke_first_is_not_shown_as_the_cause() -> None:
    """The rank that failed may report later than those that noticed."""

    def work() -> None:
        if os.environ["RANK"] == "0":
            raise ConnectionResetError("rank 1 is gone")
        time.sleep(0.5)
        raise ValueError("what rank 1 says")

    with pytest.raises(ValueError, match="what rank 1 says"):
        run_workers(work, 2)


@pytest.mark.slow
def test_an_error_that_does_not_unpickle_comes_as_text() -> None:
    def work() -> None:
        raise Refusal(3, "no")

    with pytest.raises(WorkerError, match=r"(?s)Rank 0 of 1 failed with Refusal.*in work.*Refusal: no \(3\)$"):
        run_workers(work, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "Rank 1 of 2 was killed by SIGKILL"),
        (lambda: sys.exit(0), r"(?s)Rank 1 of 2 called sys.exit\(0\) before its work was done.*SystemExit: 0$"),
        (lambda: os._exit(0), "Rank 1 of 2 ended with exit code 0 before its work was done"),
    ],
)
def test_a_rank_that_goes_without_an_error(end: Callable[[], None], message: str) -> None:
    def work() -> None:
        if join().rank == 1:
            all_reduce()
            end()
        all_reduce()
        all_reduce()

    with pytest.raises(WorkerError, match=message) as caught:
        run_workers(work, 2)
    assert caught.value.rank == 1


@pytest.mark.slow
def test_survivors_that_do_not_listen_are_killed() -> None:
    """And so are the processes that the failed rank has started."""

    def work() -> None:
        if join().rank == 1:
            subprocess.Popen(["sleep", "60"])
            raise TaskError("rank 1 is done for")
        signal.signal(signal.SIGTERM, lambda *_: None)
        while True:
            time.sleep(1)

    started = time.monotonic()
    with pytest.raises(TaskError, match="rank 1 is done for"):
        run_workers(work, 2)
    assert time.monotonic() - started < 40


@pytest.mark.slow
def test_twenty_of_twenty_restarts_work() -> None:
    def work() -> tuple[int, float]:
        place = join()
        total = all_reduce()
        if restart_count() < 20 and place.rank == restart_count() % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return restart_count(), total + all_reduce()

    assert run_workers(work, 2, max_restarts=20) == (20, 4.0)


@pytest.mark.slow
def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    def work() -> None:
        with (tmp_path / "tries").open("a") as file:
            file.write("x")
        raise ConfigError("wrong for good")

    with pytest.raises(ConfigError, match="wrong for good"):
        run_workers(work, 1, max_restarts=3)
    assert (tmp_path / "tries").read_text() == "x"


# --- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_every_worker_and_75_comes_back(number: signal.Signals, tmp_path: Path) -> None:
    caller = os.getpid()

    def work() -> None:
        received: list[int] = []
        signal.signal(number, lambda number, _: received.append(number))
        place = join()
        all_reduce()
        if place.rank == 0:
            os.kill(caller, number)
        while not received:
            time.sleep(0.01)
        (tmp_path / f"told-{place.rank}").write_text(str(received))
        sys.exit(75)

    handler = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught:
        run_workers(work, 2)
    assert caught.value.code == 75
    assert sorted(path.name for path in tmp_path.glob("told-*")) == ["told-0", "told-1"]
    assert signal.getsignal(number) == handler


@pytest.mark.slow
def test_a_worker_stopped_before_it_listens_asks_to_be_resumed() -> None:
    def work() -> None:
        if join().rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        all_reduce()

    with pytest.raises(SystemExit) as caught:
        run_workers(work, 2)
    assert caught.value.code == 75


# --- addresses --------------------------------------------------------------------------------------------------------


def test_nodes_need_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"NODE_RANK.*MASTER_ADDR.*MASTER_PORT"):
        run_workers(lambda: None, 1, nodes=2)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        run_workers(lambda: None, 0)


@pytest.mark.slow
def test_nothing_listens_beyond_loopback() -> None:
    caller = os.getpid()

    def work() -> list[str]:
        join()
        all_reduce()
        hosts = []
        for process in [psutil.Process(caller), *psutil.Process(caller).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):  # an earlier test's
                hosts += [
                    connection.laddr.ip for connection in process.net_connections() if connection.status == "LISTEN"
                ]
        all_reduce()
        return hosts

    addresses = run_workers(work, 2)
    assert len(addresses) >= 3  # the caller's store, and each rank's gloo
    assert set(addresses) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
