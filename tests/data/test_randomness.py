"""Keyed random numbers: the same draws for the same key, in any process and after any history."""

import copy
import functools
import logging
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset, default_collate, get_worker_info

from legato.base.errors import ConfigError
from legato.trainer import accelerators
from legato.trainer.data.randomness import KeyedDataset, mix, seed_everything, seed_generators
from legato.trainer.data.sampling import Deal, DealtBatches, EpochOrder, KeyedIndices, epoch_key, permutation
from legato.trainer.processes.launch import warm_up

Draws = tuple[Any, ...]


def draw() -> Draws:
    """Draw from each generator in two ways; one of them keeps half of a pair for the next call."""
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.standard_normal(),
        torch.rand(()).item(),
        torch.randn(()).item(),
    )


@pytest.fixture(scope="module", autouse=True)
def _loaded_server() -> None:
    """Loader workers are forked from a server; who starts it decides whether it has imported torch."""
    warm_up()


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


# --- seeding --------------------------------------------------------------------------------------------------------


def test_seed_everything_seeds_as_each_library_does_itself() -> None:
    assert seed_everything(1234) == 1234
    drawn = draw()
    random.seed(1234)
    np.random.seed(1234)
    torch.manual_seed(1234)
    assert draw() == drawn


def test_seed_everything_draws_a_seed_and_returns_it() -> None:
    random.seed(0)
    chosen = seed_everything()
    drawn = draw()
    assert 0 <= chosen < 2**32
    random.seed(0)
    another_seed = seed_everything()
    assert another_seed != chosen  # drawn from the system, not from a generator that a script has seeded
    assert seed_everything(chosen) == chosen
    assert draw() == drawn
    assert seed_everything(np.uint32(7)) == 7


@pytest.mark.parametrize("wrong", [-1, 2**32, 1.5, "12", "twelve", [3]])
def test_seed_everything_refuses_other_seeds(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="The seed must be an integer from 0 to 4294967295, got"):
        seed_everything(wrong)


def test_seed_everything_logs_when_verbose(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="legato"):
        seed_everything(5, workers=True, verbose=False)
        assert not caplog.records
        seed_everything(5)
    assert caplog.messages == ["Seed set to 5"]


@settings(deadline=None)
@given(key=st.integers(0, 2**64 - 1), draws=st.integers(0, 3))
def test_a_key_forgets_all_history(key: int, draws: int) -> None:
    seed_generators(key)
    first = draw()
    for _ in range(draws):  # leaves halves of pairs behind
        random.gauss(0, 1), np.random.standard_normal(), torch.randn(())
    seed_generators(key)
    assert draw() == first


def test_different_keys_give_different_streams_in_every_generator() -> None:
    keys = [*range(300), *(1 << bit for bit in range(9, 64)), *(mix(0, 0, position) for position in range(300))]
    keys += [5 + (place << 32) for place in range(1, 100)]  # alike in the low 32 bits
    drawn = []
    for key in keys:
        seed_generators(key)
        drawn.append(draw())
    assert len(set(keys)) == len(keys)
    for generator in zip(*drawn, strict=True):
        assert len(set(generator)) > len(keys) - 3  # torch.rand has 24 bits: single numbers may meet
    together = [(a[0], a[2], a[4], a[5]) for a in drawn]
    assert len(set(together)) == len(keys)


def test_numpy_and_torch_do_not_share_a_stream() -> None:
    """Both are the Mersenne Twister, seeded alike: with the same 32 bits they hold the same words."""

    def words() -> tuple[set[int], set[int]]:
        of_numpy = np.random.randint(0, 2**32, 200, dtype=np.uint32) & 0x7FFFFFFF
        return set(of_numpy.tolist()), set(torch.randint(0, 2**31, (200,)).tolist())

    seed_everything(7, verbose=False)
    assert set.intersection(*words())
    for key in (0, 7, mix(1, 2, 3)):
        seed_generators(key)
        assert not set.intersection(*words()), key


