"""DataLoaders over streams with a state: a resume continues from it exactly, also with workers."""

import random

import numpy as np
import pytest
import torch
from tiny import Tiny, assert_same_bits
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import legato as lg

SAMPLES = 26


class Counting(IterableDataset):
    """Samples with noise, split unevenly between workers, so that one ends before the other."""

    def __init__(self):
        self.place, self.read = 0, 0

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = [index for index in range(SAMPLES) if min(index % 5, workers - 1) == number]
        while self.place < len(mine):
            self.place += 1
            self.read += 1
            noise = torch.rand(3) + random.random() + np.random.rand()
            yield mine[self.place - 1] + noise, torch.zeros(1)
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Buffered(Counting):
    """Reads four samples ahead, which its state does not hold."""

    def __iter__(self):
        ahead = []
        for sample in super().__iter__():
            ahead.append(sample)
            if len(ahead) > 4:
                yield ahead.pop(0)
        yield from ahead


class Keeping(Tiny):
    def __init__(self):
        super().__init__()
        self.sums = []

    def training_step(self, batch, batch_idx):
        self.sums.append(batch[0].sum().item())
        return super().training_step(batch, batch_idx)


class Saves(lg.Callback):
    """Saves after some steps: a run that has ended has let go of its data."""

    def __init__(self, folder, steps):
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"stop-{trainer.global_step}")


def fit(trainer, dataset, workers, persistent=False, **options):
    resume, task = options.pop("resume", None), Keeping()
    made = trainer(max_epochs=2, **options)
    made.fit(task, DataLoader(dataset, 2, num_workers=workers, persistent_workers=persistent), resume=resume)
    return made, task, dataset


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("kind", [Counting, Buffered])
@pytest.mark.parametrize("workers", [0, 2, 3])
def test_a_stream_goes_on_from_the_state_of_its_dataset(trainer, tmp_path, caplog, kind, workers):
    made, uninterrupted, _ = fit(trainer, kind(), workers)
    steps = made.global_step
    late = steps // 2 + 3
    stops = {0: range(1, steps), 2: (1, 4, 5, steps // 2, late), 3: (1, 5, late)}[workers]
    _, task, _ = fit(trainer, kind(), workers, callbacks=[Saves(tmp_path, stops)])
    assert task.sums == uninterrupted.sums
    for stop in stops:
        _, again, dataset = fit(trainer, kind(), workers, resume=tmp_path / f"stop-{stop}")
        assert again.sums == uninterrupted.sums[stop:]
        assert_same_bits(again, uninterrupted)
        if workers == 0 and kind is Counting:  # of the batch before, which shows that the state is right
            assert dataset.read == 2 * SAMPLES - 2 * stop + 2
    assert ("batches are read again" in caplog.text) == (kind is Buffered)
    assert ("has a state that does not restore its position" in caplog.text) == (kind is Buffered)


@pytest.mark.slow
def test_workers_that_persist_go_on_too(trainer, tmp_path, caplog):
    made, uninterrupted, _ = fit(trainer, Counting(), 2, persistent=True)
    stops = (5, made.global_step // 2 + 3)
    _, task, _ = fit(trainer, Counting(), 2, persistent=True, callbacks=[Saves(tmp_path, stops)])
    assert task.sums == uninterrupted.sums
    for stop in stops:
        _, again, _ = fit(trainer, Counting(), 2, persistent=True, resume=tmp_path / f"stop-{stop}")
        assert again.sums == uninterrupted.sums[stop:]
        assert_same_bits(again, uninterrupted)
    assert "again" not in caplog.text
