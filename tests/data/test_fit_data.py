"""Loaders and samplers of every kind yield the expected samples in order."""

import pytest
import torch
from tiny import Tiny, Validated, Watched, assert_close, assert_same_bits, make_data, make_loader, train_by_hand
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from legato.base.errors import ConfigError, DataError


# --- loaders ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("every", "loads"), [(0, [0]), (1, [0, 1, 2, 3]), (2, [0, 2])])
def test_loaders_are_asked_for_again(trainer, every, loads):
    class Growing(Validated):
        def __init__(self):
            super().__init__()
            self.train_asked, self.val_asked = [], []

        def train_dataloader(self):
            self.train_asked.append(self.current_epoch)
            return make_loader(4 * (1 + self.current_epoch))

        def val_dataloader(self):
            self.val_asked.append(self.current_epoch)
            return make_loader(8)

    task, made = Growing(), trainer(max_epochs=4, reload_dataloaders_every_n_epochs=every)
    made.fit(task)
    assert task.train_asked == task.val_asked == loads
    lengths = {0: [1, 1, 1, 1], 1: [1, 2, 3, 4], 2: [1, 1, 3, 3]}[every]
    assert len(task.seen) == sum(lengths)


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1, 2])
def test_a_resume_has_the_loaders_of_the_undisturbed_run(trainer, tmp_path, every):
    class Growing(Validated):
        def train_dataloader(self):
            return make_loader(8 + 4 * self.current_epoch)

        def val_dataloader(self):
            return make_loader(8 + 4 * self.current_epoch)

    def run(resume=None, **options):
        task, made = Growing(), trainer(max_epochs=4, reload_dataloaders_every_n_epochs=every, **options)
        made.fit(task, resume=resume)
        return task, made

    undisturbed, made = run()
    for stop in range(1, made.global_step):
        run(max_steps=stop)[1].save_checkpoint(tmp_path / f"{stop}")
        task, again = run(tmp_path / f"{stop}")
        assert again.global_step == made.global_step
        assert again.callback_metrics == made.callback_metrics
        assert all(map(torch.equal, task.seen, undisturbed.seen[stop:]))
        assert_same_bits(task, undisturbed)


def test_a_list_of_batches_is_a_loader(trainer):
    task, batches = Tiny(), list(make_loader(18))
    trainer(max_epochs=2).fit(task, batches)
    assert_same_bits(task, train_by_hand(Tiny(), batches, epochs=2))


def test_a_list_of_batches_is_dealt_out_to_replicas(trainer):
    task, batches = Tiny(), list(make_loader(18))
    made = trainer(replicas=2)
    made.fit(task, batches)
    assert made.global_step == 3
    assert_close(task, train_by_hand(Tiny(), batches, accumulate=2))


class Endless:
    """An endless custom loader with a length."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        while True:
            yield from self.batches


def test_an_endless_loader_ends_at_its_length(trainer):
    task, batches = Validated(), list(make_loader(18))
    made = trainer(max_epochs=2, num_sanity_val_steps=0)
    made.fit(task, Endless(batches), Endless(batches[:2]))
    assert (made.global_step, made.num_val_batches) == (10, [2])
    assert_same_bits(task, train_by_hand(Validated(), batches, epochs=2))


class EndlessLoader(DataLoader):
    """An endless subclass of torch's DataLoader with a length."""

    def __len__(self):
        return 4

    def __iter__(self):
        while True:
            yield from super().__iter__()


def test_an_endless_subclass_of_torchs_loader_ends_at_its_length(trainer):
    task, data = Validated(), make_data(18)
    made = trainer(max_epochs=2, num_sanity_val_steps=0)
    made.fit(task, EndlessLoader(data, batch_size=4), EndlessLoader(data, batch_size=4))
    assert (made.global_step, made.num_val_batches) == (8, [4])
    assert_same_bits(task, train_by_hand(Validated(), list(make_loader(18))[:4], epochs=2))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_dataset_without_a_length_is_read_by_its_sampler(trainer, replicas):
    class Unknown(Dataset):
        def __getitem__(self, index):
            return make_data(18)[index]

    loader = DataLoader(Unknown(), batch_size=4, sampler=range(18))
    tasks = Tiny(), Tiny()
    for task, source in zip(tasks, (loader, make_loader(18)), strict=True):
        made = trainer(max_epochs=2, replicas=replicas)
        made.fit(task, source)
        assert made.global_step == (10 if replicas == 1 else 6)
    assert_same_bits(*tasks)


def test_a_list_of_loaders_of_ones_own_is_combined(trainer):
    class Pairs(Tiny):
        def training_step(self, batch, batch_idx):
            assert type(batch) is list
            return sum(self.loss(piece) for piece in batch)

    batches = list(make_loader(18))
    made = trainer(max_epochs=2)
    made.fit(Pairs(), [Endless(batches), Endless(batches[:2])])
    assert made.global_step == 10


