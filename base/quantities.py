"""Parsing and formatting of durations, sizes and counts."""

import math
import re
from collections.abc import Mapping
from datetime import timedelta

from .errors import ConfigError

Duration = str | timedelta | Mapping[str, float]
"""A string "DD:HH:MM:SS", a timedelta, or a mapping with arguments for timedelta."""


def parse_duration(value: Duration) -> timedelta:
    """Parse "DD:HH:MM:SS", a timedelta, or a mapping of timedelta arguments. Raises ConfigError for anything else."""
    try:
        if isinstance(value, timedelta):
            duration = value
        elif isinstance(value, Mapping):
            duration = timedelta(**value)
        else:
            parts = re.fullmatch(r"\s*(\d+):(\d+):(\d+):(\d+)\s*", value, re.ASCII)
            if parts is None:
                raise ValueError("it is not DD:HH:MM:SS")
            days, hours, minutes, seconds = map(int, parts.groups())
            duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"A duration must be 'DD:HH:MM:SS' ('00:12:00:00' is twelve hours), a timedelta, or a mapping such as "
            f"{{'hours': 12}}, got {value!r} ({error})."
        ) from None
    if duration < timedelta(0):
        raise ConfigError(f"A duration must not be negative, got {value!r}.")
    return duration


def first_validation(interval: object, epochs: int | None, accumulate: int, epoch: int | float) -> int | None:
    """Return the step of the first validation run; None if it depends on time or on an epoch of unknown length.

    Args:
        interval: `val_check_interval`.
        epochs: `check_val_every_n_epoch`.
        accumulate: Batches per replica per step.
        epoch: Steps per epoch; infinity if unknown.
    """
    before = (epochs - 1) * epoch if epochs is not None and epochs > 1 else 0
    within: int | float
    if isinstance(interval, bool) or not isinstance(interval, (int, float)):
        return None
    if isinstance(interval, int):
        within = -(-interval // accumulate)
    else:
        # a fraction is rounded down to batches (at least one), and batches are rounded up to steps
        within = epoch if interval == 1.0 else -(-max(1.0, epoch * accumulate * interval // 1) // accumulate)
    step = before + within
    return None if math.isinf(step) else int(step)


def time_taken(seconds: float | None) -> str:
    """Return a duration in its two largest units, such as "3 min 20 s"; "-" for None."""
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
    """Return a number of bytes with a decimal unit, such as "1.25 GB"."""
    for unit, size in (("PB", 10**15), ("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count} B"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 step" or "2,000 steps"."""
    # batches and processes are the only plurals in -es that Legato's messages need
    plural = f"{noun}es" if noun in ("batch", "process") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"
