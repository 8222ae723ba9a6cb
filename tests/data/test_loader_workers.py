"""What a loader's worker cannot send ends the loop with an error; torch's own loaders wait for it for ever."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import connection, resource_sharer

import pytest
import torch
from forked import Forked
from tiny import Tiny
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from waiting import wait_until

import legato as lg
from legato.base.errors import DataError
from legato.trainer.data.loaders import iterate_loader
from legato.trainer.data.workers import WorkerSetup
from legato.trainer.processes.environment import run_workers


class Locks:
    """Its third sample is what nobody can pickle, or an error of a class that nobody can import."""

    def __init__(self, raises):
        self.raises = raises

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 3:
            if self.raises:
                raise type("OfNoModule", (Exception,), {})("what went wrong")
            return threading.Lock()
        return torch.zeros(3), torch.zeros(1)


class Stream(IterableDataset):
    """The same samples without places."""

    def __init__(self, raises):
        self.samples = Locks(raises)

    def __iter__(self):
        return map(self.samples.__getitem__, range(8))


class OneByOne(Tiny):
    """Takes samples without a dimension for batches."""

    def count_samples(self, batch):
        return 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(("loader", "kind"), [(DataLoader, Locks), (StatefulDataLoader, Stream)])
def test_what_cannot_be_sent_ends_the_run(trainer, loader, kind, raises):
    data = loader(kind(raises), 1, num_workers=1, collate_fn=lambda samples: samples[0])
    with pytest.raises(RuntimeError if raises else TypeError) as caught:
        trainer().fit(OneByOne(), data)
    assert ("OfNoModule: what went wrong" if raises else "cannot pickle '_thread.lock' object") in str(caught.value)


QUEUE = """
import multiprocessing, threading, torch
from tiny import Tiny, make_data, make_trainer
from torch.utils.data import DataLoader

class Tells(torch.utils.data.Dataset):
    queue = multiprocessing.Queue()
    def __len__(self):
        return 4
    def __getitem__(self, index):
        self.queue.put(threading.Lock() if index == 1 else index)
        return make_data(4)[index]

data = Tells()
make_trainer(".", max_epochs=1, enable_checkpointing=False).fit(Tiny(), DataLoader(data, 1, num_workers=1))
print(sorted(data.queue.get(timeout=20) for _ in range(3)))
"""


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(3), torch.zeros(1)


def ended(processes):
    """Whether all of them have ended, or end soon."""
    return wait_until(lambda: not any(one.is_alive() for one in processes))


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("data", [[(torch.zeros(3), torch.zeros(1))] * 64, Endless()], ids=["map", "stream"])
@pytest.mark.parametrize("how", ["error", "interrupt", "stop", "validation"])
def test_no_worker_outlives_the_run(trainer, data, persistent, how):
    """Though somebody holds the traceback, as a notebook does, and the loader."""

    class Leaves(Tiny):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3 and how in ("error", "interrupt"):
                raise KeyboardInterrupt if how == "interrupt" else LookupError("here")
            self.trainer.should_stop = batch_idx == 3
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise LookupError("here")

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.started = multiprocessing.active_children()

        def on_validation_batch_start(self, batch, batch_idx):
            self.started = multiprocessing.active_children()

    task, loader = Leaves(), DataLoader(data, 1, num_workers=2, persistent_workers=persistent)
    loader.multiprocessing_context = "fork"
    before, held = set(multiprocessing.active_children()), None
    try:
        if how == "validation":
            trainer().validate(task, loader)
        else:
            trainer(max_epochs=1).fit(task, loader)
    except (LookupError, KeyboardInterrupt) as error:
        held = error
    assert (held is None) == (how == "stop")
    assert len(set(task.started) - before) >= 2
    assert ended(set(task.started) - before)
    again = iter(loader)
    assert len([next(again) for _ in range(3)]) == 3  # it can be used again
    again._shutdown_workers()  # else torch waits 5 s for each of them, whenever the cycle of task and trainer is freed


def test_a_run_within_another_one_leaves_its_workers_alone(trainer):
    class Inner(Tiny):
        def validation_step(self, batch, batch_idx):
            pass

    class Outer(Tiny):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 1:
                trainer().validate(Inner(), loader())

    def loader():
        return DataLoader([(torch.zeros(3), torch.zeros(1))] * 16, 1, num_workers=1, multiprocessing_context="fork")

    made = trainer()
    made.fit(Outer(), loader())
    assert made.global_step == 16


@pytest.mark.slow
def test_a_queue_of_the_dataset_itself_is_left_alone(tmp_path):
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{QUEUE}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stdout == "[0, 2, 3]\n", done.stderr
    assert "cannot pickle '_thread.lock' object" in done.stderr


class Broken:
    """Batches of workers, the second of which ends soon after the connection to it broke."""

    _persistent_workers = True

    def __init__(self, seconds, end):
        context = multiprocessing.get_context("fork")
        self._workers = [context.Process(target=time.sleep, args=(60,)), context.Process(target=end, args=(seconds,))]
        self._workers_status = [True, True]
        for worker in self._workers:
            worker.start()

    def __iter__(self):
        return self

    def __next__(self):
        raise ConnectionResetError(104, "Connection reset by peer")


def killed(seconds):
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "kind", "words"),
    [
        (killed, DataError, r"on its way when DataLoader worker \(pid \d+\) was killed by SIGKILL; the system"),
        (time.sleep, DataError, r"DataLoader worker \(pid \d+\) ended with exit code 0 before its work was done"),
        (lambda _: time.sleep(60), ConnectionResetError, "Connection reset by peer"),
    ],
)
def test_a_batch_that_breaks_off_is_told_by_the_worker_that_ended(end, kind, words):
    batches = Broken(0.05, end)
    try:
        with pytest.raises(kind, match=words):
            next(iterate_loader(batches))
    finally:
        for worker in batches._workers:
            worker.kill()
            worker.join()


class EndsInTurn(IterableDataset):
    """The first worker's stream is over at once; the second one finds a file missing later."""

    def __iter__(self):
        if torch.utils.data.get_worker_info().id == 1:
            yield torch.zeros(3), torch.zeros(1)
            time.sleep(0.5)
            raise FileNotFoundError("no such sample")


