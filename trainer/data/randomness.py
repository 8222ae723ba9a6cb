"""Every random number of a run is keyed: a function of where it is used, not of what was drawn before.

Loading the batch at a position, and the forward pass of a replica at a step, each begin by seeding Python's, NumPy's
and torch's generators from a key (`mix` of seed, epoch and position, or of seed, step and replica). Saved generator
states could not do it: a worker's state cannot be saved, prefetching consumes it early, and making an iterator draws
from the global one.
"""

import logging
import operator
import random
import secrets
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..errors import ConfigError, DataError
from .sampling import FIRST, GAMMA, KeyedIndices
from .sampling import mix as mix

SEED_LIMIT = 1 << 32  # NumPy's legacy seed has 32 bits

logger = logging.getLogger(__name__)
# random.seed takes 0.5 us to tell types apart; the generator in C behind it takes an integer as it is.
_python: Any = random.seed.__self__  # type: ignore[attr-defined]
_reseed_python = super(random.Random, _python).seed
_reseed_numpy = np.random.seed
_reseed_torch = torch.default_generator.manual_seed


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python's, NumPy's and torch's generators (on all devices) with one number, and return it.

    seed: 0 to 2^32 - 1; None draws one.
    workers: taken for Lightning's sake; in a run the loaders' workers are keyed by batch either way.
    verbose: log the seed.

    Raises ConfigError for anything else.
    """
    chosen = secrets.randbelow(SEED_LIMIT) if seed is None else _check_seed(seed)
    random.seed(chosen)
    np.random.seed(chosen)
    torch.manual_seed(chosen)
    if verbose:
        logger.info("Seed set to %d", chosen)
    return chosen


def _check_seed(seed: int) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < SEED_LIMIT:
        raise ConfigError(f"expected a seed from 0 to {SEED_LIMIT - 1}, got {seed!r}: choose an integer in that range")
    return number


def seed_generators(key: int) -> None:
    """Seed the global generators of Python, NumPy and torch (CPU, and all CUDA devices once CUDA is in use) by a key.

    key: 0 to 2^64 - 1. Python and CUDA take all of them; NumPy and torch's CPU generator take 32 bits and are the same
    Mersenne Twister for the same 32, so each gets a hash of its own: the streams neither meet nor repeat, but for a
    chance of 2^-32 for two keys.
    """
    _reseed_python(key)
    _python.gauss_next = None  # the second half of a drawn pair, as random.seed forgets it
    _reseed_numpy((key * GAMMA >> 32) & 0xFFFFFFFF)
    _reseed_torch(((key + GAMMA) * FIRST >> 32) & 0xFFFFFFFF)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(key)


class KeyedDataset(Dataset[Any]):
    """A map-style dataset whose every batch is fetched under generators keyed by seed, epoch and position.

    A StopIteration out of it is an error that names the sample: a loader would take it for the end of the data.

    In whichever process a DataLoader fetches a batch, its augmentation draws the same numbers; so does the collate
    function, which runs right after in the same process. Every other attribute is the wrapped dataset's, to read and to
    set (a `worker_init_fn` that opens a file on its dataset reaches the real one).
    """

    def __init__(self, dataset: Any, seed: int | None, tells_epoch: bool = False) -> None:
        """`seed`: None leaves the generators alone.

        `tells_epoch`: call the dataset's `set_epoch`, if it has one, wherever a batch is of another epoch.
        """
        tells_epoch &= callable(getattr(dataset, "set_epoch", None))
        self.__dict__.update(_wrapped_dataset=dataset, _generator_seed=seed, _told=-1 if tells_epoch else None)

    def __getitems__(self, indices: KeyedIndices) -> list[Any]:
        """Fetch a whole batch."""
        if self._told is not None and self._told != indices.epoch:
            self.__dict__["_told"] = indices.epoch
            self._wrapped_dataset.set_epoch(indices.epoch)
        if self._generator_seed is not None:
            seed_generators(mix(self._generator_seed, indices.epoch, indices.position))
        dataset, samples = self._wrapped_dataset, list[Any]()
        fetch = getattr(dataset, "__getitems__", None)
        try:
            if fetch:
                return fetch(indices)  # type: ignore[no-any-return]
            for index in indices:  # not `map`, which would end with a StopIteration of the dataset's
                samples.append(dataset[index])
        except StopIteration as error:
            where = f"__getitems__({list(indices)!r:.60})" if fetch else f"__getitem__({indices[len(samples)]!r})"
            raise DataError(
                f"{type(dataset).__name__}.{where} raised StopIteration, which would pass for the end of the data: an "
                f"iterator that it reads from is used up. Begin it anew, or raise IndexError."
            ) from error
        return samples

    def __getitem__(self, index: Any) -> Any:
        return self._wrapped_dataset[index]

    def __len__(self) -> int:
        return len(self._wrapped_dataset)

    def __getattr__(self, name: str) -> Any:
        # A copy or an unpickled object asks before it has its attributes, and the wrapped dataset's own __setstate__ or
        # __reduce__ must not answer for this object.
        dataset = self.__dict__.get("_wrapped_dataset")
        if dataset is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped_dataset, name, value)