def test_a_key_seeds_apples_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are some: their generator is not torch's default one."""
    keys: list[int] = []
    monkeypatch.setattr(accelerators, "device_module", lambda: torch.mps)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "manual_seed", keys.append)
    seed_generators(mix(1, 2))
    assert keys == [mix(1, 2)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_key_seeds_every_cuda_device() -> None:
    torch.cuda.init()
    states = torch.cuda.get_rng_state_all()
    try:
        drawn = []
        for key in (mix(1), mix(2), mix(1)):
            seed_generators(key)
            drawn.append([torch.rand(8, device=f"cuda:{d}").tolist() for d in range(torch.cuda.device_count())])
        assert drawn[0] == drawn[2]
        assert all(ours != theirs for ours, theirs in zip(drawn[0], drawn[1], strict=True))
    finally:
        torch.cuda.set_rng_state_all(states)


# --- the keyed dataset ----------------------------------------------------------------------------------------------


class Noisy:
    """A dataset whose augmentation draws from all three global generators."""

    def __init__(self, length: int = 61) -> None:
        self.length = length
        self.handle = "closed"

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, *draw()], dtype=torch.float64)


class Fetching(Noisy):
    """Fetches a batch at once, as Hugging Face's datasets do."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] + 1000 for index in indices]


class Stateful(Noisy):
    """Decides itself how it is pickled, for instance to leave an open file behind."""

    def __getstate__(self) -> dict[str, Any]:
        return {"length": self.length}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.length = state["length"]
        self.handle = "opened again"


class ByValue:
    """Travels to a worker by value: a fresh interpreter cannot import a test module by its name."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (cloudpickle.dumps(self.value),)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    def __call__(self, *arguments: Any) -> Any:
        return self.value(*arguments)

    def __getitem__(self, index: Any) -> Any:
        return self.value[index]

    def __len__(self) -> int:
        return len(self.value)


def noisy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    """Collate at random: a mixture of the batch with itself in another order, as mixup does."""
    batch = default_collate(samples)
    return torch.cat([batch, batch[torch.randperm(len(batch))] * np.random.rand() * random.random()], dim=1)


def dealt(length: int, epoch: int, start_step: int = 0) -> DealtBatches:
    deal = Deal(length, batch_size=4, replicas=3, accumulate=2)
    order = functools.partial(permutation, length=length, key=epoch_key(11, epoch))
    return DealtBatches(deal, range(3), EpochOrder(length, order), start_step, epoch)


def same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(actual) == len(expected) and all(map(torch.equal, actual, expected))


@contextmanager
def loading(dataset: Any, collate: Callable[..., Any], batches: DealtBatches, **options: Any) -> Iterator[Any]:
    """A DataLoader whose workers are gone at the end of the block, the kept ones too."""
    loader = DataLoader(dataset, batch_sampler=batches, collate_fn=collate, **options)
    try:
        yield loader
    finally:
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()


def load(dataset: Any, epoch: int, start_step: int = 0, **options: Any) -> list[torch.Tensor]:
    random.random()  # whatever was drawn before
    keyed = KeyedDataset(ByValue(dataset), seed=11)
    with loading(keyed, ByValue(noisy_collate), dealt(len(dataset), epoch, start_step), **options) as loader:
        return list(loader)


def test_a_batch_depends_on_seed_epoch_and_position_alone() -> None:
    dataset = Noisy()
    keyed = KeyedDataset(dataset, seed=3)
    first = keyed.__getitems__(KeyedIndices([5, 6, 7], position=20, epoch=1))
    draw()
    assert same(keyed.__getitems__(KeyedIndices([5, 6, 7], position=20, epoch=1)), first)
    for variant, seed, position, epoch in ((keyed, 3, 21, 1), (keyed, 3, 20, 2), (KeyedDataset(dataset, 4), 4, 20, 1)):
        samples = variant.__getitems__(KeyedIndices([5, 6, 7], position, epoch))
        assert not same(samples, first), (seed, position, epoch)
    seed_generators(mix(3, 1, 20))
    assert same([dataset[5], dataset[6], dataset[7]], first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "context", "workers"),
    [(Noisy(), "spawn", 1), (Fetching(), "forkserver", 2)],
    ids=["single", "whole batches"],
)
def test_workers_load_the_same_bits(dataset: Noisy, context: str, workers: int) -> None:
    at_home = load(dataset, epoch=1)
    assert len(at_home) == 16  # 61 samples in fours
    away = load(dataset, epoch=1, num_workers=workers, multiprocessing_context=context)
    assert same(away, at_home)
    assert sorted(torch.cat(away)[:, 0].long().tolist()) == [
        index + (1000 if isinstance(dataset, Fetching) else 0) for index in range(61)
    ]


