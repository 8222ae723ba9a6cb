"""Loaders and data modules with a state, and iterables without one, resume at their position."""

import numpy as np
import pytest
import tiny
import torch
from resumed_run import EPOCHS, SAMPLES, STEPS, Augmented, Net, everything, loaders, make_trainer
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import legato as lg
from legato.base.errors import ConfigError
from legato.trainer.checkpoints import commit, find, reading
from legato.trainer.data.loaders import seed_samplers
from legato.trainer.data.sampling import epoch_key, mix, permutation

# --- other data -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torch, in torchdata's loader
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_from_its_own_state(tmp_path, workers, caplog):
    """At every step, without reading a batch again; also bitwise, if the loader loads in this process."""

    def run(folder, dataset, **arguments):
        trainer, task = make_trainer(tmp_path / folder, **arguments), Net()
        loader = StatefulDataLoader(dataset, 3, shuffle=True, num_workers=workers)
        trainer.fit(task, loader, loaders()[1], resume="auto")
        return trainer, task

    trainer, task = run("whole", Augmented())
    expected, samples = everything(trainer, task), trainer.state.samples_seen
    assert samples == EPOCHS * SAMPLES
    read = 0
    stops = (*range(1, STEPS), -1) if workers == 0 else (4, 5, -1)
    for stop in stops:
        dataset = Augmented()
        trainer, task = run("stopped", dataset, max_steps=stop)
        read += dataset.read
    assert trainer.state.samples_seen == samples
    assert trainer.global_step == STEPS
    assert not [record for record in caplog.records if "again" in record.message]
    if workers == 0:
        assert read == samples
        assert torch.equal(everything(trainer, task), expected)


class Plain:
    """An iterable without a state."""

    def __init__(self):
        self.read = 0

    def __iter__(self):
        for index in range(9):
            self.read += 1
            yield torch.full((3, 4), float(index)) + torch.rand(3, 4)


class Split(IterableDataset):
    """24 samples, of which each loader worker reads a share."""

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(torch.arange(24.0)[number::workers, None].expand(-1, 4))


@pytest.mark.slow
def test_the_number_of_loader_workers_is_part_of_a_run_on_a_stream(tmp_path, caplog):
    def run(dataset, workers, **arguments):
        trainer = make_trainer(tmp_path / type(dataset).__name__, **arguments)
        trainer.fit(Net(), DataLoader(dataset, 3, num_workers=workers), loaders()[1], resume="auto")

    within, end = {"max_epochs": 3, "max_steps": 1}, {"max_epochs": 1}
    run(Split(), 2, **within)
    with pytest.raises(ConfigError, match=r"in the middle of epoch 0 .* num_workers: 2 -> 0"):
        run(Split(), 0, **end)
    run(Split(), 2, **end)
    assert "num_workers" not in caplog.text
    run(Split(), 0, max_epochs=2)
    assert "New values that change the samples in each step: num_workers: 2 -> 0" in caplog.text
    caplog.clear()
    run(Augmented(), 2, **within)
    run(Augmented(), 0, **end)
    assert "num_workers" not in caplog.text


@pytest.mark.slow
def test_an_iterable_without_state_is_read_up_to_its_place_and_that_is_said(tmp_path, caplog):
    def run(folder, **arguments):
        trainer, task, data = make_trainer(tmp_path / folder, **arguments), Net(), Plain()
        trainer.fit(task, data, loaders()[1], resume="auto")
        return everything(trainer, task), data.read

    expected, _ = run("whole", val_check_interval=3)
    run("stopped", max_steps=2, val_check_interval=3)
    result, read = run("stopped", val_check_interval=3)
    assert torch.equal(result, expected)
    assert read == EPOCHS * 9
    assert "Plain has no state_dict, so 8 batches are read again to return to step 2 of epoch 0" in caplog.text


@pytest.mark.slow
def test_a_data_module_keeps_its_state(tmp_path):
    class Data(lg.DataModule):
        def __init__(self):
            super().__init__()
            self.saved_steps = []

        def train_dataloader(self):
            return loaders()[0]

        def val_dataloader(self):
            return loaders()[1]

        def state_dict(self):
            return {"saved_steps": [*self.saved_steps, self.trainer.global_step]}

        def load_state_dict(self, state_dict):
            self.saved_steps = state_dict["saved_steps"]

    def run(data, **arguments):
        trainer = make_trainer(tmp_path, **arguments)
        trainer.fit(Net(), datamodule=data, resume="auto")

    run(Data(), max_steps=3)
    data = Data()
    run(data, max_steps=4)
    assert data.saved_steps == [3]


