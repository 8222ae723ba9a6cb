"""Durations, as users give them."""

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