def test_loading_from_the_middle_gives_the_rest() -> None:
    batches = load(Noisy(), epoch=2)
    # 3 replicas of 2 batches a step: the first step is the first 6 batches
    assert same(load(Noisy(), epoch=2, start_step=1), batches[6:])
    assert same(load(Noisy(), 2, 2, num_workers=2, multiprocessing_context="forkserver"), batches[12:])


def test_the_epoch_reaches_workers_that_are_kept() -> None:
    dataset = Noisy()
    expected = [load(dataset, epoch=epoch) for epoch in range(3)]
    assert not same(expected[0], expected[1])
    batches = dealt(len(dataset), epoch=0)
    options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "forkserver"}
    keyed = KeyedDataset(ByValue(dataset), seed=11)
    with loading(keyed, ByValue(noisy_collate), batches, **options) as loader:
        for epoch in range(3):
            following = dealt(len(dataset), epoch)
            batches.order, batches.epoch = following.order, epoch
            assert same(list(loader), expected[epoch])


def test_any_share_of_the_replicas_draws_the_same() -> None:
    dataset = Noisy()
    by_position: dict[int, list[torch.Tensor]] = {}
    for shares in ([range(3)], [range(2), range(2, 3)], [range(1), range(1, 2), range(2, 3)]):
        for share in shares:
            batches = dealt(len(dataset), epoch=0)
            batches.replicas = share
            keyed = KeyedDataset(dataset, seed=11)
            for indices, batch in zip(batches, DataLoader(keyed, batch_sampler=batches), strict=True):
                by_position.setdefault(indices.position, []).append(batch)
    assert len(by_position) == 16
    assert all(len(drawn) == 3 and same(drawn[1:], drawn[:1] * 2) for drawn in by_position.values())


def open_handle(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.handle = "open"


def handle_of(samples: list[Any]) -> str:
    info = get_worker_info()
    assert info is not None
    return str(info.dataset._wrapped_dataset.handle)


@pytest.mark.slow
def test_a_worker_init_function_reaches_the_real_dataset() -> None:
    batches = DealtBatches(Deal(4, 2, 1, 1), range(1), EpochOrder(4, lambda positions: positions))
    options = {"num_workers": 1, "multiprocessing_context": "forkserver", "worker_init_fn": ByValue(open_handle)}
    with loading(KeyedDataset(Noisy(4), 0), ByValue(handle_of), batches, **options) as loader:
        assert list(loader) == ["open", "open"]


def test_the_wrapped_dataset_shows_through() -> None:
    dataset = Noisy()
    keyed = KeyedDataset(dataset, seed=1)
    assert len(keyed) == 61
    assert keyed.handle == "closed"
    keyed.handle = "open"
    assert dataset.handle == "open"
    assert keyed[3][0] == 3
    with pytest.raises(AttributeError, match="'Noisy' object has no attribute 'missing'"):
        _ = keyed.missing
    # names that a dataset is likely to use are the wrapped one's
    subset = KeyedDataset(Subset(dataset, [4, 2]), seed=1)
    assert subset.dataset is dataset
    assert [int(sample[0]) for sample in subset.__getitems__(KeyedIndices([1, 0], 0))] == [2, 4]


def test_pickling_and_copying_keep_the_wrapper() -> None:
    keyed = KeyedDataset(Stateful(), seed=6)
    indices = KeyedIndices([1, 2], position=8)
    expected = keyed.__getitems__(indices)
    for copied in (
        copy.copy(keyed),
        copy.deepcopy(keyed),
        cloudpickle.loads(cloudpickle.dumps(keyed)),
        *(pickle.loads(cloudpickle.dumps(keyed, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)),
    ):
        assert type(copied) is KeyedDataset
        assert same(copied.__getitems__(indices), expected)
        assert copied.handle == ("closed" if copied._wrapped_dataset is keyed._wrapped_dataset else "opened again")
    with pytest.raises(AttributeError):
        _ = KeyedDataset.__new__(KeyedDataset).anything