class Stream(IterableDataset):
    """Yields the samples of `make_data` one by one, and does not say how many there are."""

    def __init__(self, samples):
        self.data = make_data(samples)

    def __iter__(self):
        yield from (self.data[index] for index in range(len(self.data)))


@pytest.mark.parametrize(("accumulate", "replicas"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_iterable_datasets(trainer, accumulate, replicas):
    task = Tiny()
    options = {"accumulate_grad_batches": accumulate, "replicas": replicas}
    trainer(max_epochs=2, **options).fit(task, DataLoader(Stream(18), batch_size=4))
    assert_close(task, train_by_hand(Tiny(), make_loader(18), epochs=2, accumulate=accumulate * replicas))


def test_iterable_datasets_with_a_limit_and_validation_within_the_epoch(trainer):
    task = Watched()
    made = trainer(max_epochs=2, limit_train_batches=4, val_check_interval=3, num_sanity_val_steps=0)
    made.fit(task, DataLoader(Stream(40), batch_size=4), DataLoader(Stream(8), batch_size=4))
    assert (made.global_step, task.at) == (8, [3, 7])


@pytest.mark.parametrize("limit", ["limit_train_batches", "limit_val_batches"])
def test_a_fraction_of_an_unknown_length_is_refused(trainer, limit):
    with pytest.raises(ConfigError, match=limit):
        trainer(**{limit: 0.5}).fit(Validated(), DataLoader(Stream(8), 4), DataLoader(Stream(8), 4))


def test_a_used_up_iterator_is_an_empty_epoch_and_refused(trainer):
    made = trainer(max_epochs=-1, max_steps=100)
    with pytest.raises(DataError, match="no batch"):
        made.fit(Tiny(), (batch for batch in list(make_loader())))
    assert made.global_step == 5


def test_a_dataloader_subclass_is_passed_through(trainer):
    class Doubled(DataLoader):
        def __iter__(self):
            for inputs, targets in super().__iter__():
                yield 2 * inputs, targets

    task = Tiny()
    trainer(max_epochs=2).fit(task, Doubled(make_data(18), batch_size=4))
    assert_same_bits(task, train_by_hand(Tiny(), Doubled(make_data(18), batch_size=4), epochs=2))


def test_loader_options_are_kept(trainer):
    def collate(samples):
        inputs, targets = zip(*samples, strict=True)
        return 3 * torch.stack(inputs), torch.stack(targets)

    task = Tiny()
    more = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3}
    more["multiprocessing_context"] = "fork"  # from Python 3.14 on the default pickles what workers get
    loader = make_loader(18, collate_fn=collate, **more)
    trainer(max_epochs=2).fit(task, loader)
    assert_same_bits(task, train_by_hand(Tiny(), make_loader(18, collate_fn=collate), epochs=2))


def indices_of(task, data):
    """Which samples a task saw, in order."""
    place = {tuple(row): index for index, row in enumerate(data.tensors[0].tolist())}
    return [place[tuple(row)] for row in torch.cat(task.seen).tolist()]


class Epochs(Sampler):
    """Yields two thirds of the samples, rotated by the epoch set by set_epoch."""

    def __init__(self):
        self.epoch, self.epochs = 0, []

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.epochs.append(epoch)

    def __len__(self):
        return 12

    def __iter__(self):
        yield from ((3 * index + self.epoch) % 18 for index in range(12))


def test_an_own_sampler_gives_the_order_and_is_told_the_epoch(trainer):
    task, sampler = Tiny(), Epochs()
    trainer(max_epochs=3).fit(task, make_loader(18, sampler=sampler))
    assert sorted(set(sampler.epochs)) == [0, 1, 2]
    expected = [(3 * index + epoch) % 18 for epoch in range(3) for index in range(12)]
    assert indices_of(task, make_data(18)) == expected


def test_an_own_batch_sampler_is_taken_by_whole_batches_and_told_the_epoch(trainer):
    class Uneven(Epochs):
        def __len__(self):
            return 3

        def __iter__(self):
            yield from ([self.epoch], [1, 2, 3, 4, 5], [6, 7])

    task, sampler = Tiny(), Uneven()
    data = make_data(18)
    trainer(max_epochs=2, accumulate_grad_batches=2).fit(task, DataLoader(data, batch_sampler=sampler))
    assert sorted(set(sampler.epochs)) == [0, 1]
    assert indices_of(task, data) == [0, 1, 2, 3, 4, 5, 6, 7, 1, 1, 2, 3, 4, 5, 6, 7]
    by_hand = Tiny()
    for epoch in range(2):
        order = [[epoch], [1, 2, 3, 4, 5], [6, 7]]
        train_by_hand(by_hand, DataLoader(data, batch_sampler=order), accumulate=2)
    assert_same_bits(task, by_hand)


def test_a_sampler_within_a_batch_sampler_and_a_dataset_are_told_the_epoch(trainer):
    class Told(Dataset):
        def __init__(self):
            self.data, self.epochs = make_data(18), []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

        def __len__(self):
            return 18

        def __getitem__(self, index):
            return self.data[index]

    sampler, dataset = Epochs(), Told()
    trainer(max_epochs=2).fit(Tiny(), DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, drop_last=False)))
    assert sorted(set(sampler.epochs)) == [0, 1]
    plain = Told()
    trainer(max_epochs=2).fit(Tiny(), DataLoader(plain, batch_size=4, shuffle=True))
    assert sorted(set(dataset.epochs)) == sorted(set(plain.epochs)) == [0, 1]


