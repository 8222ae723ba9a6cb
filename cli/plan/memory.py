"""Memory and traffic of a step besides the state, and whether all of it fits into a device. No torch."""

from dataclasses import dataclass
from typing import NamedTuple

from ...base.errors import ConfigError, did_you_mean

DEVICES = {
    "T4": 15, "V100": 16, "V100-32": 32, "A100-40": 40, "A100": 80, "A10": 22, "A30": 24, "A40": 45, "A6000": 48,
    "L4": 22, "L40S": 45, "H100": 80, "H200": 141, "B200": 180, "RTX3090": 24, "RTX4090": 24, "RTX5090": 32,
    "MI250": 64, "MI300X": 192,
}  # fmt: skip
"""Memory of a device in 2**30 bytes, as its driver tells it, rounded down."""
UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20, "TB": 10**12}
RESERVED = 0.1
"""Share of a device that CUDA itself and the gaps of torch's allocator are expected to take."""


@dataclass(frozen=True)
class Activations:
    """Bytes of one batch, with what autograd keeps of its forward."""

    plain: int
    """Bytes without recomputing."""
    recomputed: int | None = None
    """Bytes with each of `blocks` recomputed in backward, the largest one's own included; None: there are no blocks."""
    blocks: tuple[str, ...] = ()
    """Classes of blocks."""
    recomputes: bool = False
    """Whether the config has them recomputed."""
    where: str = ""
    """Text that names the rank of these bytes, where ranks differ."""
    unknown: str = ""
    """Why nothing of this is known."""

    @property
    def bytes(self) -> int:
        """Bytes that the run takes as the config has it."""
        return self.recomputed if self.recomputes and self.recomputed is not None else self.plain


class Payload(NamedTuple):
    """Bytes of one kind of collective in a step, on the rank that has most."""

    kind: str
    """Name of a collective; "send" from rank to rank, or "remote call" with its answer."""
    bytes: int
    """Bytes of the whole tensors that are reduced, handed out or sent."""
    ranks: int
    """Ranks that take part in it together."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank sends, in a ring of several: all_reduce is a reduce_scatter and an all_gather."""
        if self.kind in ("send", "remote call"):
            return self.bytes
        return (2 if self.kind == "all_reduce" else 1) * self.bytes * (self.ranks - 1) // self.ranks


@dataclass(frozen=True)
class Traffic:
    """Needs of communication on each rank: memory, and payloads of a step."""

    buffer_bytes: int = 0
    payloads: tuple[Payload, ...] = ()
    unknown: str = ""
    """Why nothing of this is known."""


def parse_memory(text: str) -> int:
    """Return the bytes of a device's memory: "80GB", or the name of a device. Raises ConfigError for others."""
    for name, size in DEVICES.items():
        if text.lower() == name.lower():
            return size * 2**30
    for unit, bytes_each in UNITS.items():
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.replace(".", "", 1).isdecimal():
            return int(float(number) * bytes_each)
    hint = did_you_mean(text, DEVICES) or f" Known are {', '.join(DEVICES)}."
    raise ConfigError(f"memory={text}: expected a size such as 80GB or 40GiB, or a device.{hint}")


def verdict(used: int, memory: int) -> str:
    """Return whether so many bytes fit."""
    share = used / memory
    if share > 1:
        return "does not fit"
    return "fits" if share <= 1 - RESERVED else "may not fit, since CUDA and gaps take some"
