"""Keyed random numbers: each number depends only on where it is drawn, not on earlier draws.

Before a batch is loaded, and before each replica's forward pass, Python's, NumPy's and torch's generators are seeded
from a key: `mix` of seed, epoch and position, or of seed, step and replica. Saving generator states instead would not
work, because workers' states cannot be saved, prefetching consumes random numbers early, and creating an iterator draws
from the global generator. The keys for weight updates, and for hooks that every rank calls, do not depend on the
replica.
"""

import logging
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import Dataset

from ...base.errors import ConfigError
from .. import accelerators
from .sampling import FIRST, GAMMA, KeyedIndices
from .sampling import mix as mix

SEED_LIMIT = 1 << 32  # NumPy's legacy seed has 32 bits
# Key that separates the random numbers of a weight update from those of a replica
UPDATE = 0x757064617465

logger = logging.getLogger(__name__)
# random.seed spends 0.5 us on type checks; the C generator behind it takes an integer directly
_python: Any = random.seed.__self__  # type: ignore[attr-defined]
_reseed_python = super(random.Random, _python).seed
_reseed_numpy = np.random.seed
_reseed_torch = torch.default_generator.manual_seed


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python's, NumPy's and torch's generators (on all devices) and return the seed.

    Args:
        seed: 0 to 2^32 - 1. If None, a seed is drawn.
        workers: accepted for compatibility with Lightning; the random numbers that loader workers draw always depend on
            the batch.
        verbose: whether to log the seed.

    Raises ConfigError for an invalid seed.
    """
    chosen: Any = secrets.randbelow(SEED_LIMIT) if seed is None else seed
    if not isinstance(chosen, (int, np.integer)) or not 0 <= chosen < SEED_LIMIT:
        raise ConfigError(f"The seed must be an integer from 0 to {SEED_LIMIT - 1}, got {seed!r}.")
    random.seed(int(chosen))  # random.seed would hash a NumPy integer
    np.random.seed(chosen)
    torch.manual_seed(chosen)
    if verbose:
        logger.info("Seed set to %d", chosen)
    return int(chosen)


def generator_states() -> tuple[Any, Any, torch.Tensor, list[torch.Tensor]]:
    """Return the states of Python's, NumPy's and torch's generators, including those of devices in use."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), accelerators.generator_states()


def set_generators(states: tuple[Any, Any, torch.Tensor, list[torch.Tensor]]) -> None:
    """Set the generators to the states returned by `generator_states`."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    accelerators.set_generators(states[3])


def same_states(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Return whether two results of `generator_states` are equal, that is, whether nothing was drawn between them."""
    tensors = zip((first[2], *first[3]), (second[2], *second[3]), strict=True)
    numpys = np.array_equal(first[1][1], second[1][1]) and first[1][2:] == second[1][2:]
    return bool(first[0] == second[0]) and numpys and all(torch.equal(*pair) for pair in tensors)


def seed_generators(key: int) -> None:
    """Seed Python's, NumPy's and torch's global generators (CPU, and all devices in use) from a key.

    Args:
        key: 0 to 2^64 - 1. Python and accelerators use all 64 bits. NumPy and torch's CPU generator use 32 bits and the
            same algorithm (Mersenne Twister), so each is seeded with a different hash. Two keys collide with
            probability 2^-32.
    """
    _reseed_python(key)
    _python.gauss_next = None  # the second half of a drawn pair, which random.seed also discards
    _reseed_numpy((key * GAMMA >> 32) & 0xFFFFFFFF)
    _reseed_torch(((key + GAMMA) * FIRST >> 32) & 0xFFFFFFFF)
    # torch.manual_seed visits every backend and takes 103 us; this function takes 5.8 us in all
    accelerators.seed_devices(key)


def hook_key(seed: int, hook: str, *place: int) -> int:
    """Return the key for a hook that all ranks call. The key is the same on all ranks."""
    return mix(seed, crc32(hook.encode()), *place)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the generators' states when this context exits."""
    states = generator_states()
    try:
        yield
    finally:
        set_generators(states)


@contextmanager
def keyed_generators(key: int) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Seed the generators from a key within this context and restore their states when it exits.

    Yields a function that calls its argument with the outer generators, as if outside the context. The context costs
    about 170 us for Python's, NumPy's and torch's generators together, so it is used only for a replica's step.
    """
    states = generator_states()

    def call_outside(function: Callable[[], Any]) -> Any:
        nonlocal states
        with kept_generators():
            set_generators(states)
            try:
                return function()
            finally:
                states = generator_states()

    seed_generators(key)
    try:
        yield call_outside
    finally:
        set_generators(states)


class KeyedDataset(Dataset[Any]):
    """Wrapper for a map-style dataset that seeds the generators from the seed, epoch and position before each batch.

    Augmentation and the collate function thus draw the same numbers in any process. Attributes are read from and set on
    the wrapped dataset, so a `worker_init_fn` can, for example, open a file and store it as an attribute.
    """

    def __init__(self, dataset: Any, seed: int | None, calls_set_epoch: bool = False) -> None:
        """Wrap `dataset`.

        Args:
            seed: None leaves the generators unchanged.
            calls_set_epoch: whether to call the dataset's `set_epoch`, if it has one, when the epoch changes.
        """
        calls_set_epoch &= callable(getattr(dataset, "set_epoch", None))
        # not by __setattr__, which sets attributes of the wrapped dataset
        self.__dict__.update(_wrapped_dataset=dataset, _generator_seed=seed, _epoch_set=-1 if calls_set_epoch else None)

    def __getitems__(self, indices: KeyedIndices) -> list[Any]:
        """Fetch all samples of a batch."""
        if self._epoch_set is not None and self._epoch_set != indices.epoch:
            self.__dict__["_epoch_set"] = indices.epoch
            self._wrapped_dataset.set_epoch(indices.epoch)
        if self._generator_seed is not None:
            seed_generators(mix(self._generator_seed, indices.epoch, indices.position))
        # as torch's fetcher does: a dataset that can read a whole batch must not be read sample by sample
        dataset, fetch = self._wrapped_dataset, getattr(self._wrapped_dataset, "__getitems__", None)
        return fetch(indices) if fetch else [dataset[index] for index in indices]

    def __getitem__(self, index: Any) -> Any:
        return self._wrapped_dataset[index]

    def __len__(self) -> int:
        return len(self._wrapped_dataset)

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look up attributes before any is set, and must not get the wrapped dataset's __setstate__ or
        # __reduce__
        dataset = self.__dict__.get("_wrapped_dataset")
        if dataset is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped_dataset, name, value)
