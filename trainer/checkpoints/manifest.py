"""A checkpoint's manifest: the sizes and hashes of the checkpoint's files.

The manifest is written last and marks the checkpoint as committed.
"""

import hashlib
import json
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...base.errors import CheckpointError
from ...base.run_names import MANIFEST as MANIFEST
from ...base.version import LAST_READER, __version__
from .hashed import FileSum
from .hashed import parse_json as parse_json

MODEL_FILE, TENSORS_FILE, STATE_FILE = "model.safetensors", "tensors.safetensors", "state.json"
SHARD_FILE = re.compile(r"(model|tensors|base)-[0-9]{5,}\.safetensors")
BASE, BASE_FILE = "base", "base.safetensors"
"""Name of the folder that contains the bases, alongside the checkpoints, and the name that a manifest uses for the base
of model.safetensors (frozen_base.py)."""
DIGESTS = "sha256"
"""Key in a base's header for the SHA-256 of each tensor."""
FORMAT, OLDEST = 5, 4
SHA256 = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"([0-9a-f]{8})?")
_LARGEST = 64 << 20  # bytes; even a manifest of 100,000 files is smaller


def are_file_names(names: Iterable[str]) -> bool:
    """Return whether all of `names` are valid names for checkpoint files."""
    unsharded = (MODEL_FILE, TENSORS_FILE, STATE_FILE, MANIFEST, BASE_FILE)
    return all(name in unsharded or SHARD_FILE.fullmatch(name) for name in names)


def base_of(file: str) -> str:
    """Return the name that manifests use for the base of a weights file; "" for any other file."""
    return file.replace("model", BASE, 1) if file.startswith("model") else ""


def digests_of_base(size: int, read: Callable[[int, int], bytes]) -> dict[str, str]:
    """Read the SHA-256 of each tensor from the header of a base of `size` bytes. Return {} if the base is incomplete.

    `read(start, end)` returns the bytes between two offsets.
    """
    try:
        length = int.from_bytes(read(0, 8), "little")
        header = parse_json(read(8, 8 + min(length, _LARGEST)), BASE)
        digests: dict[str, str] = parse_json(header.pop("__metadata__")[DIGESTS].encode(), BASE)
        end = max(entry["data_offsets"][1] for entry in header.values())
        return digests if digests.keys() == header.keys() and size == 8 + length + end else {}
    except (CheckpointError, ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError):
        return {}


def unused_bases(bases: Iterable[str], manifests: "Iterable[Manifest]") -> list[str]:
    """Return the names of the bases that no manifest refers to; [] if a manifest cannot be read."""
    used = set[str]()
    try:
        for content in manifests:
            used |= content.split()[1].files.keys()
    except CheckpointError:
        return []
    return [base for base in bases if base not in used and SHA256.fullmatch(base.partition(".")[0])]


def lacks_base(checkpoint: object, stored: str) -> CheckpointError:
    """Return the error for a checkpoint whose base is missing."""
    return CheckpointError(
        f"{checkpoint} contains only the trained weights. The frozen weights are stored once for all checkpoints of a "
        f"run, in {BASE}/{stored} beside them, but this file is missing. Copy it too, or export a complete checkpoint "
        f"where the file exists: legato export RUN DIR/ (only the weights: legato export RUN x.safetensors)."
    )


def dump_manifest(files: Mapping[str, FileSum], run: str = "", prefix: str = "") -> bytes:
    """Return the text of a manifest for files written by the run with id `run` ("" if there is no run)."""
    # the version is for human readers; only the format decides whether Legato accepts the manifest
    body: dict[str, Any] = {
        "format": FORMAT,
        "legato": __version__,
        "run": run,
        "files": {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in files.items()},
        **({"prefix": prefix} if prefix else {}),
    }
    return json.dumps({**body, "sha256": _sum_of(body)}, indent=1).encode("ascii")


class Manifest(NamedTuple):
    """The contents of a manifest."""

    files: dict[str, FileSum]
    run: str
    """Id of the run that wrote the checkpoint; "" if there is none."""
    prefix: str = ""
    """Name of the folder with the files; "" if the files are next to the manifest. See object_folder.py."""

    def split(self) -> "tuple[Manifest, Manifest]":
        """Return the manifest without the bases, and a manifest of the bases under their names in the base folder."""
        files = {name: entry for name, entry in self.files.items() if not name.startswith(BASE)}
        bases = {f"{entry.sha256}.safetensors": entry for name, entry in self.files.items() if name not in files}
        return self._replace(files=files), Manifest(bases, self.run)

    def path(self, file: str) -> str:
        """Return the path of a file in the checkpoint."""
        return path_below(self.prefix, file)


