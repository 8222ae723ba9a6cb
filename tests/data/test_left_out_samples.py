"""trainer.leave_out_samples: these samples are in no batch, and all others keep their step."""

import logging

import numpy as np
import pytest
import torch
from resumed_run import SAMPLES, Augmented, Net, everything, loaders
from resumed_run import make_trainer as make_resumed
from tiny import Tiny, assert_close, assert_same_bits, make_data, make_trainer, unchanged
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from legato.base.errors import ConfigError, LegatoError
from legato.trainer.data.sampling import epoch_key, permutation

OUT = [3, 4, 5, 17]


class Numbered(Dataset):
    """Gives its index with each sample; those left out cannot even be loaded."""

    def __init__(self, left_out=OUT, samples=20):
        self.data, self.left_out = make_data(samples), left_out

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        assert index not in self.left_out
        return (*self.data[index], index)


class Notes(Tiny):
    """Notes which samples each step has."""

    def __init__(self, lr=0.1):
        super().__init__(lr)
        self.steps, self.weights = {}, []

    def training_step(self, batch, batch_idx):
        self.steps.setdefault(self.global_step + 1, []).extend(batch[2].tolist())
        return super().training_step(batch[:2], batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.weights.append(self.model[0].weight.detach().clone())


def steps_of(task, left_out=()):
    return {step: [sample for sample in samples if sample not in left_out] for step, samples in task.steps.items()}


def fit(tmp_path, left_out, batch_size=4, sampler=None, **options):
    task, trainer = Notes(), make_trainer(tmp_path, max_epochs=3, leave_out_samples=left_out, seed=7, **options)
    data = Numbered(left_out or ())
    how = {"batch_sampler": sampler(data)} if sampler else {"batch_size": batch_size, "shuffle": True}
    trainer.fit(task, DataLoader(data, **how))
    return task, trainer


def own_batches(data):
    return BatchSamplerOfItsOwn(RandomSampler(data), 4, drop_last=False)


class BatchSamplerOfItsOwn(BatchSampler):
    pass


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"replicas": 3},
        {"replicas": 2, "accumulate_grad_batches": 2, "batch_size": 2},
        {"sampler": own_batches},
        {"batch_size": 1, "replicas": 2},
    ],
    ids=["plain", "accumulated", "three replicas", "both", "own batches", "single samples"],
)
def test_all_other_samples_keep_their_step(tmp_path, options):
    reference, _ = fit(tmp_path, None, **options)
    reduced, trainer = fit(tmp_path, OUT, **options)
    kept = steps_of(reference, OUT)
    assert steps_of(reduced) == {step: samples for step, samples in kept.items() if samples}
    assert trainer.global_step == len(reference.steps)
    assert trainer.state.samples_seen == 3 * 16


def test_the_gradient_is_the_mean_over_the_samples_that_are_left(tmp_path):
    """Beside a loop by hand, with uneven batches of two replicas."""
    task, _ = fit(tmp_path, OUT, replicas=2, batch_size=3)
    by_hand, data = Notes(), Numbered()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for step in sorted(task.steps):
        inputs, targets, _ = zip(*(data[index] for index in task.steps[step]), strict=True)
        optimizer.zero_grad()
        nn.functional.mse_loss(by_hand(torch.stack(inputs)), torch.stack(targets)).backward()
        optimizer.step()
    assert_close(task, by_hand)


def test_a_step_without_a_sample_counts_and_moves_nothing(tmp_path):
    class Heavy(Notes):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    task, trainer = Heavy(), make_trainer(tmp_path, leave_out_samples=[4, 5])
    trainer.fit(task, DataLoader(Numbered([4, 5], 10), batch_size=2))
    assert (trainer.global_step, sorted(task.steps)) == (5, [1, 2, 4, 5])
    assert not torch.equal(task.weights[0], task.weights[1])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", {"name": "mesh", "data": 2}])
