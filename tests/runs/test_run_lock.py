"""One run at a time writes to a run directory; a dead run does not block it, however it died."""

import itertools
import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from fsspec.implementations.memory import MemoryFileSystem
from locks import holders_among
from tiny import Tiny, make_loader, make_trainer
from waiting import leave, runs, wait_until

import legato as lg
from legato.base.errors import CheckpointError, ConfigError
from legato.base.location import checkpoints_of, location_of
from legato.callbacks import Checkpoint
from legato.trainer.checkpoints import commit, find
from legato.trainer.checkpoints.hashed import write_bytes
from legato.trainer.checkpoints.storage import folder_at
from legato.trainer.runs import lock as run_lock
from legato.trainer.runs.lock import HOLDER, LOCK, RunLock, belongs_to_training, is_held

STARTING = 60.0
"""Seconds that a process may take to start on a busy machine."""


class Inputs(Tiny):
    """Data for predict."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Standing(lg.Callback):
    """Pauses after a step until a file appears; a child that it has forked outlives it."""

    def __init__(self, folder: Path, step: int, forks: bool) -> None:
        self.folder, self.step, self.forks = folder, step, forks

    def on_train_batch_start(self, trainer: lg.Trainer, task: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            if self.forks and trainer.is_global_zero and (child := os.fork()):
                leave(self.folder / "child", str(child))
            elif self.forks and trainer.is_global_zero:
                time.sleep(600)
                os._exit(0)
            leave(self.folder / f"stands-{trainer.global_rank}", str(os.getpid()))
            while not (self.folder / "go").exists():
                time.sleep(0.01)


def train(folder: Path, step: int = -1, devices: int = 1, forks: bool = False, **options: Any) -> lg.Trainer:
    """Train 5 steps with a log and save each; resume an existing run."""
    callbacks = [Checkpoint(every_n_train_steps=1, dirpath=options.pop("dirpath", None))]
    chosen: dict[str, Any] = {"logger": True, "log_every_n_steps": 1, "enable_checkpointing": True, **options}
    if devices > 1:
        chosen |= {"strategy": "ddp", "devices": devices}
    trainer = make_trainer(folder / "runs", callbacks=[*callbacks, Standing(folder, step, forks)], **chosen)
    trainer.fit(Inputs(), make_loader(batch_size=4 // devices), resume="auto")
    return trainer


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[Any]:
    """Starts runs that pause, and ends them."""
    started = []

    def start(step: int = 3, **options: Any) -> Forked:
        started.append(Forked(_train, tmp_path, step, options))
        marks = [tmp_path / f"stands-{rank}" for rank in range(options.get("devices", 1))]
        assert wait_until(lambda: all(mark.exists() for mark in marks), STARTING), started[-1].communicate(5)
        return started[-1]

    yield start
    (tmp_path / "go").touch()
    for process in started:
        process.communicate(STARTING)


def _train(folder: Path, step: int, options: dict[str, Any]) -> None:
    train(folder, step, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "devices"), [(3, 1), (0, 1), (3, 2)])
def test_a_second_run_is_refused_and_changes_nothing(tmp_path: Path, standing: Any, step: int, devices: int) -> None:
    """In the middle, before the first checkpoint, and with workers, whose parent holds the lock."""
    first = standing(step, devices=devices)
    before = contents(tmp_path)
    with pytest.raises(ConfigError) as caught:
        train(tmp_path)
    holder = f"process {first.pid} on {socket.gethostname()} (fit, since"
    assert f"version_0 is in use by {holder}" in str(caught.value)
    assert contents(tmp_path) == before
    if step:  # an evaluation has a directory of its own
        weights = max(tmp_path.rglob("step-*"))
        make_trainer(tmp_path / "runs", logger=True).predict(Inputs(), make_loader(), ckpt_path=weights)
    (tmp_path / "go").touch()
    first.communicate(STARTING)
    assert first.returncode == 0
    lines = (tmp_path / "runs/default/version_0/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert not list(tmp_path.rglob(".lock*"))
    assert train(tmp_path, devices=devices, max_epochs=2).global_step == 10


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_who_was_killed_does_not_keep_it(tmp_path: Path, standing: Any, devices: int) -> None:
    """Not even if a forked child survives; and its workers have ended before the next run writes."""
    first = standing(devices=devices, forks=True)
    workers = [int(path.read_text()) for path in tmp_path.glob("stands-*")]
    child = int((tmp_path / "child").read_text())
    os.kill(first.pid, signal.SIGKILL)
    try:
        trainer = train(tmp_path, devices=devices)
        assert trainer.run_dir.name == "version_0"
        assert trainer.global_step == 5
        assert runs(child) or devices > 1  # workers take theirs along
        assert not any(runs(worker) for worker in workers)
    finally:
        if runs(child):
            os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_folder_of_its_own_has_one_writer_too(tmp_path: Path, standing: Any) -> None:
    checkpoints = tmp_path / "own"
    standing(dirpath=checkpoints, logger=False)
    with pytest.raises(ConfigError, match="own is in use by process"):
        train(tmp_path, dirpath=checkpoints, logger=False, run_name="other")


@pytest.mark.slow
def test_one_process_after_another_stage_of_the_same_trainer(tmp_path: Path) -> None:
    trainer = train(tmp_path)
    for _ in range(2):
        trainer.predict(dataloaders=make_loader())
    assert not list(tmp_path.rglob(".lock*"))


@pytest.mark.slow
def test_a_run_goes_on_where_somebody_deletes_the_file(tmp_path: Path) -> None:
    class Tidy(lg.Callback):
        def on_train_batch_start(self, trainer: lg.Trainer, task: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                assert not (trainer.run_dir / LOCK).unlink()
            if batch_idx == 4:  # a save was between
                with pytest.raises(ConfigError, match="is in use by process"):
                    RunLock(trainer.run_dir, "fit").take()

    train(tmp_path)
    callbacks = [Checkpoint(every_n_train_steps=1), Tidy()]
    trainer = make_trainer(tmp_path / "runs", callbacks=callbacks, enable_checkpointing=True, max_epochs=2)
    trainer.fit(Tiny(), make_loader(), resume="auto")
    assert trainer.global_step == 10


def test_a_run_that_has_lost_its_folder_writes_no_more(tmp_path: Path) -> None:
    class Robbed(lg.Callback):
        def on_train_batch_start(self, trainer: lg.Trainer, task: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                far_holder(trainer.run_dir)

    callbacks = [Checkpoint(every_n_train_steps=1, save_top_k=-1), Robbed()]
    trainer = make_trainer(tmp_path, callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(
        CheckpointError, match=r"has lost the lock on its folder: .* by process 7 on far \(fit, since today\)"
    ):
        trainer.fit(Tiny(), make_loader())
    assert len(list(tmp_path.rglob("step-*"))) == 3


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("place", ["disk", "store"])
def test_a_save_that_loses_its_folder_commits_nothing_and_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, asynchronous: bool
) -> None:
    """While a run saves step 3, another one resumes it and begins a save of step 3, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path if place == "disk" else f"memory://{uuid.uuid4().hex}/runs"
    callback = Checkpoint(every_n_train_steps=1, save_top_k=-1, asynchronous=asynchronous)
    trainer = make_trainer(root, callbacks=[callback], enable_checkpointing=True)
    write_files, saves, publish = commit._write_files, list[Any](), list[Any]()

    def write_and_lose(*arguments: Any) -> Any:
        saves.append(write_files(*arguments))
        if len(saves) == 3:
            if place == "disk":
                far_holder(trainer.run_dir)
            else:
                far = json.dumps({"host": "far", "pid": 7, "stage": "fit", "since": "today"})
                MemoryFileSystem().pipe_file(f"{location_of(trainer.run_dir)}/{LOCK}", far.encode())
            folder, name, run = folder_at(checkpoints_of(trainer.run_dir)), find.directory_name(3), trainer.saver.run_id
            folder.sweep()
            stage = folder.open_stage(name, 0, run)
            files = {
                file: folder.write(name, stage, file, partial(write_bytes, data=bytes(entry.size)))
                for file, entry in saves[-1].items()
            }
            publish.append(partial(folder.publish, name, stage, files, run))
        return saves[-1]

    monkeypatch.setattr(commit, "_write_files", write_and_lose)
    with pytest.raises(CheckpointError, match=r"has lost the lock on its folder: .* by process 7 on far \(fit"):
        trainer.fit(Tiny(), make_loader())
    checkpoints = checkpoints_of(trainer.run_dir)
    assert folder_at(checkpoints).names() == [find.directory_name(step) for step in (1, 2)]
    publish[0]()
    for step in (1, 2, 3):
        find.verify(checkpoints / find.directory_name(step))


