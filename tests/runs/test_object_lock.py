"""One run at a time writes to a folder of a store; the lock of a dead run is taken over, that of a living run never."""

import json
import threading
import time
import uuid
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from locks import holders_among

from legato.base.errors import CheckpointError, ConfigError
from legato.trainer.checkpoints import stores
from legato.trainer.runs import object_lock
from legato.trainer.runs.object_lock import ObjectLock, holder_in


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"LEASE": 0.9, "BEAT": 0.2, "SETTLE": 0.2, "POLL": 0.05, "END_WAIT": 0.2}.items():
        monkeypatch.setattr(object_lock, name, seconds)
    monkeypatch.setattr(stores, "FIRST_WAIT", 0.001)


@pytest.fixture
def folder() -> str:
    return f"memory://{uuid.uuid4().hex}/runs/version_0"


def write(folder: str, **record: Any) -> None:
    MemoryFileSystem().pipe_file(f"{folder}/.lock", json.dumps(record).encode())


FAR = {"host": "far", "pid": 7, "stage": "fit", "since": "today", "token": "theirs"}


def test_a_second_run_is_refused_until_the_first_ends(folder: str) -> None:
    first, second = ObjectLock(folder, "fit"), ObjectLock(folder, "fit")
    first.take()
    with pytest.raises(ConfigError, match=rf"{folder} is in use by process \d+ on .* \(fit, since"):
        second.take()
    first.check()
    first.release()
    assert not MemoryFileSystem().exists(f"{folder}/.lock")
    second.take()
    second.release()


@pytest.mark.slow
def test_a_run_on_another_machine_keeps_it_as_long_as_it_writes(folder: str) -> None:
    write(folder, **FAR, beat=0)
    over = threading.Event()

    def live() -> None:
        beat = 0
        while not over.wait(0.1):
            beat += 1
            write(folder, **FAR, beat=beat)

    thread = threading.Thread(target=live)
    thread.start()
    with pytest.raises(ConfigError, match=r"by process 7 on far \(fit, since today\)"):
        ObjectLock(folder, "fit").take()
    over.set()
    thread.join()
    lock, began = ObjectLock(folder, "fit"), time.monotonic()
    lock.take()  # it has died
    assert time.monotonic() - began > object_lock.LEASE
    beat = lock.holder()["beat"]
    time.sleep(0.6)
    assert lock.holder()["beat"] > beat
    lock.release()


def test_a_dead_process_of_this_machine_is_taken_over_at_once(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = ObjectLock(folder, "fit")
    lock.take()
    holder = lock.holder()
    lock.release()
    write(folder, **{**holder, "pid": 2**22 - 1})
    monkeypatch.setattr(object_lock, "LEASE", 60.0)
    lock.take()
    lock.release()


def test_who_has_lost_it_finds_out(folder: str) -> None:
    lock = ObjectLock(folder, "fit")
    lock.take()
    MemoryFileSystem().rm_file(f"{folder}/.lock")
    lock.check()  # somebody has tidied up
    assert lock.holder()["token"] == lock.token
    write(folder, **FAR)
    with pytest.raises(CheckpointError, match=r"has lost the lock on its folder: .* by process 7 on far"):
        lock.check()
    time.sleep(0.5)
    lock.release()
    assert holder_in(folder)["token"] == "theirs"


@pytest.mark.slow
@pytest.mark.parametrize("old", [None, "dead", "no json"])
def test_of_several_at_once_one_has_it(folder: str, old: str | None) -> None:
    if old == "dead":
        write(folder, **FAR)
    elif old is not None:
        MemoryFileSystem().pipe_file(f"{folder}/.lock", b"no json")
    had = holders_among([ObjectLock(folder, f"fit {number}") for number in range(6)])
    assert len(had) == 1
    had[0].check()
    had[0].release()


def test_a_failing_store_is_asked_a_few_times_and_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def fail(self: Any, path: str, *arguments: Any, **options: Any) -> None:
        calls.append(path)
        raise TimeoutError("Read timeout on endpoint")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", fail)
    with pytest.raises(ConfigError, match=rf"{folder} is not writable: .*Read timeout on endpoint"):
        ObjectLock(folder, "fit").take()
    assert len(calls) == stores.TRIES


def test_what_a_worker_has_of_it_only_checks(folder: str) -> None:
    import pickle

    lock = ObjectLock(folder, "fit")
    lock.take()
    theirs: ObjectLock = pickle.loads(pickle.dumps(lock))
    theirs.check()
    theirs.release()
    lock.check()
    lock.release()
