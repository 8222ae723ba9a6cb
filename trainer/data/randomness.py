"""Keyed random numbers: a function of where they are used, not of what was drawn before.

Loading the batch at a position and the forward of a replica at a step each begin by seeding Python's, NumPy's and
torch's generators from a key (`mix` of seed, epoch and position, or of seed, step and replica). Saving generator states
would not work: workers' states cannot be saved, prefetching consumes them early, and creating an iterator draws from
the global one. The update of the weights, and hooks that every rank calls alike, have keys without a replica.
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
# Stream constant that separates the random numbers of an update of the weights from those of a replica
UPDATE = 0x757064617465

logger = logging.getLogger(__name__)
# random.seed takes 0.5 us to tell types apart; the generator in C behind it takes an integer as it is.
_python: Any = random.seed.__self__  # type: ignore[attr-defined]
_reseed_python = super(random.Random, _python).seed
_reseed_numpy = np.random.seed
_reseed_torch = torch.default_generator.manual_seed


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python's, NumPy's and torch's generators (on all devices) and return the seed.

    seed: 0 to 2^32 - 1; None draws one.
    workers: accepted for compatibility with Lightning; loader workers are always keyed by batch.
    verbose: log the seed.

    Raises ConfigError for an invalid seed.
    """
    chosen: Any = secrets.randbelow(SEED_LIMIT) if seed is None else seed
    if not isinstance(chosen, (int, np.integer)) or not 0 <= chosen < SEED_LIMIT:
        raise ConfigError(f"expected a seed from 0 to {SEED_LIMIT - 1}, got {seed!r}: choose an integer in that range")
    random.seed(int(chosen))  # not NumPy's integers, which it hashes
    np.random.seed(chosen)
    torch.manual_seed(chosen)
    if verbose:
        logger.info("Seed set to %d", chosen)
    return int(chosen)


def generator_states() -> tuple[Any, Any, torch.Tensor, list[torch.Tensor]]:
    """Return the states of the generators of Python, NumPy and torch, with those of the devices in use."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), accelerators.generator_states()


def set_generators(states: tuple[Any, Any, torch.Tensor, list[torch.Tensor]]) -> None:
    """Set the generators to states that `generator_states` returned."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    accelerators.set_generators(states[3])


def same_states(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Return whether two results of `generator_states` are equal: nothing was drawn between them."""
    tensors = zip((first[2], *first[3]), (second[2], *second[3]), strict=True)
    numpys = np.array_equal(first[1][1], second[1][1]) and first[1][2:] == second[1][2:]
    return bool(first[0] == second[0]) and numpys and all(torch.equal(*pair) for pair in tensors)


def seed_generators(key: int) -> None:
    """Seed the global generators of Python, NumPy and torch (CPU, and all devices in use) from a key.

    key: 0 to 2^64 - 1. Python and accelerators take all 64 bits. NumPy and torch's CPU generator take 32 and are the
    same Mersenne Twister, so each gets its own hash; two keys collide with a chance of 2^-32.
    """
    _reseed_python(key)
    _python.gauss_next = None  # the second half of a drawn pair, as random.seed forgets it
    _reseed_numpy((key * GAMMA >> 32) & 0xFFFFFFFF)
    _reseed_torch(((key + GAMMA) * FIRST >> 32) & 0xFFFFFFFF)
    # torch.manual_seed, which visits every backend, takes 103 us; all of this takes 5.8
    accelerators.seed_devices(key)


def hook_key(seed: int, hook: str, *place: int) -> int:
    """Return the key of a hook that every rank calls alike: the same on each."""
    return mix(seed, crc32(hook.encode()), *place)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Let the generators continue after this context where they were before it."""
    states = generator_states()
    try:
        yield
    finally:
        set_generators(states)


@contextmanager
def keyed_generators(key: int) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Let the generators start from a key in this context, and continue after it where they were before.

    Yields a function that calls another one as outside of the context, with the generators as they were on entry. Costs
    about 170 us for Python's, NumPy's and torch's together, so it is used only within a replica's step.
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
    """Wrapper of a map-style dataset that seeds the generators by seed, epoch and position before it fetches a batch.

    Augmentation and the collate function thus draw the same numbers in any process. All other attributes are read from
    and set on the wrapped dataset, so that a `worker_init_fn` that opens a file on its dataset reaches the real one.
    """

    def __init__(self, dataset: Any, seed: int | None, calls_set_epoch: bool = False) -> None:
        """Wrap `dataset`.

        seed: None leaves the generators alone.
        calls_set_epoch: call the dataset's `set_epoch`, if it has one, when a batch belongs to another epoch.
        """
        calls_set_epoch &= callable(getattr(dataset, "set_epoch", None))
        # past __setattr__, which reaches the wrapped dataset
        self.__dict__.update(_wrapped_dataset=dataset, _generator_seed=seed, _epoch_set=-1 if calls_set_epoch else None)

    def __getitems__(self, indices: KeyedIndices) -> list[Any]:
        """Fetch a whole batch."""
        if self._epoch_set is not None and self._epoch_set != indices.epoch:
            self.__dict__["_epoch_set"] = indices.epoch
            self._wrapped_dataset.set_epoch(indices.epoch)
        if self._generator_seed is not None:
            seed_generators(mix(self._generator_seed, indices.epoch, indices.position))
        # as torch's own fetcher does: a dataset that reads a batch at once must not be read sample by sample
        dataset, fetch = self._wrapped_dataset, getattr(self._wrapped_dataset, "__getitems__", None)
        return fetch(indices) if fetch else [dataset[index] for index in indices]

    def __getitem__(self, index: Any) -> Any:
        return self._wrapped_dataset[index]

    def __len__(self) -> int:
        return len(self._wrapped_dataset)

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look up attributes before any is set, and the wrapped dataset's own __setstate__ or
        # __reduce__ must not answer for this object.
        dataset = self.__dict__.get("_wrapped_dataset")
        if dataset is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped_dataset, name, value)