def path_below(prefix: str, file: str) -> str:
    """Return the path of a file in a checkpoint whose files are stored under `prefix`."""
    return f"{prefix}/{file}" if prefix else file


def parse_manifest(data: bytes) -> Manifest:
    """Parse a manifest's text. Raises CheckpointError if it is damaged or has a different format."""
    body = parse_json(data, MANIFEST)
    written = body.get("format") if isinstance(body, dict) else None
    # `type`, not isinstance: true is an int, and equal to 1
    if type(written) is int and written > FORMAT:
        raise CheckpointError(
            f"{MANIFEST} has format {written}, but this version of Legato reads formats up to {FORMAT}. Update Legato."
        )
    if type(written) is int and 1 <= written < OLDEST:
        raise CheckpointError(
            f"{MANIFEST} has format {written} from an older Legato. The last commit that can read it is {LAST_READER}."
        )
    recorded = body.pop("sha256", None) if isinstance(body, dict) else None
    # the sums of the files do not cover the manifest itself, which contains their sizes and the run
    if recorded != _sum_of(body):
        raise CheckpointError(f"{MANIFEST} is damaged: its text does not match its SHA-256.")
    # a forged manifest may have a valid sum and contain paths outside the checkpoint, or sizes that are not numbers
    files, texts, prefix = body.get("files"), [body.get("legato"), body.get("run")], body.pop("prefix", "")
    if (
        type(written) is not int
        or not OLDEST <= written <= FORMAT
        or body.keys() != {"format", "legato", "run", "files"}
        or not all(isinstance(text, str) for text in texts)
        or not (isinstance(prefix, str) and _PREFIX.fullmatch(prefix))
        or not isinstance(files, dict)
        or not all(_is_entry(*item) for item in files.items())
        or not files.keys() >= {MODEL_FILE, TENSORS_FILE, STATE_FILE}
    ):
        raise CheckpointError(f"{MANIFEST} was not written by Legato: it has unexpected fields or files.")
    return Manifest({name: FileSum(**entry) for name, entry in files.items()}, body["run"], prefix)


def _is_entry(name: str, entry: Any) -> bool:
    """Return whether a manifest entry has a valid file name, size and SHA-256."""
    return (
        name != MANIFEST
        and are_file_names([name])
        and isinstance(entry, dict)
        and entry.keys() == {"size", "sha256"}
        and type(entry["size"]) is int
        and 0 <= entry["size"] < 1 << 63
        and isinstance(entry["sha256"], str)
        and SHA256.fullmatch(entry["sha256"]) is not None
    )


def _sum_of(body: Mapping[str, Any]) -> str:
    # the hash of the manifest itself reveals a flipped bit in any field
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def load_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises a CheckpointError that identifies the directory and the problem."""
    regular_size(directory, MANIFEST, limit=_LARGEST)
    try:
        return parse_manifest((directory / MANIFEST).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{directory}: {MANIFEST} cannot be read: {error.strerror}.") from error
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error


def regular_size(directory: Path, name: str, limit: int | None = None) -> int:
    """Return the size of a file in a checkpoint. Raises CheckpointError if it is missing or not a regular file."""
    try:
        status = (directory / name).lstat()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}: {name} is missing or cannot be read: {error}.") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        raise CheckpointError(f"{directory}: {name} is {kind}. A checkpoint may contain only regular files.")
    if limit is not None and status.st_size > limit:
        raise CheckpointError(f"{directory}: {name} has {status.st_size:,} bytes; expected at most {limit:,}.")
    return status.st_size


def require_size(place: object, file: str, size: int, expected: int) -> None:
    """Raise CheckpointError if a file's size differs from the manifest."""
    if size != expected:
        raise CheckpointError(f"{place}: {file} has {size:,} bytes, but {expected:,} were written.")


def require_removable(place: object, content: Manifest, foreign: Sequence[str], run: str | None) -> None:
    """Raise CheckpointError if `run` did not write the checkpoint, or if it contains `foreign` files."""
    if run is not None and run != content.run:
        raise CheckpointError(f"{place} was not removed: another run wrote it.")
    if foreign:
        raise CheckpointError(f"{place} was not removed: it contains {foreign[0]}, which Legato did not write.")
