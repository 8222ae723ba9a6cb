"""Several loaders as one: the order on any number of processes and from any position, and real runs."""

import os
import signal
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Tiny, assert_close, assert_same_bits, make_data
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)

import legato as lg
from legato.base.errors import ConfigError, DataError
from legato.trainer.data.dealing import DealtData, EvaluationData, training_data
from legato.trainer.data.sampling import Layout, epoch_key, permutation
from legato.trainer.data.steps import Dealing
from legato.trainer.data.streams import StreamData

BY_POSITION = ("min_size", "max_size_cycle")
MODES = (*BY_POSITION, "max_size", "sequential")


class Numbers(Dataset):
    """Item i is (the number of the dataset, i, a random number); counts its reads."""

    def __init__(self, length, number=0):
        self.length, self.number, self.read = length, number, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read += 1
        return torch.tensor([self.number, index]), torch.rand(1)


def numbered(lengths, batch_sizes, drop_last=False, shuffle=True, **options):
    return [
        DataLoader(Numbers(length, number), batch_size=size, shuffle=shuffle, drop_last=drop_last, **options)
        for number, (length, size) in enumerate(zip(lengths, batch_sizes, strict=True))
    ]


def flat(batch):
    """A batch as plain values, the random numbers among them."""
    if batch is None:
        return None
    if isinstance(batch[0], torch.Tensor):
        return [row.tolist() for row in batch[0]], batch[1].flatten().tolist()
    return [flat(piece) for piece in batch]


def steps_of(loader, epoch, replicas, processes, accumulate, start=0, limit=1.0, kind=DealtData):
    """For each step from `start` on: its samples, its rounds and the batch of each replica and round."""
    steps = []
    for process in range(processes):
        data = kind(loader, Dealing(Layout(replicas, processes), process, accumulate, seed=5), limit)
        for index, step in enumerate(data.epoch(epoch, start)):
            if index == len(steps):
                steps.append((step.samples, step.rounds, {}))
            assert steps[index][:2] == (step.samples, step.rounds)
            for item in step.batches:
                steps[index][2][item.replica, item.batch_idx] = item.samples, flat(item.batch)
    return steps


