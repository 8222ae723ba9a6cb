"""Object stores, through fsspec: how to connect to them, and which of their errors pass; without torch."""

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from ...base.errors import ConfigError
from ...base.location import REPOSITORY, STORES, is_repository

T = TypeVar("T")

TRIES, FIRST_WAIT = 6, 0.2
"""Tries of a request, and the seconds before the second one; each further wait is twice as long: 6 s in all."""
LASTING = (
    *(FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(NotImplementedError, TypeError, ValueError),
)
"""Errors that another try does not mend; everything else may be a lost connection or a store that throttles."""


def connect(address: str) -> Any:
    """Return the file system of fsspec for an address, whose methods take addresses. Raises ConfigError without it."""
    # of hf://, the object has no lock for its listings
    thread = threading.get_ident() if address.startswith("hf://") else 0
    store = _connection("/".join(address.split("/")[:3]), os.getpid(), thread)
    store.invalidate_cache()  # other processes write, too; that of hf:// keeps listings whatever it is told
    return store


@lru_cache
def _connection(bucket: str, process: int, thread: int) -> Any:
    """Return the file system of a bucket, for one process: a connection does not outlive a fork."""
    from fsspec.core import url_to_fs  # torch requires it

    try:
        return url_to_fs(bucket, use_listings_cache=False, skip_instance_cache=True)[0]
    except ImportError as error:
        extra = STORES.get(bucket.partition(":")[0])
        advice = f" Install it: pip install 'legato[{extra[0]}]'." if extra else ""
        raise ConfigError(f"{bucket}: {error}.{advice}") from error
    except ValueError as error:  # of a protocol that nobody knows
        raise ConfigError(f"{bucket}: {error}") from error


def sizes_below(address: str) -> dict[str, int]:
    """Return the sizes of all objects below an address, by the rest of their names. Raises OSError."""
    from fsspec.core import strip_protocol

    try:
        objects = retried(address, connect(address).find, address, detail=True)
    except FileNotFoundError:
        return {}
    # an address may have more in it than a name: abfs://container@account.dfs.core.windows.net/runs
    start = len(strip_protocol(address).rstrip("/")) + 1
    return {path[start:]: entry["size"] for path, entry in objects.items()}


def require_writable(address: str) -> None:
    """Raise ConfigError for a repository of the Hugging Face Hub, which can be read only."""
    if is_repository(address):
        raise ConfigError(f"{address} is {REPOSITORY}")


def retried(address: str, request: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Return what a request answers, after a few tries. Raises OSError that names the address.

    Errors in LASTING are raised as they come. The libraries try again by themselves, but not all of them, and not for
    all errors.
    """
    for attempt in range(TRIES):
        try:
            return request(*arguments, **options)
        except LASTING:
            raise
        except Exception as error:  # the libraries raise many kinds
            # what s3fs makes of a request that the store refuses as it is
            if getattr(error, "errno", None) == errno.EINVAL or attempt == TRIES - 1:
                raise OSError(getattr(error, "errno", None) or errno.EIO, f"{address}: {error}") from error
            # spread out: several ranks that were throttled together would come back together
            time.sleep(FIRST_WAIT * 2**attempt * random.uniform(0.5, 1.0))
    raise AssertionError
