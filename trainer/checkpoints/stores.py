"""Connects to object stores through fsspec, and retries requests after transient errors. Does not import torch."""

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
"""Attempts per request, and seconds before the first retry. The wait doubles after each retry, for a total of 6 s."""
LASTING = (
    *(FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(NotImplementedError, TypeError, ValueError),
)
"""Errors that a retry cannot resolve. Any other error may be due to a lost connection or throttling."""


def connect(address: str) -> Any:
    """Return the fsspec file system for an address. The file system's methods accept full addresses.

    Raises ConfigError if no file system is available for the address.
    """
    # the file system of hf:// does not lock its listings, so each thread gets its own
    thread = threading.get_ident() if address.startswith("hf://") else 0
    store = _connection("/".join(address.split("/")[:3]), os.getpid(), thread)
    store.invalidate_cache()  # other processes write too; hf:// caches listings despite use_listings_cache=False
    return store


@lru_cache
def _connection(bucket: str, process: int, thread: int) -> Any:
    """Return a bucket's file system for one process.

    Each process needs its own file system, because connections do not survive a fork.
    """
    from fsspec.core import url_to_fs  # torch requires it

    try:
        return url_to_fs(bucket, use_listings_cache=False, skip_instance_cache=True)[0]
    except ImportError as error:
        extra = STORES.get(bucket.partition(":")[0])
        advice = f" Install it: pip install 'legato[{extra[0]}]'." if extra else ""
        raise ConfigError(f"{bucket}: {error}.{advice}") from error
    except ValueError as error:  # fsspec does not know the protocol
        raise ConfigError(f"{bucket}: {error}") from error


def sizes_below(address: str) -> dict[str, int]:
    """Return the sizes of all objects under an address, keyed by relative path. Raises OSError on failure."""
    from fsspec.core import strip_protocol

    try:
        objects = retried(address, connect(address).find, address, detail=True)
    except FileNotFoundError:
        return {}
    # an address may contain more than the path: abfs://container@account.dfs.core.windows.net/runs
    start = len(strip_protocol(address).rstrip("/")) + 1
    return {path[start:]: entry["size"] for path, entry in objects.items()}


def require_writable(address: str) -> None:
    """Raise ConfigError for a repository on the Hugging Face Hub, which is read-only."""
    if is_repository(address):
        raise ConfigError(f"{address} is {REPOSITORY}")


def retried(address: str, request: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Make a request, retrying it a few times, and return the result. Raises an OSError that includes the address.

    Errors in LASTING are raised immediately and unchanged. Some object store libraries also retry requests, but only
    after some errors.
    """
    for attempt in range(TRIES):
        try:
            return request(*arguments, **options)
        except LASTING:
            raise
        except Exception as error:  # each library raises its own types of errors
            # s3fs raises EINVAL for a request that the store rejects
            if getattr(error, "errno", None) == errno.EINVAL or attempt == TRIES - 1:
                raise OSError(getattr(error, "errno", None) or errno.EIO, f"{address}: {error}") from error
            # random, so that ranks throttled at the same time do not retry at the same time
            time.sleep(FIRST_WAIT * 2**attempt * random.uniform(0.5, 1.0))
    raise AssertionError