# --- seen from outside ------------------------------------------------------------------------------------------------
def far_holder(folder: Path, **values: Any) -> None:
    """Write the lock files of a run on another machine, in the form of filelock and Legato."""
    holder = {"host": "far", "machine": "another", "pid": 7, "started": "1", "stage": "fit", "since": "today", **values}
    lines = ["filelock/2", f"pid={holder['pid']}", f"host={holder['host']}", "mode=lease", "token=abc"]
    lines += [f"duration={run_lock.LEASE!r}", "start=1", ""]
    (folder / LOCK).unlink(missing_ok=True)
    (folder / LOCK).write_text("\n".join(lines))
    (folder / HOLDER).write_text(json.dumps(holder))


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short lease, so that another machine counts as dead soon."""
    monkeypatch.setattr(run_lock, "LEASE", 1.5)
    monkeypatch.setattr(run_lock, "END_WAIT", 0.3)


@pytest.mark.slow
@pytest.mark.usefixtures("short_lease")
def test_a_run_on_another_machine_keeps_it_as_long_as_it_lives(tmp_path: Path) -> None:
    far_holder(tmp_path)
    over = threading.Event()

    def live() -> None:
        while not over.wait(0.2):
            os.utime(tmp_path / LOCK)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(ConfigError, match=r"by process 7 on far \(fit, since today\)"):
            RunLock(tmp_path, "fit").take()
        assert is_held(tmp_path)
    finally:
        over.set()
        thread.join()
    lock = RunLock(tmp_path, "fit")
    lock.take()  # it has died
    beat = (tmp_path / LOCK).stat().st_mtime_ns
    assert wait_until(lambda: (tmp_path / LOCK).stat().st_mtime_ns > beat)
    lock.check()
    lock.release()
    assert not list(tmp_path.iterdir())
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("filelock-lease")]


@pytest.mark.slow
def test_a_holder_on_this_machine_that_stands_still_keeps_it(tmp_path: Path) -> None:
    """As after SIGSTOP or on a sleeping laptop: the holder no longer touches the file, but is alive."""
    first, second = RunLock(tmp_path, "fit"), RunLock(tmp_path, "fit")
    first.take()
    os.utime(tmp_path / LOCK, (0, 0))
    assert is_held(tmp_path)
    with pytest.raises(ConfigError, match=f"by process {os.getpid()} on"):
        second.take()
    first.check()
    first.release()
    second.take()
    second.release()


@pytest.mark.parametrize("pid", [2**22 - 1, os.getpid()], ids=["gone", "given again"])
def test_a_dead_process_of_this_machine_does_not_keep_it(tmp_path: Path, pid: int) -> None:
    """Nor does another process that now has its id."""
    lock = RunLock(tmp_path, "fit")
    lock.take()
    holder = json.loads((tmp_path / HOLDER).read_text())
    lock.release()
    far_holder(tmp_path, **{**holder, "pid": pid, "started": "1"})
    assert not is_held(tmp_path)
    assert belongs_to_training(tmp_path)
    lock.take()
    lock.release()


@pytest.mark.slow
def test_of_several_at_once_one_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = [RunLock(tmp_path, f"fit {number}") for number in range(6)]
    monkeypatch.setattr(run_lock, "LEASE", 5.0)  # for how long others wait; the leases are long
    had = holders_among(locks)
    assert len(had) == 1
    had[0].release()


@pytest.mark.slow
@pytest.mark.usefixtures("short_lease")
def test_what_stands_in_the_files_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "END_WAIT", 20.0)  # filelock looks at a marker that it cannot read for 2 s
    locks = []
    texts = ["", "no json", "[]", "{}", '{"pid": "x", "host": 3}', '{"pid": -1}', "\0" * 5000]
    for number, (name, text) in enumerate(itertools.product([LOCK, HOLDER], texts)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_text(text)
        os.utime(folder / name, (0, 0))
        locks.append(RunLock(folder, f"fit where {name} is {text[:30]!r}"))
    had = holders_among(locks)
    assert [lock.stage for lock in locks if lock not in had] == []
    for lock in had:
        lock.release()