@pytest.mark.slow
def test_a_worker_that_is_done_is_not_blamed_for_another_ones_error(trainer):
    with pytest.raises(FileNotFoundError, match="no such sample"):
        trainer().fit(OneByOne(), DataLoader(EndsInTurn(), 1, num_workers=2, collate_fn=lambda samples: samples[0]))


def be_left(stranger):
    """As a worker, share a file with a trainer that is gone before it gets it; say what else happens in that thread."""
    WorkerSetup(None)(0)
    address, key = resource_sharer.DupFd(0)._id
    connection.Client(address, authkey=None).close()  # in the middle of the greetings
    for asked in (
        ["no number", key] if stranger else [key]
    ):  # one after the other: when the last is answered, all is said
        with connection.Client(address, authkey=multiprocessing.current_process().authkey) as client:
            client.send((asked, os.getpid()))
            client.poll(10)


@pytest.mark.slow
@pytest.mark.parametrize("stranger", [False, True])
def test_a_trainer_that_has_gone_is_not_worth_a_traceback(stranger):
    worker = Forked(be_left, stranger)
    _, errors = worker.communicate(60)
    assert worker.returncode == 0
    assert ("KeyError: 'no number'" in errors) == stranger
    assert errors.count("Traceback") == stranger


class Counted(IterableDataset):
    """A stream with a length, of which each worker reads a part; `more` samples come after that length."""

    def __init__(self, samples, more=0):
        self.samples, self.more = samples, more

    def __len__(self):
        return self.samples

    def __iter__(self):
        worker = get_worker_info()
        return iter(range(self.samples + self.more)[worker.id :: worker.num_workers])


class Evaluated(lg.Task):
    """Keeps the samples that it is evaluated on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def validation_step(self, batch, batch_idx):
        self.seen += batch.tolist()

    def predict_step(self, batch, batch_idx):
        return batch.tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Length of IterableDataset", "ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize("processes", [1, 2])
def test_an_evaluation_sees_the_short_batch_of_each_worker(trainer, processes):
    """Three workers of 34, 33 and 33 samples have 15 batches of 8, where the length is 13."""

    def evaluate():
        strategy = "ddp" if processes > 1 else "single"
        made, task = trainer(strategy=strategy, devices=processes), Evaluated()
        made.validate(task, DataLoader(Counted(100), 8, num_workers=3), verbose=False)
        seen = [value for rank in made.strategy.collectives.gather_objects(task.seen) for value in rank]
        predicted = made.predict(task, DataLoader(Counted(100), 8, num_workers=3))
        half = trainer(strategy=strategy, devices=processes, limit_predict_batches=0.5)
        longer = DataLoader(Counted(100, more=10_000), 8, num_workers=3)
        return (
            seen,
            predicted,
            half.predict(task, DataLoader(Counted(100), 8, num_workers=3)),
            made.predict(task, longer),
        )

    seen, predicted, half, longer = evaluate() if processes == 1 else run_workers(evaluate, processes, threads=1)
    assert sorted(seen) == list(range(100))
    assert sorted(value for batch in predicted for value in batch) == list(range(100))
    assert len(half) == 6
    assert len(longer) == 13 + 3 - 1
