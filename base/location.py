"""Location: where checkpoints and runs lie, a path of this machine or the address of a store; without torch."""

import os
from pathlib import Path

from .errors import ConfigError
from .run_names import ADDRESS, address_problem


class Address(str):
    """Address of a folder or a file in a store, such as s3://bucket/run: text, with some attributes of `Path`."""

    # not a Path, which drops a slash: Path("s3://bucket") is s3:/bucket
    __slots__ = ()

    @property
    def name(self) -> str:
        """The last part."""
        return self.rpartition("/")[2]

    @property
    def parent(self) -> "Address":
        """The folder above; of s3://bucket it is s3://, below which all buckets lie."""
        folder = self.rpartition("/")[0]
        return Address(f"{folder}/" if folder.endswith(":/") else folder)

    @property
    def parents(self) -> "list[Address]":
        """The folders above, the nearest first."""
        return [] if self.endswith("://") else [self.parent, *self.parent.parents]

    def resolve(self) -> "Address":
        """Return the address: stores have no links."""
        return self

    def absolute(self) -> "Address":
        """Return the address."""
        return self

    def __truediv__(self, name: str) -> "Address":
        return Address(f"{self}{name}" if self.endswith("/") else f"{self}/{name}")


Location = Path | Address
"""Place of a checkpoint, or of a folder of them. `Folder` (trainer/checkpoints/storage.py) reads and writes there."""


def to_location(place: "str | os.PathLike[str]") -> Location:
    """Return the address of a store as an Address, anything else as a Path. Raises ConfigError for file://."""
    match = ADDRESS.match(os.fspath(place))
    if match is None:
        return Path(place)
    if match[1] == "file":
        raise ConfigError(f"A path {address_problem(place)}")
    return Address(f"{match[1]}://{match[2].rstrip('/')}")


def to_absolute(place: "str | os.PathLike[str]") -> Location:
    """Return what `to_location` returns, a path as an absolute one without links to the folder above ("..")."""
    where = to_location(place)
    return where if isinstance(where, Address) else Path(os.path.abspath(where))