def test_a_weighted_sampler_draws_by_weight_anew_in_each_epoch(trainer):
    data = make_data(18)
    sampler = WeightedRandomSampler([0.0] * 9 + [1.0] * 9, num_samples=40)

    def run():
        task = Tiny()
        trainer(max_epochs=2).fit(task, DataLoader(data, batch_size=8, sampler=sampler))
        return indices_of(task, data)

    indices = run()
    assert len(indices) == 80
    assert set(indices) == set(range(9, 18))
    assert indices[:40] != indices[40:]
    torch.manual_seed(99)  # the order belongs to the run's seed, not to what was drawn before
    assert run() == indices


def test_a_subset_sampler_draws_its_subset(trainer):
    task, data = Tiny(), make_data(18)
    trainer(max_epochs=2).fit(task, DataLoader(data, 4, sampler=SubsetRandomSampler([2, 3, 5, 7, 11])))
    indices = indices_of(task, data)
    assert sorted(indices[:5]) == sorted(indices[5:]) == [2, 3, 5, 7, 11]


@pytest.mark.parametrize("kind", [SequentialSampler, RandomSampler])
def test_a_sampler_over_other_indices_is_taken_at_its_word(trainer, kind):
    task, data = Tiny(), make_data(18)
    trainer().fit(task, DataLoader(data, 4, sampler=kind(range(6))))
    assert sorted(indices_of(task, data)) == list(range(6))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_distributed_sampler_is_replaced_by_the_pure_order(trainer, shuffle):
    data, runs = make_data(18), []
    for options in (
        {"sampler": DistributedSampler(data, num_replicas=4, rank=2, shuffle=shuffle)},
        {"shuffle": shuffle},
    ):
        task = Tiny()
        trainer(max_epochs=2).fit(task, DataLoader(data, 4, **options))
        runs.append(indices_of(task, data))
    assert runs[0] == runs[1]
    assert sorted(runs[0][:18]) == list(range(18))


@pytest.mark.slow
def test_the_random_numbers_of_a_sample_belong_to_its_place(trainer):
    """Augmentation draws the same with and without workers, and another seed draws others."""

    class Noisy(TensorDataset):
        def __getitem__(self, index):
            inputs, targets = super().__getitem__(index)
            return inputs + torch.rand(3), targets

    def run(**options):
        task, seed = Tiny(), options.pop("seed", 0)
        loader = DataLoader(Noisy(*make_data(18).tensors), 4, shuffle=True, **options)
        trainer(max_epochs=2, seed=seed).fit(task, loader)
        return task

    first = run()
    assert_same_bits(first, run(num_workers=1))
    assert not torch.equal(torch.cat(first.seen), torch.cat(run(seed=1).seen))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"strategy": "ddp", "devices": 2}])
def test_the_lengths_are_known_after_the_run(trainer, options):
    made = trainer(limit_train_batches=3, limit_val_batches=2, num_sanity_val_steps=0, **options)
    replicas = []

    class Asks(Validated):
        def configure_optimizers(self):
            replicas.append(self.trainer.replicas)
            return super().configure_optimizers()

        def count_samples(self, batch):
            return 1

    made.fit(Asks(), DataLoader(Stream(9), batch_size=None), make_loader())
    assert made.num_training_batches == 3
    assert made.num_val_batches == [1 if options else 2]  # of one replica
    assert options or replicas == [1]
    assert made.replicas is None


@pytest.mark.slow
def test_the_replicas_are_known_when_optimizers_are_made(trainer):
    class Asks(Tiny):
        def configure_optimizers(self):
            assert self.trainer.replicas == len(self.trainer.strategy.collectives.gather_objects(0))
            return super().configure_optimizers()

    trainer().fit(Asks(), make_loader())
    trainer(strategy="ddp", devices=2).fit(Asks(), make_loader())
