"""A rank fails in every way and place: the job ends with only that rank's error, and leaves nothing behind."""

import itertools
import os
import signal
import sys
import traceback
from pathlib import Path

import pytest
from tiny import Validated, make_data, make_loader
from torch.utils.data import DataLoader, Dataset
from waiting import children, wait_until

import legato as lg
from legato.base.errors import WorkerError
from legato.callbacks import Checkpoint
from legato.trainer.processes.launch import warm_up

pytestmark = pytest.mark.slow


WAYS = ("raises", "is killed", "leaves")
WHO = 1


class Boom(Exception):
    """The error of a failing rank."""


def fail(way):
    if way == "raises":
        raise Boom("what went wrong")
    if way == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(0)


class Failing(Validated):
    """Fails on one rank, at the second call."""

    def __init__(self, way, place):
        super().__init__()
        self.way, self.place, self.chances = way, place, 0

    def reach(self, place):
        if place == self.place and self.global_rank == WHO:
            self.chances += 1
            if self.chances == 2:
                fail(self.way)

    def training_step(self, batch, batch_idx):
        self.reach("step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.reach("validation")
        super().validation_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.reach("hook")

    def on_save_checkpoint(self, checkpoint):
        self.reach("saving")
        self.reach("saving in the background")


class FailsInWorker(Dataset):
    """The loader worker of one rank fails at a sample."""

    def __init__(self, way):
        self.data, self.way = make_data(32), way

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == 20:  # in the third round of two replicas with batches of 4: of rank 1
            fail(self.way)
        return self.data[index]


def shared_memory():
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


@pytest.fixture
def nothing_left():
    warm_up()
    assert wait_until(lambda: len(children()) >= 2)  # the fork server and its resource tracker stay
    processes, memory = children(), shared_memory()
    yield
    assert wait_until(lambda: children() <= processes), children() - processes
    assert wait_until(lambda: shared_memory() <= memory), shared_memory() - memory


# in each way in the main thread, in a process of its own, in another thread; then the other places of the main thread
CASES = [(*case, 2) for case in itertools.product(WAYS, ("step", "loader worker", "saving in the background"))]
CASES += [("raises", "hook", 2), ("leaves", "validation", 2), ("raises", "saving", 2), ("is killed", "saving", 2)]
CASES += [("raises", "step", 4), ("is killed", "step", 4)]


@pytest.mark.parametrize(("way", "place", "processes"), CASES)
def test_the_job_ends_with_the_error_of_the_rank_that_failed(tmp_path, trainer, nothing_left, way, place, processes):
    task = Failing(way, place)
    callbacks: list[lg.Callback] = []
    if place.startswith("saving"):
        callbacks.append(Checkpoint(every_n_train_steps=1, asynchronous="background" in place))
    data = DataLoader(FailsInWorker(way), 4, num_workers=1) if place == "loader worker" else make_loader(32)
    made = trainer(
        strategy="ddp", devices=processes, max_epochs=2, callbacks=callbacks, enable_checkpointing=bool(callbacks)
    )
    with pytest.raises(Exception) as caught:
        made.fit(task, data, make_loader(18) if place == "validation" else None)
    text = "".join(traceback.format_exception(caught.value)).rstrip()
    last = text.splitlines()[-1]
    if way == "raises":
        assert isinstance(caught.value, Boom)
        assert last.endswith("Boom: what went wrong")
        assert ", in fail\n" in text
    elif place == "loader worker":
        # where the worker's broken connection surfaces first
        assert any(name in last for name in ("DataLoader worker", "FileNotFoundError", "ConnectionResetError"))
        assert f"Rank {WHO} of {processes} failed" in text
    else:
        words = "was killed by SIGKILL" if way == "is killed" else "failed with WorkerError"
        assert f"Rank {WHO} of {processes} {words}" in text
        assert (f"on rank {WHO} ended fit at step" in last) == (way == "leaves")
    if place != "loader worker":  # whose own connection to its rank may show
        assert "onnection closed" not in text
        assert "onnection reset" not in text
    for checkpoint in Path(tmp_path).rglob("step-*"):
        assert (checkpoint / "manifest.json").exists() or "." in checkpoint.name


class KillsServer(Validated):
    """Kills the fork server of its process."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 1 and self.global_step == 3:
            os.kill(os.getppid(), signal.SIGKILL)


def test_a_killed_fork_server_is_named(trainer):
    task = KillsServer()
    with pytest.raises(WorkerError) as caught:
        trainer(strategy="ddp", devices=2, max_epochs=10_000).fit(task, make_loader(32))
    assert "lost its fork server, which another process killed" in str(caught.value)
    trainer(strategy="ddp", devices=2, max_epochs=1).fit(Validated(), make_loader(32))  # by a new one
