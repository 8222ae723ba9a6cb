"""StopIteration from the user's code raises an error with its location rather than ending the data silently."""

import pytest
import torch
from tiny import Tiny, make_data, make_loader
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

import legato as lg
from legato.base.errors import DataError


class Runs(Dataset):
    """Twenty samples; the one at `bad` is read from an exhausted iterator."""

    def __init__(self, bad=13):
        self.data, self.bad = make_data(20), bad

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return next(iter([])) if index == self.bad else self.data[index]


class Batched(Runs):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def collate(samples):
    batch = default_collate(samples)
    return next(iter([])) if batch[0][0, 0] == make_data(20)[13][0][0] or len(batch[0]) == 2 else batch


class Passed(DataLoader):
    """A loader that is passed through."""


class Half(Sampler):
    """Says that it has twenty samples, and has ten."""

    def __len__(self):
        return 20

    def __iter__(self):
        return iter(range(10))


BROKEN = {
    "a sample": (lambda **o: DataLoader(Runs(), 4, **o), "The dataset Runs or the collate_fn.* in batch 4"),
    "the last sample": (lambda **o: DataLoader(Runs(19), 4, **o), "Runs .* in batch 5"),
    "a whole batch": (lambda **o: DataLoader(Batched(), 4, **o), "Batched .* in batch 4"),
    "a subclass": (lambda **o: Passed(Runs(), 4, **o), "Runs .* in batch 4"),
    "a subclass, last": (lambda **o: Passed(Runs(19), 4, **o), "Runs .* in batch 5"),
    "collate": (lambda **o: DataLoader(Runs(-1), 2, collate_fn=collate, **o), "Runs or the collate_fn"),
    "combined": (lambda **o: [make_loader(), DataLoader(Runs(), 4, **o)], "Runs .* in batch 4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", BROKEN)
def test_stop_iteration_of_the_data_is_an_error_that_names_it(trainer, name, workers):
    make, words = BROKEN[name]

    class Any(Tiny):
        def training_step(self, batch, batch_idx):
            return self.loss(batch[0] if name == "combined" else batch)

    for options in ({},) if workers else ({}, {"reproducible": "off"}):
        with pytest.raises(DataError, match=words) as caught:
            trainer(**options).fit(Any(), make(num_workers=workers))
        assert "which looks like the end of the data" in str(caught.value)


def test_a_sampler_of_the_user_s_may_end_before_its_length(trainer):
    task = Tiny()
    trainer(max_epochs=1).fit(task, Passed(Runs(-1), 5, sampler=Half()))
    assert len(task.seen) == 2


@pytest.mark.parametrize("name", ["a sample", "collate"])
def test_in_an_evaluation_too(trainer, name):
    make, words = BROKEN[name]
    with pytest.raises(DataError, match=words):
        trainer().test(type("Tested", (Tiny,), {"test_step": lambda self, batch: None})(), make())


@pytest.mark.slow
@pytest.mark.parametrize(
    "hook", ["training_step", "on_train_batch_start", "validation_step", "on_before_optimizer_step"]
)
def test_stop_iteration_of_a_step_ends_the_run_with_an_error(trainer, hook):
    def stops(self, *arguments):
        return next(iter([]))

    task = type("Stops", (Tiny,), {"validation_step": lambda self, batch: None, hook: stops})()
    with pytest.raises((StopIteration, RuntimeError)):
        trainer(num_sanity_val_steps=0).fit(task, make_loader(), make_loader())


def test_a_loader_keeps_its_own_collate_function(trainer):
    loader = Passed(make_data(), 4, collate_fn=lambda samples: default_collate(samples))
    before = loader.collate_fn
    trainer().fit(Tiny(), loader)
    assert loader.collate_fn is before


def test_the_end_of_a_stream_is_its_end(trainer):
    class Iterated(IterableDataset):
        def __iter__(self):
            self.left = 5
            return self

        def __next__(self):
            self.left -= 1
            if self.left < 0:
                raise StopIteration
            return torch.ones(4, 3), torch.ones(4, 1)

    task = Tiny()
    trainer().fit(task, DataLoader(Iterated(), batch_size=None))
    assert len(task.seen) == 5
    assert isinstance(task, lg.Task)