# --- what stands where ------------------------------------------------------------------------------------------------
sizes = st.lists(st.tuples(st.integers(1, 23), st.integers(1, 5)), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    loaders=sizes,
    mode=st.sampled_from(BY_POSITION),
    drop_last=st.booleans(),
    replicas=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_the_same_steps_on_any_number_of_processes_and_from_any_position(
    loaders, mode, drop_last, replicas, accumulate, epoch, data
):
    lengths, batch_sizes = zip(*loaders, strict=True)
    drop_last &= all(length >= size for length, size in loaders)
    loader = lg.CombinedLoader(numbered(lengths, batch_sizes, drop_last), mode)
    steps = steps_of(loader, epoch, replicas, 1, accumulate)
    batches = [batch for _, _, parts in steps for _, batch in sorted((key[::-1], got) for key, got in parts.items())]
    counts = [length // size if drop_last else -(-length // size) for length, size in loaders]
    total = (min if mode == "min_size" else max)(counts)
    assert len(batches) == (total - total % replicas if drop_last else total)
    for number, count in enumerate(counts):
        pieces = [piece[0] for _, batch in batches for piece in batch if piece[0][0][0] == number]
        passes = [pieces[first : first + count] for first in range(0, len(pieces), count)]
        for rows in passes[: len(passes) - (len(passes[-1]) < count) if passes else 0]:  # each whole pass has all once
            seen = sorted(index for batch in rows for _, index in batch)
            assert len(seen) == len(set(seen)) == (count * batch_sizes[number] if drop_last else lengths[number])
    for samples, _, parts in steps:
        assert samples == sum(count for count, _ in parts.values())
        for count, batch in parts.values():
            assert count == sum(len(piece[0]) for piece in batch)
    if replicas > 1:
        processes = data.draw(st.integers(2, replicas))
        assert steps_of(loader, epoch, replicas, processes, accumulate) == steps
    start = data.draw(st.integers(0, len(steps)))
    again = lg.CombinedLoader(numbered(lengths, batch_sizes, drop_last), mode)
    assert steps_of(again, epoch, replicas, 1, accumulate, start) == steps[start:]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_combined_is_what_lightning_combines(mode):
    """On one process and in order: the batches that zipping the loaders by hand gives."""
    lengths, batch_sizes = (7, 20, 9), (2, 3, 4)
    rows = [[flat(batch)[0] for batch in loader] for loader in numbered(lengths, batch_sizes, shuffle=False)]
    most = max(map(len, rows))
    expected = {
        "min_size": [list(row) for row in zip(*rows, strict=False)],
        "max_size_cycle": [[row[index % len(row)] for row in rows] for index in range(most)],
        "max_size": [[row[index] if index < len(row) else None for row in rows] for index in range(most)],
        "sequential": [batch for row in rows for batch in row],
    }[mode]
    loader = lg.CombinedLoader(numbered(lengths, batch_sizes, shuffle=False), mode)
    only = (lambda piece: piece and piece[0]) if mode != "sequential" else (lambda piece: piece)
    plain = lambda batch: [only(piece) for piece in batch] if mode != "sequential" else batch[0]  # noqa: E731
    assert [plain(flat(batch)) for batch, _, _ in loader] == expected
    assert len(loader) == len(expected)
    dealt = steps_of(loader, 0, 1, 1, 1, kind=DealtData if mode in BY_POSITION else StreamData)
    assert [plain(batch) for _, _, parts in dealt for _, batch in parts.values()] == expected
    index = [(batch_idx, number) for _, batch_idx, number in loader]
    if mode == "sequential":
        assert index == [(inner, number) for number, row in enumerate(rows) for inner in range(len(row))]
    else:
        assert index == [(number, 0) for number in range(len(expected))]


def test_each_pass_of_a_shorter_loader_has_an_order_of_its_own():
    loader = lg.CombinedLoader(numbered((64, 8), (2, 4)), "max_size_cycle")
    passes = [
        tuple(tuple(row[1] for row in batch[1][0]) for _, _, parts in half for _, batch in parts.values())
        for epoch in range(3)
        for steps in [steps_of(loader, epoch, 1, 1, 1)]
        for half in [steps[first : first + 2] for first in range(0, 32, 2)]
    ]
    assert len(passes) == len(set(passes)) == 48
    assert all(sorted(index for batch in pass_batches for index in batch) == list(range(8)) for pass_batches in passes)


def test_the_first_loader_has_the_order_that_it_has_alone_and_the_second_another_one():
    loader = lg.CombinedLoader(numbered((40, 40), (4, 4)), "max_size_cycle")
    steps = steps_of(loader, 3, 2, 2, 1)
    (first, second) = (
        [row[1] for _, _, parts in steps for _, (_, batch) in sorted(parts.items()) for row in batch[position][0]]
        for position in (0, 1)
    )
    assert first == permutation(torch.arange(40).numpy(), 40, epoch_key(5, 3)).tolist()
    assert sorted(second) == sorted(first)
    assert second != first


def test_going_on_at_a_late_position_reads_nothing_before_it():
    datasets = Numbers(10**12), Numbers(10**6)
    loaders = {"a": DataLoader(datasets[0], 1000, shuffle=True), "b": DataLoader(datasets[1], 1000, shuffle=True)}
    data = DealtData(lg.CombinedLoader(loaders, "max_size_cycle"), Dealing(Layout(4, 2), 1, 2, seed=1))
    step = next(data.epoch(7, start_step=10**8))
    assert [data.read for data in datasets] == [4000, 4000]
    assert step.samples == 16000
    assert len(step.batches) == 4


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_is_the_same_in_workers(workers):
    loader = lg.CombinedLoader(numbered((10, 24), (2, 3), num_workers=workers), "max_size_cycle")
    expected = steps_of(lg.CombinedLoader(numbered((10, 24), (2, 3)), "max_size_cycle"), 1, 2, 1, 1)
    assert steps_of(loader, 1, 2, 1, 1) == expected
    assert steps_of(loader, 1, 2, 1, 1, start=3) == expected[3:]


class Epochs(Numbers):
    """Yields the epoch set by set_epoch instead of its number."""

    def set_epoch(self, epoch):
        self.number = epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_is_told_the_epoch_of_each_pass_wherever_it_is(workers):
    short = DataLoader(Epochs(4), 2, num_workers=workers)
    loader = lg.CombinedLoader([DataLoader(Numbers(12), 2), short], "max_size_cycle")
    for epoch in (0, 1):
        steps = steps_of(loader, epoch, 2, 1, 2)
        epochs = {
            (place[1] * 2 + place[0]): batch[1][0][0][0] for _, _, parts in steps for place, (_, batch) in parts.items()
        }
        assert [epochs[position] for position in range(6)] == [3 * epoch + number for number in (0, 0, 1, 1, 2, 2)]


def test_samplers_of_the_users_own():
    weighted = DataLoader(Numbers(9), 3, sampler=WeightedRandomSampler([1.0] * 8 + [5.0], 12))
    by_batches = DataLoader(Numbers(9, 1), batch_sampler=Lengths([4, 1, 2]))
    loader = lg.CombinedLoader((weighted, by_batches), "max_size_cycle")
    steps = steps_of(loader, 2, 3, 1, 1)
    assert steps == steps_of(loader, 2, 3, 3, 1)
    assert [samples for samples, _, _ in steps] == [3 * 3 + 7, 3 + 4]
    with pytest.raises(DataError, match="'1' drew 2 indices in epoch 0, but its length is 3"):
        steps_of(
            lg.CombinedLoader((weighted, DataLoader(Numbers(9), batch_sampler=Lengths([4, 1], says=3)))), 0, 1, 1, 1
        )


class Lengths(BatchSampler):
    """Batches of these lengths."""

    def __init__(self, lengths, says=None):
        super().__init__(SequentialSampler(range(9)), 1, False)
        self.lengths, self.says = lengths, says or len(lengths)

    def __iter__(self):
        yield from ([*range(length)] for length in self.lengths)

    def __len__(self):
        return self.says


# --- streams ----------------------------------------------------------------------------------------------------------
class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        yield from ((torch.tensor([0, index]), torch.rand(1)) for index in range(self.length))


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_among_them_is_read_by_everyone_and_dealt_out_by_whole_batches(mode):
    def make():
        return lg.CombinedLoader([DataLoader(Stream(14), 2), *numbered((9,), (2,))], mode)

    assert isinstance(training_data(make(), Dealing(Layout(1, 1), 0), 1.0, in_order=False), StreamData)
    steps = steps_of(make(), 1, 3, 1, 2, kind=StreamData)
    total = {"min_size": 5, "sequential": 12}.get(mode, 7)
    assert sum(len(parts) for _, _, parts in steps) == total
    assert steps_of(make(), 1, 3, 2, 2, kind=StreamData) == steps
    assert steps_of(make(), 1, 3, 3, 2, start=1, kind=StreamData) == steps[1:]
    for samples, _, parts in steps:
        assert samples == sum(count for count, _ in parts.values())


def test_a_loader_that_turns_out_to_be_empty_is_named():
    loader = lg.CombinedLoader({"full": DataLoader(Stream(4), 2), "none": DataLoader(Stream(0), 2)}, "max_size_cycle")
    with pytest.raises(DataError, match="'none' yields no batches"):
        list(loader)
    with pytest.raises(TypeError, match="CombinedLoader has no length because these loaders have none: full, none"):
        len(loader)


# --- its form ---------------------------------------------------------------------------------------------------------
Pair = namedtuple("Pair", ["left", "right"])


def test_a_batch_has_the_form_of_the_loaders():
    form = {"pair": Pair(range(2), (range(3), [range(4)]))}
    (first, *_) = (batch for batch, _, _ in lg.CombinedLoader(form, "max_size"))
    assert first == {"pair": Pair(0, (0, [0]))}
    loader = lg.CombinedLoader(form)
    assert (loader.names, len(loader)) == (["pair.left", "pair.right.0", "pair.right.1.0"], 2)


def test_what_cannot_be_combined():
    with pytest.raises(ConfigError, match="Did you mean 'max_size'"):
        lg.CombinedLoader([range(2)], "maxsize")
    with pytest.raises(DataError, match="at least one loader"):
        lg.CombinedLoader({})
    with pytest.raises(DataError, match="'a' is itself a CombinedLoader"):
        lg.CombinedLoader({"a": lg.CombinedLoader([range(2)])})
    with pytest.raises(DataError, match="'1' is empty"):
        lg.CombinedLoader([range(2), range(0)])


# --- evaluation -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize(
    ("mode", "batches", "loaders"), [("max_size", 7, 1), ("min_size", 5, 1), ("sequential", 12, 2)]
)
def test_an_evaluation_takes_each_combined_batch_once(trainer, mode, batches, loaders, processes):
    loader = lg.CombinedLoader(numbered((9, 20), (2, 3), shuffle=False), mode)
    parts = loader.flattened if mode == "sequential" else [loader]
    items = []
    for process in range(processes):
        data = EvaluationData(parts, Dealing(Layout(3, processes), process, seed=1))
        assert sum(data.counts) == batches
        items += [(item.dataloader_idx, item.batch_idx, item.replica, item.samples) for item in data.batches(0)]
    assert len(items) == len(set(items)) == batches
    task = Pairs()
    trainer(num_sanity_val_steps=0).validate(task, loader)
    assert (len(task.forms), len({index for _, index in task.forms})) == (batches, loaders)


class Graphs:
    """A custom batch class that is iterable like a loader."""

    def __init__(self, points):
        self.points = points

    def __iter__(self):
        return iter([("points", self.points)])

    def to(self, device):
        return Graphs(self.points.to(device))


@dataclass
class Named:
    points: torch.Tensor


POINTS = torch.ones(4, 2)
BATCH_LISTS = {
    "tensors": [POINTS, POINTS],
    "tuples": [(POINTS, POINTS), (POINTS, POINTS)],
    "lists, as a DataLoader makes them": [[POINTS, POINTS], [POINTS, POINTS]],
    "tuples with sets": [(POINTS, {"a", "b"}), (POINTS, {"c"})],
    "dicts": [{"points": POINTS}, {"points": POINTS}],
    "a class": [Graphs(POINTS), Graphs(POINTS)],
    "a dataclass": [Named(POINTS), Named(POINTS)],
    "a tuple of them": ((POINTS, POINTS), (POINTS, POINTS)),
}


class Kinds(Tiny):
    """Records the batches of each loader that its steps received."""

    def __init__(self):
        super().__init__()
        self.received = []

    def training_step(self, batch, batch_idx):
        self.received.append((type(batch), 0))
        return self(torch.zeros(1, 3)).sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.received.append((type(batch), dataloader_idx))

    test_step = predict_step = validation_step


@pytest.mark.parametrize("batches", BATCH_LISTS.values(), ids=BATCH_LISTS)
def test_a_list_of_batches_is_one_loader_in_training_and_evaluation(trainer, batches):
    for stage in ("fit", "validate", "test", "predict"):
        task = Kinds()
        getattr(trainer(max_epochs=1), stage)(task, batches)
        assert task.received == [(type(batches[0]), 0)] * 2, stage


def test_lists_of_loaders_stay_several(trainer):
    for loaders in ([[(POINTS, POINTS)], [(POINTS, POINTS)]], [Twice(), Twice()], [range(1), range(1)]):
        task = Kinds()
        trainer().validate(task, loaders)
        assert [loader for _, loader in task.received] == [0, 1]
    with pytest.raises(DataError, match="must be a DataLoader or another iterable of batches, got TensorDataset"):
        trainer().validate(Kinds(), [make_data(4), make_data(4)])


class Twice:
    """Loader that is no DataLoader."""

    def __iter__(self):
        return iter([POINTS])


# --- runs -------------------------------------------------------------------------------------------------------------
class Pairs(Tiny):
    """Learns from a batch of each of two loaders; records these batches."""

    def __init__(self):
        super().__init__()
        self.forms = []

    def training_step(self, batch, batch_idx):
        first, second = batch["first"], batch["second"]
        losses = [self.loss(piece) for piece in (first, second) if piece is not None]
        self.log("loss", sum(losses), on_epoch=True)
        return sum(losses)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.forms.append((type(batch), dataloader_idx))


def pair(first=18, second=10, **options):
    return {
        "first": DataLoader(make_data(first), batch_size=4, **options),
        "second": DataLoader(make_data(second), batch_size=3, **options),
    }


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_a_run_is_that_of_the_loop_by_hand(trainer, mode):
    """Two batches make a step, weighted by the samples of both loaders."""
    loaders, by_hand = pair(), Pairs()
    optimizer = by_hand.configure_optimizers()
    for _ in range(2):
        batches = [batch for batch, _, _ in lg.CombinedLoader(loaders, mode)]
        for window in (batches[first : first + 2] for first in range(0, len(batches), 2)):
            counts = [sum(len(piece[0]) for piece in batch.values() if piece is not None) for batch in window]
            optimizer.zero_grad()
            for batch, count in zip(window, counts, strict=True):
                (sum(by_hand.loss(piece) for piece in batch.values() if piece) * count / sum(counts)).backward()
            optimizer.step()
    task = Pairs()
    train_loader = loaders if mode == "max_size_cycle" else lg.CombinedLoader(loaders, mode)
    trainer(max_epochs=2, accumulate_grad_batches=2).fit(task, train_loader)
    assert_close(task, by_hand)
    shared = Pairs()
    made = trainer(max_epochs=2, replicas=2)
    made.fit(shared, train_loader)
    assert_close(shared, by_hand)
    assert made.train_dataloader is train_loader


def test_sequential_loaders_are_one_long_one(trainer):
    task, reference = Tiny(), Tiny()
    trainer(max_epochs=2).fit(task, lg.CombinedLoader(list(pair().values()), "sequential"))
    trainer(max_epochs=2).fit(reference, [batch for loader in pair().values() for batch in loader])
    assert_same_bits(task, reference)


def test_lists_and_limits(trainer):
    class Lists(Tiny):
        def training_step(self, batch, batch_idx):
            assert type(batch) is list
            return sum(self.loss(piece) for piece in batch)

    made = trainer(max_epochs=3, limit_train_batches=2)
    made.fit(Lists(), list(pair().values()))
    assert (made.global_step, made.state.samples_seen) == (6, 3 * 2 * 7)
    made = trainer(overfit_batches=1, num_sanity_val_steps=0)
    task = Pairs()
    made.fit(task, pair())
    assert made.global_step == 1


def test_ranks_that_bring_their_own_share(trainer):
    task = Pairs()
    made = trainer(use_distributed_sampler=False)
    made.fit(task, pair())
    assert made.global_step == 5


class Noisy(Dataset):
    """Random augmentation of `make_data`."""

    def __init__(self, samples):
        self.data = make_data(samples)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        inputs, target = self.data[index]
        return inputs + 0.1 * torch.randn(3), target


class DiesOnce(lg.Callback):
    """Kills rank 1 in the middle of a step."""

    def __init__(self, mark):
        self.mark = mark

    def on_before_optimizer_step(self, trainer, task, optimizer):
        if (trainer.global_rank, trainer.global_step) == (1, 5) and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_with_the_same_bits(trainer, tmp_path):
    """Shuffled, augmented, in the middle of an epoch and of a pass of the shorter loader, on other processes."""

    def loaders(workers):
        options = {"shuffle": True, "num_workers": workers}
        return {"first": DataLoader(Noisy(30), 2, **options), "second": DataLoader(Noisy(8), 3, **options)}

    options = {"replicas": 3, "max_epochs": 2, "reproducible": "bitwise", "threads": 1}
    undisturbed, killed = Pairs(), Pairs()
    trainer(**options).fit(undisturbed, loaders(0))
    saver = lg.callbacks.Checkpoint(every_n_train_steps=2)
    callbacks = [saver, DiesOnce(tmp_path / "x")]
    two = {"strategy": "ddp", "devices": 2, "max_restarts": 1, "enable_checkpointing": True}
    made = trainer(callbacks=callbacks, **two, **options)
    made.fit(killed, loaders(1))
    assert (tmp_path / "x").exists()
    assert made.global_step == 10
    assert_same_bits(killed, undisturbed)