# --- samplers of samplers -------------------------------------------------------------------------------------------
class Wrapping(Sampler):
    """Wraps another sampler in an attribute with an uncommon name; also draws from a generator."""

    def __init__(self, inner, generator=None):
        self.inner, self.source = inner, generator

    def __len__(self):
        return len(self.inner)

    def __iter__(self):
        turn = 0 if self.source is None else int(torch.randint(12, (), generator=self.source))
        chosen = list(self.inner)
        return iter(chosen[turn:] + chosen[:turn])


class Batches(BatchSampler):
    """A user's batch sampler."""


class Passed(DataLoader):
    """A loader whose batches pass through unchanged."""


class Several(Wrapping):
    """Yields the indices of several samplers in sequence."""

    def __init__(self, samplers):
        self.samplers = samplers

    def __len__(self):
        return sum(map(len, self.samplers))

    def __iter__(self):
        return (index for sampler in self.samplers for index in sampler)


def drawing(data=range(12)):
    return RandomSampler(data, generator=torch.Generator().manual_seed(5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda data: DataLoader(data, batch_sampler=Batches(drawing(), 4, False)),
        lambda data: DataLoader(data, 4, sampler=Wrapping(drawing(), torch.Generator().manual_seed(5))),
        lambda data: DataLoader(data, 4, sampler=Wrapping(Wrapping(drawing()))),
        lambda data: DataLoader(data, 4, sampler=Several([drawing(range(6)), drawing(range(6, 12))])),
        lambda data: Passed(data, batch_sampler=BatchSampler(drawing(), 4, False)),
        lambda data: Passed(data, batch_sampler=Batches(Wrapping(drawing()), 4, False)),
        lambda data: Passed(data, 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    ],
    ids=["batches", "two generators", "nested", "several", "passed", "passed batches", "passed shuffle"],
)
def test_samplers_draw_the_same_after_a_resume_wherever_their_generators_are(trainer, tmp_path, make):
    def run(resume=None, **options):
        task, made = tiny.Tiny(), trainer(max_epochs=3, **options)
        made.fit(task, make(tiny.make_data(12)), resume=resume)
        return task, made

    reference, _ = run()
    assert not torch.equal(torch.cat(reference.seen[:3]), torch.cat(reference.seen[3:6]))
    for stop in (1, 3, 4, 8):
        run(max_steps=stop)[1].save_checkpoint(tmp_path / f"{stop}")
        task, _ = run(tmp_path / f"{stop}")
        assert all(map(torch.equal, task.seen, reference.seen[stop:]))
        tiny.assert_same_bits(task, reference)


def test_generators_of_samplers_are_seeded_once_and_apart():
    inner, outer = drawing(), Wrapping(None)
    outer.inner, outer.generator, outer.sampler = inner, torch.Generator(), outer  # a sampler may hold itself
    shared = Wrapping(inner, inner.generator)
    seed_samplers(2**40, outer, shared, None, [1, 2])
    assert outer.generator.initial_seed() == 2**39
    assert inner.generator.initial_seed() == mix(2**40, 1) >> 1
    seed_samplers(2**40, inner)
    assert inner.generator.initial_seed() == 2**39


# --- far into an epoch ------------------------------------------------------------------------------------------------
class Endless(Dataset):
    """Two billion samples; records the indices that were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 2 * 10**9

    def __getitem__(self, index):
        self.read.append(index)
        return torch.full((3,), index / 10**9), torch.ones(1)


@pytest.mark.parametrize("done", [1, 125_000_000])
def test_a_resume_at_the_thousand_millionth_sample_reads_what_one_at_the_eighth_reads(tmp_path, done):
    """A step takes 8 samples: 2 replicas with 4 each. The checkpoint of step 1 is changed to that of step `done`."""
    saver = lg.callbacks.Checkpoint(every_n_train_steps=1)
    options = {"replicas": 2, "max_epochs": -1, "enable_checkpointing": True}
    first = tiny.make_trainer(tmp_path, **options, max_steps=1, callbacks=[saver])
    first.fit(tiny.Tiny(), DataLoader(Endless(), 4, shuffle=True))
    saved = reading.read_checkpoint(find.newest_complete(first.run_dir / "checkpoints"))
    counts = {"global_step": done, "epoch_steps": done, "epoch_rounds": done, "rounds": done, "samples_seen": 8 * done}
    saved["state"] |= counts
    commit.write(tmp_path / find.directory_name(done), saved)
    data = Endless()
    trainer = tiny.make_trainer(tmp_path, **options, max_steps=done + 3, callbacks=[lg.callbacks.Checkpoint()])
    trainer.fit(tiny.Tiny(), DataLoader(data, 4, shuffle=True), resume=tmp_path / find.directory_name(done))
    assert trainer.state.samples_seen == 8 * (done + 3)
    positions = np.arange(8 * done, 8 * (done + 3))
    twice = 2 * permutation(np.arange(4), len(data), epoch_key(0, 0)).tolist()  # the first batch, to compare the data
    assert data.read == twice + permutation(positions, len(data), epoch_key(0, 0)).tolist()
