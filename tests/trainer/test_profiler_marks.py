"""torch's functions are called without profiler ranges only where no profiler can observe the difference."""

import functools

import pytest
import torch
from tiny import Tiny, make_loader
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset

from legato.base.torch_private import step_of
from legato.trainer.data.loaders import iterate_loader

MARKS = {"Optimizer.step#SGD.step", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"}


def marks(profile):
    return {event.key for event in profile.key_averages()} & MARKS


class Profiled(Tiny):
    """Runs a profiler from its third step to its fifth."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]).__enter__()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 4:
            self.profile.__exit__(None, None, None)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # of torch 2.10
def test_a_profiler_sees_them_from_when_it_runs(trainer):
    task = Profiled()
    trainer(max_epochs=1).fit(task, make_loader(32))
    assert marks(task.profile) == MARKS
    counts = {event.key: event.count for event in task.profile.key_averages() if event.key in MARKS}
    assert counts["Optimizer.step#SGD.step"] == 3


def some_optimizer():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 0.5)
    return torch.optim.SGD([parameter], lr=0.1, momentum=0.9)


def weights(optimizer):
    return optimizer.param_groups[0]["params"][0].detach().clone()


def test_a_step_without_them_is_the_same():
    plain, marked = some_optimizer(), some_optimizer()
    for _ in range(3):
        plain.step()
        step_of(marked)()
    assert torch.equal(weights(plain), weights(marked))
    assert step_of(some_optimizer())(lambda: 7) == 7


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_what_is_hooked_to_a_step_is_called(everywhere, after):
    optimizer, seen = some_optimizer(), []
    register = {
        (False, False): optimizer.register_step_pre_hook,
        (False, True): optimizer.register_step_post_hook,
        (True, False): register_optimizer_step_pre_hook,
        (True, True): register_optimizer_step_post_hook,
    }[everywhere, after]
    handle = register(lambda *arguments: seen.append(weights(optimizer)))
    before = weights(optimizer)
    step_of(optimizer)()
    handle.remove()
    step_of(optimizer)()
    assert len(seen) == 1
    assert torch.equal(seen[0], before) == (not after)


def test_a_step_that_was_replaced_is_called():
    optimizer, seen = some_optimizer(), []
    optimizer.step = seen.append
    step_of(optimizer)("closure")
    assert seen == ["closure"]

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            seen.append("own")
            return super().step(closure)

    custom = Own([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    step_of(custom)()
    assert seen == ["closure", "own"]


def test_a_step_that_was_replaced_for_all_is_called(monkeypatch):
    """functools.wraps gives it every mark of the original."""
    seen, original = [], torch.optim.SGD.step

    @functools.wraps(original)
    def patched(self, closure=None):
        seen.append("patched")
        return original(self, closure)

    for _ in range(2):
        some_optimizer()  # the first of a class marks its step
        monkeypatch.setattr(torch.optim.SGD, "step", patched)
    optimizer = some_optimizer()
    step_of(optimizer)()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step_of(optimizer)()
    assert seen == ["patched", "patched"]


def test_an_optimizer_that_never_called_its_base_is_stepped():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner

        def step(self, closure=None):
            return self.inner.step(closure)

    inner = some_optimizer()
    before = weights(inner)
    step_of(Wrapper(inner))()
    assert not torch.equal(weights(inner), before)


def test_a_step_replaced_beyond_a_schedulers_is_called():
    optimizer = some_optimizer()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    of_scheduler, seen = optimizer.step, []

    def watched(closure=None):
        seen.append(closure)
        return of_scheduler(closure)

    optimizer.step = watched
    step_of(optimizer)(None)
    assert seen == [None]


def test_schedulers_see_that_the_optimizer_came_first():
    """They warn otherwise, which is an error here."""
    optimizer, reference = some_optimizer(), some_optimizer()
    schedulers = [torch.optim.lr_scheduler.StepLR(scheduled, 1, gamma=0.5) for scheduled in (optimizer, reference)]
    for _ in range(3):
        step_of(optimizer)()
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
    assert torch.equal(weights(optimizer), weights(reference))


class MoreThanItSays(IterableDataset):
    """Says that it has two batches, and has three."""

    def __len__(self):
        return 2

    def __iter__(self):
        yield from map(torch.tensor, range(3))


@pytest.mark.slow
def test_batches_without_them_are_the_same():
    for dataset in (MoreThanItSays(), torch.arange(3)):
        for workers in (0, 1):
            loader = DataLoader(dataset, batch_size=None, num_workers=workers)
            assert [int(batch) for batch in iterate_loader(iter(loader))] == [0, 1, 2]


def test_a_stream_longer_than_it_said_is_warned_of():
    loader = DataLoader(MoreThanItSays(), batch_size=None)
    assert len(loader) == 2
    with pytest.warns(UserWarning, match="was reported to be 2.* but 3 samples have been fetched"):
        assert [int(batch) for batch in iterate_loader(iter(loader))] == [0, 1, 2]


class OnlyNext:
    def __init__(self):
        self.left = 3

    def __next__(self):
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        return self.left


def test_an_iterator_stays_open_for_another_epoch():
    """A loop over it also leaves it open if the loop ends first."""
    endless = iter(range(10**9))
    generator = (number for number in endless)
    for start in (0, 2):
        reader = iterate_loader(generator)
        assert [next(reader), next(reader)] == [start, start + 1]
        del reader
    assert list(iterate_loader(OnlyNext())) == [2, 1, 0]


def test_an_iterator_of_its_own_is_read_as_it_is(trainer):
    class Doubled(DataLoader):
        def __iter__(self):
            return map(torch.mul, super().__iter__(), iter(lambda: 2, 0))

    assert [int(batch) for batch in iterate_loader(iter(Doubled(torch.arange(3), None)))] == [0, 2, 4]
