"""Location: the local path or object store address of checkpoints or runs. This module does not import torch."""

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
"""For each URL scheme, Legato's optional dependency group and the package that it installs."""


REPOSITORY = (
    "a repository, where writing a file creates a commit. A run can read from a repository but not write to one. "
    "Write to a bucket (hf://buckets/USER/NAME) and upload the result of legato export."
)


class Address(str):
    """Address of a folder or file in an object store, such as s3://bucket/run, with some of `Path`'s attributes."""

    # not a Path, because Path drops a slash: Path("s3://bucket") becomes s3:/bucket
    __slots__ = ()

    @property
    def name(self) -> str:
        """The last component."""
        return self.rpartition("/")[2]

    @property
    def parent(self) -> "Address":
        """The parent folder. The parent of s3://bucket is s3://, which contains all buckets."""
        folder = self.rpartition("/")[0]
        return Address(f"{folder}/" if folder.endswith(":/") else folder)

    @property
    def parents(self) -> "list[Address]":
        """All parent folders, nearest first."""
        return [] if self.endswith("://") else [self.parent, *self.parent.parents]

    def resolve(self) -> "Address":
        """Return the address unchanged, because object stores have no symlinks."""
        return self

    def absolute(self) -> "Address":
        """Return the address unchanged."""
        return self

    def __truediv__(self, name: str) -> "Address":
        return Address(f"{self}{name}" if self.endswith("/") else f"{self}/{name}")


Location = Path | Address
"""Location of a checkpoint or a folder of checkpoints. `Folder` (trainer/checkpoints/storage.py) does the I/O."""


def to_location(place: "str | os.PathLike[str]") -> Location:
    """Return an Address for an address in an object store, otherwise a Path. Raises ConfigError for file://."""
    match = ADDRESS.match(os.fspath(place))
    if match is None:
        return Path(place)
    if match[1] == "file":
        raise ConfigError(f"A path {address_problem(place)}")
    return Address(f"{match[1]}://{match[2].rstrip('/')}")


def to_absolute(place: "str | os.PathLike[str]") -> Location:
    """Return the location of `place`. Paths are made absolute, with ".." removed."""
    location = to_location(place)
    return location if isinstance(location, Address) else Path(os.path.abspath(location))


def place_problem(place: str, writes: bool = True) -> str | None:
    """Return the reason a run cannot read from a location (or write to it if `writes` is true); None if it can."""
    scheme, mark, rest = place.partition("://")
    if not mark or scheme in ("file", "local"):
        if not mark and (match := ADDRESS.match(place)) is not None:
            return f"is {place!r}: an address needs two slashes, '{match[1]}://{match[2]}'. Pass a str: Path drops one."
        return path_problem(f"file://{rest}" if mark else place)
    if not rest.strip("/"):
        return f"is {place!r}, which has no bucket. Write {scheme}://BUCKET/FOLDER."
    if writes and is_repository(place):
        return f"is {place!r}, {REPOSITORY}"
    if scheme in STORES:
        extra, package = STORES[scheme]
        return None if find_spec(package) else f"is {place!r}, which needs {package}: pip install 'legato[{extra}]'."
    from fsspec import available_protocols  # torch depends on fsspec

    protocols = available_protocols()
    hint = did_you_mean(scheme, protocols) or f" Legato supports {', '.join(STORES)} and the protocols of fsspec."
    return None if scheme in protocols else f"is {place!r}, which has an unknown scheme.{hint}"


def is_repository(address: str) -> bool:
    """Return whether an address is a repository on the Hugging Face Hub. Legato only reads from such addresses."""
    return address.startswith("hf://") and not address.startswith("hf://buckets/")


# --- run directories in a store ---------------------------------------------------------------------------------------
def local_folder(run: Address, area: str = "runs") -> Path:
    """Return the local folder that mirrors a run directory in a store; see trainer/runs/remote.py."""
    scheme, _, rest = run.partition("://")
    return cache_folder() / area / scheme / rest


def location_of(directory: Path) -> Location:
    """Return a run directory's location: the address if the folder is a mirror, otherwise the folder itself."""
    try:
        _, scheme, *rest = directory.relative_to(cache_folder()).parts
    except ValueError:
        return directory
    return Address(f"{scheme}://{'/'.join(rest)}")


def checkpoints_of(directory: Path) -> Location:
    """Return the checkpoint folder in a run directory."""
    return location_of(directory) / CHECKPOINTS