@pytest.mark.parametrize("batch_size", [3, 1])
def test_two_processes_train_on_the_same_samples(tmp_path, strategy, batch_size):
    """With batches of one sample some replica is without a batch in the middle of an epoch."""
    alone, _ = fit(tmp_path, OUT, replicas=2, batch_size=batch_size)
    together, trainer = fit(tmp_path, OUT, replicas=2, batch_size=batch_size, devices=2, strategy=strategy)
    assert trainer.state.samples_seen == 3 * 16
    assert_close(alone, together)


@pytest.mark.slow
def test_bitwise_holds_on_two_processes(tmp_path):
    options = {"replicas": 2, "batch_size": 1, "reproducible": "bitwise"}
    assert_same_bits(fit(tmp_path, OUT, **options)[0], fit(tmp_path, OUT, devices=2, strategy="ddp", **options)[0])


@pytest.mark.slow
@pytest.mark.parametrize("processes", [{}, {"devices": 2, "strategy": "ddp"}])
def test_a_resume_within_an_epoch_goes_on_without_them(tmp_path, caplog, processes):
    """Dropout, batch norm, AdamW and augmentation, bitwise; the sample is in none of the steps before."""
    left_out = [sample_of_later_steps()]
    uninterrupted, expected = run_resumed(tmp_path / "whole", leave_out_samples=left_out, **processes)
    run_resumed(tmp_path / "parts", max_steps=3, **processes)
    with caplog.at_level(logging.WARNING, "legato"):
        resumed, task = run_resumed(tmp_path / "parts", resume="auto", leave_out_samples=left_out, **processes)
    assert f"leave_out_samples: [] -> {left_out}" in caplog.text or processes
    assert_same_bits(expected, task)
    if not processes:
        assert torch.equal(everything(uninterrupted, expected), everything(resumed, task))


def test_a_resume_with_the_same_samples_says_nothing(tmp_path):
    options = {"enable_checkpointing": True, "log_every_n_steps": 1}
    fit(tmp_path, OUT, **options)
    with unchanged():
        trainer = make_trainer(tmp_path, max_epochs=4, leave_out_samples=OUT, seed=7, **options)
        trainer.fit(Notes(), DataLoader(Numbered(), batch_size=4, shuffle=True), resume="auto")
    assert trainer.global_step == 20


class Stream(IterableDataset):
    def __iter__(self):
        yield from make_data(8)


def test_what_has_no_indices_is_refused_before_the_first_step(tmp_path):
    for loader, message in (
        (DataLoader(Stream(), batch_size=2), "is a stream"),
        ([DataLoader(make_data(8)), DataLoader(make_data(8))], "several loaders"),
        (DataLoader(make_data(8)), "contains 17, but the last index is 7"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_trainer(tmp_path, leave_out_samples=OUT).fit(Tiny(), loader)
    for wrong in ([-1], [True], ["a"], 3):
        with pytest.raises(ConfigError, match="leave_out_samples"):
            make_trainer(tmp_path, leave_out_samples=wrong)


@pytest.mark.slow
def test_a_replica_that_must_have_a_batch_is_told(tmp_path):
    class Manual(Notes):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(Tiny.training_step(self, batch[:2], batch_idx))
            self.optimizers().step()

    trainer = make_trainer(tmp_path, leave_out_samples=OUT, devices=2, strategy="ddp")
    with pytest.raises(LegatoError, match="leaves a replica without a batch in step"):
        trainer.fit(Manual(), DataLoader(Numbered(), batch_size=1, shuffle=True))


def run_resumed(folder, resume=None, **options):
    trainer, task = make_resumed(folder, [], reproducible="bitwise", **options), Net()
    trainer.fit(task, *loaders(dataset=Augmented()), resume=resume)
    return trainer, task


def sample_of_later_steps():
    """Return a sample that is in none of the first three steps, of 12 samples each, and in no batch of two samples."""
    orders = [permutation(np.arange(SAMPLES), SAMPLES, epoch_key(11, epoch)).tolist() for epoch in range(3)]
    return next(index for index in orders[0][36:48] if all(order.index(index) < 48 for order in orders))
