"""Workers of a loader end with the run, pass on their errors, and have all of their batches read."""

import multiprocessing
import time

import pytest
import torch
from tiny import Tiny
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from waiting import wait_until

import legato as lg
from legato.trainer.processes.launch import run_workers


class OneByOne(Tiny):
    """Takes samples without a dimension for batches."""

    def count_samples(self, batch):
        return 1


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(3), torch.zeros(1)


def ended(processes):
    """Whether all of them have ended, or end soon."""
    return wait_until(lambda: not any(process.is_alive() for process in processes))


MAP, STREAM = [(torch.zeros(3), torch.zeros(1))] * 64, Endless()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "data", "persistent"),
    [
        ("error", MAP, False),
        ("error", STREAM, True),
        ("interrupt", MAP, True),
        ("interrupt", STREAM, False),
        ("stop", MAP, False),
        ("stop", STREAM, True),
        ("validation", MAP, True),
        ("validation", STREAM, False),
    ],
)
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


class Counted(IterableDataset):
    """A stream with a length, split between workers; `more` samples follow beyond that length."""

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
    """Three workers with 34, 33 and 33 samples have 15 batches of 8, although the length is 13."""

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
