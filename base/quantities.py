"""Durations, as users give and read them, and sizes."""

import math
import re
from collections.abc import Mapping
from datetime import timedelta

from .errors import ConfigError

Duration = str | timedelta | Mapping[str, float]
"""A time such as "00:12:00:00", a timedelta, or a mapping of its arguments."""


def parse_duration(value: Duration) -> timedelta:
    """Parse "DD:HH:MM:SS", a timedelta, or a mapping of its arguments. Raises ConfigError."""
    try:
        if isinstance(value, timedelta):
            found = value
        elif isinstance(value, Mapping):
            found = timedelta(**value)
        else:
            parts = re.fullmatch(r"\s*(\d+):(\d+):(\d+):(\d+)\s*", value, re.ASCII)
            if parts is None:
                raise ValueError("it is not DD:HH:MM:SS")
            days, hours, minutes, seconds = map(int, parts.groups())
            found = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"A duration must be 'DD:HH:MM:SS' ('00:12:00:00' is twelve hours), a timedelta, or a mapping such as "
            f"{{'hours': 12}}; got {value!r} ({error})."
        ) from None
    if found < timedelta(0):
        raise ConfigError(f"A duration cannot be negative, got {value!r}.")
    return found


def first_validation(interval: object, epochs: int | None, accumulate: int, epoch: int | float) -> int | None:
    """Return the step after which a run validates first; None where a time, or the end of an endless epoch, decides.

    Args:
        interval: `val_check_interval`.
        epochs: `check_val_every_n_epoch`.
        accumulate: batches of a replica in a step.
        epoch: steps of an epoch; infinity if unknown.
    """
    before = (epochs - 1) * epoch if epochs is not None and epochs > 1 else 0
    within: int | float
    if isinstance(interval, bool) or not isinstance(interval, (int, float)):
        return None
    if isinstance(interval, int):
        within = -(-interval // accumulate)
    else:
        # a fraction is rounded down to batches, at least one, and these up to steps
        within = epoch if interval == 1.0 else -(-max(1.0, epoch * accumulate * interval // 1) // accumulate)
    found = before + within
    return None if math.isinf(found) else int(found)


def time_taken(seconds: float | None) -> str:
    """Return a duration in its two largest units."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {left} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def format_bytes(count: int) -> str:
    """Return a number of bytes for display, in powers of 1000."""
    for unit, size in (("PB", 10**15), ("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count} B"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural where needed."""
    # the only noun of Legato's messages that takes more than an s
    plural = "batches" if noun == "batch" else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"
