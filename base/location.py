"""Location: where checkpoints and runs lie, a path of this machine or the address of a store; without torch."""

import os
from importlib.util import find_spec
from pathlib import Path

from .environment import cache_folder
from .errors import ConfigError, did_you_mean
from .run_names import ADDRESS, CHECKPOINTS, address_problem, path_problem

STORES = {
    **dict.fromkeys(("s3", "s3a"), ("s3", "s3fs")),
    **dict.fromkeys(("gs", "gcs"), ("gs", "gcsfs")),
    **dict.fromkeys(("az", "abfs", "abfss"), ("az", "adlfs")),
    "hf": ("hf", "huggingface_hub"),
}
"""Extra of Legato, and package, for the addresses of a scheme."""


REPOSITORY = (
    "a repository, in which each file written is a commit: a run reads from it, but does not write to it. Write to a "
    "bucket, hf://buckets/USER/NAME, and upload the result of legato export."
)


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


def place_problem(place: str, writes: bool = True) -> str | None:
    """Return why a run cannot write to a path or an address of a store, or read there; None if it can."""
    scheme, mark, rest = place.partition("://")
    if not mark or scheme in ("file", "local"):
        if not mark and (match := ADDRESS.match(place)) is not None:
            return (
                f"is {place!r}: an address has two slashes, '{match[1]}://{match[2]}', and is text; a Path drops one."
            )
        return path_problem(f"file://{rest}" if mark else place)
    if not rest.strip("/"):
        return f"is {place!r}, which names no bucket: {scheme}://BUCKET/FOLDER."
    if writes and is_repository(place):
        return f"is {place!r}, {REPOSITORY}"
    if scheme in STORES:
        extra, package = STORES[scheme]
        return None if find_spec(package) else f"is {place!r}, which needs {package}: pip install 'legato[{extra}]'."
    from fsspec import available_protocols  # torch requires it

    protocols = available_protocols()
    hint = did_you_mean(scheme, protocols) or f" Known are {', '.join(STORES)} and what fsspec knows."
    return None if scheme in protocols else f"is {place!r}, of a store that is not known.{hint}"


def is_repository(address: str) -> bool:
    """Return whether an address is of a repository of the Hugging Face Hub, which can only be read."""
    return address.startswith("hf://") and not address.startswith("hf://buckets/")


# --- run directories in a store ---------------------------------------------------------------------------------------
def local_folder(run: Address, area: str = "runs") -> Path:
    """Return the folder of this machine that stands for a run directory in a store; see trainer/runs/remote.py."""
    scheme, _, rest = run.partition("://")
    return cache_folder() / area / scheme / rest


def location_of(directory: Path) -> Location:
    """Return where a run directory lies: the address for which a local folder stands, or that folder itself."""
    try:
        _, scheme, *rest = directory.relative_to(cache_folder()).parts
    except ValueError:
        return directory
    return Address(f"{scheme}://{'/'.join(rest)}")


def checkpoints_of(directory: Path) -> Location:
    """Return the folder of a run directory's checkpoints."""
    return location_of(directory) / CHECKPOINTS
