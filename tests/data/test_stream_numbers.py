"""Random numbers with streams: keyed by position, or untouched with reproducible=off."""

import random

import numpy as np
import pytest
import torch
from tiny import Tiny, assert_same_bits, make_loader
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import legato as lg

BATCHES = 6


class Wobbling:
    """A stream whose batches are drawn from all three global generators."""

    def __len__(self):
        return BATCHES

    def __iter__(self):
        for _ in range(BATCHES):
            inputs = torch.randn(4, 3) + random.random() + np.random.rand()
            yield inputs, inputs.sum(dim=1, keepdim=True).sin()


class Dropping(Tiny):
    """Draws in its forward too, and now and then once more, which must change nothing in the next step."""

    def __init__(self, restless=()):
        super().__init__()
        self.model = nn.Sequential(*self.model[:2], nn.Dropout(0.4), self.model[2])
        self.restless = restless

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * (1 + 0.1 * random.random() + 0.1 * np.random.rand())
        if self.global_step in self.restless:
            torch.rand(7), random.random(), np.random.rand(3)
        return loss


def fit(trainer, data, task=None, **options):
    task = task or Dropping()
    resume = options.pop("resume", None)
    made = trainer(max_epochs=2, **options)
    made.fit(task, data, resume=resume)
    return made, task


@pytest.mark.parametrize("options", [{}, {"replicas": 2}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_step_does_not_depend_on_what_was_drawn_in_steps_before(trainer, options):
    _, calm = fit(trainer, Wobbling(), **options)
    _, restless = fit(trainer, Wobbling(), Dropping(restless=range(0, 12, 2)), **options)
    assert_same_bits(calm, restless)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torch, in torchdata's loader
@pytest.mark.parametrize("stateful", [False, True], ids=["read again", "own state"])
def test_a_stream_goes_on_with_the_same_numbers_from_every_step(trainer, tmp_path, stateful):
    def stream():
        return StatefulDataLoader(Samples(), batch_size=2) if stateful else Wobbling()

    _, uninterrupted = fit(trainer, stream())
    for stop in range(1, 2 * BATCHES):
        path = tmp_path / f"stop-{stop}"
        made = trainer(max_epochs=2, max_steps=stop)
        made.fit(Dropping(), stream())
        made.save_checkpoint(path)
        again = Dropping()
        trainer(max_epochs=2).fit(again, stream(), resume=path)
        assert_same_bits(again, uninterrupted)


class Samples(torch.utils.data.IterableDataset):
    """Twelve samples, each drawn when it is asked for."""

    def __init__(self):
        self.done = 0

    def __iter__(self):
        while self.done < 2 * BATCHES:
            self.done += 1
            yield torch.randn(3), torch.rand(1) + random.random()
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class Validating(Dropping):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class Drawing(Tiny):
    """Records the random numbers of its steps."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def training_step(self, batch, batch_idx):
        self.drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))
        return super().training_step(batch, batch_idx)


class Seeds(lg.Callback):
    def on_train_epoch_start(self, trainer, task):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)


@pytest.mark.parametrize("loader", [list, lambda batches: batches], ids=["stream", "map-style"])
def test_off_leaves_the_generators_alone(trainer, loader):
    def drawn(reproducible):
        task = Drawing()
        trainer(callbacks=[Seeds()], reproducible=reproducible).fit(task, loader(make_loader()))
        return task.drawn

    Seeds().on_train_epoch_start(None, None)
    undisturbed = [(torch.rand(()).item(), random.random(), np.random.rand()) for _ in range(5)]
    if loader is list:
        assert drawn("off") == undisturbed
    else:  # making an iterator of a DataLoader draws a seed for its workers from torch's generator
        assert [numbers[1:] for numbers in drawn("off")] == [numbers[1:] for numbers in undisturbed]
    assert drawn("order") != undisturbed


# --- where a stream ends ----------------------------------------------------------------------------------------------
class Longer(torch.utils.data.IterableDataset):
    """Samples split between workers, whose short last batches exceed the length."""

    def __len__(self):
        return 20

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        for index in range(info.id, 20, info.num_workers):
            inputs = torch.randn(3, generator=torch.Generator().manual_seed(index))
            yield inputs, inputs.sum(dim=0, keepdim=True).sin()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torch, in torchdata's loader
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_stream_goes_on_beyond_the_length_that_it_says(trainer, tmp_path, kind):
    def loader():
        return kind(Longer(), batch_size=4, num_workers=2)

    class Saves(lg.Callback):
        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}")

    made, uninterrupted = fit(trainer, loader(), callbacks=[Saves()])
    assert (len(loader()), made.global_step, made.state.samples_seen) == (5, 12, 40)
    for stop in (4, 5, 6, 11):
        made, task = fit(trainer, loader(), resume=tmp_path / f"{stop}")
        assert (made.global_step, made.state.samples_seen) == (12, 40)
        assert_same_bits(task, uninterrupted)


def test_a_stream_that_was_read_to_its_end_is_not_read_again(trainer, tmp_path):
    class Counted(Wobbling):
        read = 0

        def __iter__(self):
            for batch in super().__iter__():
                self.read += 1
                yield batch

    class Saves(lg.Callback):
        def on_validation_start(self, trainer, task):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}")

    def validated(data, **options):
        task = Validating()
        trainer(max_epochs=2, num_sanity_val_steps=0, **options).fit(task, data, make_loader(), resume=resume)
        return task

    resume, data = None, Counted()
    uninterrupted = validated(data, callbacks=[Saves()])
    assert data.read == 2 * BATCHES
    resume, data = tmp_path / f"{BATCHES}", Counted()
    assert_same_bits(validated(data), uninterrupted)
    assert data.read == BATCHES
