"""Manifest of a checkpoint: its files with sizes and hashes. Written last, it is the commit mark."""

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
"""Folder of the bases beside checkpoints, and the name of that of model.safetensors in a manifest (frozen_base.py)."""
DIGESTS = "sha256"
"""Key, in the header of a base, of the SHA-256 of each of its tensors."""
FORMAT, OLDEST = 5, 4
SHA256 = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"([0-9a-f]{8})?")
_LARGEST = 64 << 20  # bytes; a manifest of a hundred thousand files is smaller


def are_file_names(names: Iterable[str]) -> bool:
    """Return whether these are names of files that a checkpoint may have."""
    whole = (MODEL_FILE, TENSORS_FILE, STATE_FILE, MANIFEST, BASE_FILE)
    return all(name in whole or SHARD_FILE.fullmatch(name) for name in names)


def base_of(file: str) -> str:
    """Return the name of the base of a file with weights, in a manifest; "" for any other file."""
    return file.replace("model", BASE, 1) if file.startswith("model") else ""


def digests_of_base(size: int, read: Callable[[int, int], bytes]) -> dict[str, str]:
    """Return the SHA-256 of each tensor, from the header of a base of `size` bytes; nothing where it is not complete.

    read: returns the bytes from one place to another.
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
    """Return the names of the bases to which no manifest refers; none where a manifest cannot be read."""
    used = set[str]()
    try:
        for content in manifests:
            used |= content.split()[1].files.keys()
    except CheckpointError:
        return []
    return [base for base in bases if base not in used and SHA256.fullmatch(base.partition(".")[0])]


def lacks_base(checkpoint: object, stored: str) -> CheckpointError:
    """Return the error for a checkpoint without a base that it names."""
    return CheckpointError(
        f"{checkpoint} has only the weights that are trained, and its base {BASE}/{stored} is not beside it: "
        f"the others, stored once for all checkpoints of a run. Copy that file, too; or make a whole checkpoint where "
        f"it is there, by: legato export RUN DIR/ (or its weights alone, by: legato export RUN x.safetensors)."
    )


def dump_manifest(files: Mapping[str, FileSum], run: str = "", prefix: str = "") -> bytes:
    """Return the text of a manifest for these files of `run`; "" for no run."""
    # the version is for people: what may be read is decided by the format alone
    body: dict[str, Any] = {
        "format": FORMAT,
        "legato": __version__,
        "run": run,
        "files": {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in files.items()},
        **({"prefix": prefix} if prefix else {}),
    }
    return json.dumps({**body, "sha256": _sum_of(body)}, indent=1).encode("ascii")


class Manifest(NamedTuple):
    """Contents of a manifest."""

    files: dict[str, FileSum]
    run: str
    """Id of the run that wrote the checkpoint; "": none."""
    prefix: str = ""
    """Folder, beside the manifest, of the files; "": they are beside it. See object_folder.py."""

    def split(self) -> "tuple[Manifest, Manifest]":
        """Return the manifest without the bases, and one of these under the names that they have in their folder."""
        own = {name: entry for name, entry in self.files.items() if not name.startswith(BASE)}
        stored = {f"{entry.sha256}.safetensors": entry for name, entry in self.files.items() if name not in own}
        return self._replace(files=own), Manifest(stored, self.run)

    def path(self, file: str) -> str:
        """Return the path of a file in the checkpoint."""
        return path_below(self.prefix, file)


def path_below(prefix: str, file: str) -> str:
    """Return the path of a file in a checkpoint whose files have a prefix."""
    return f"{prefix}/{file}" if prefix else file


def parse_manifest(data: bytes) -> Manifest:
    """Parse a manifest's text; raises CheckpointError for one that is damaged or of another format."""
    body = parse_json(data, MANIFEST)
    written = body.get("format") if isinstance(body, dict) else None
    # `type`, not isinstance: true is an int, and equal to 1
    if type(written) is int and written > FORMAT:
        raise CheckpointError(
            f"{MANIFEST}: format {written} is newer than this Legato reads ({FORMAT}); update Legato."
        )
    if type(written) is int and 1 <= written < OLDEST:
        raise CheckpointError(
            f"{MANIFEST}: format {written} is of an earlier Legato; the last commit that reads it is {LAST_READER}."
        )
    recorded = body.pop("sha256", None) if isinstance(body, dict) else None
    # the sums of files say nothing of the manifest itself, which names their sizes and the run
    if recorded != _sum_of(body):
        raise CheckpointError(f"{MANIFEST} is damaged: its text does not match its own sha256.")
    # Whoever computes that sum may still write anything: names that lead out of the checkpoint, sizes that are none.
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
        raise CheckpointError(f"{MANIFEST} is not one that Legato has written: its fields, or its files, are others.")
    return Manifest({name: FileSum(**entry) for name, entry in files.items()}, body["run"], prefix)


def _is_entry(name: str, entry: Any) -> bool:
    """Return whether this may be a file in a manifest, with its size and SHA-256."""
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
    # with its own hash, a flipped bit in any field is found
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def load_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint; raises CheckpointError with the directory and the problem."""
    regular_size(directory, MANIFEST, limit=_LARGEST)
    try:
        return parse_manifest((directory / MANIFEST).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{directory}: {MANIFEST} cannot be read: {error.strerror}.") from error
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error


def regular_size(directory: Path, name: str, limit: int | None = None) -> int:
    """Return the size of a checkpoint's file; raises CheckpointError if it is missing, a link or no file."""
    try:
        status = (directory / name).lstat()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}: {name} is missing, or cannot be read: {error}.") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "no regular file"
        raise CheckpointError(f"{directory}: {name} is {kind}; a checkpoint holds its own files only.")
    if limit is not None and status.st_size > limit:
        raise CheckpointError(f"{directory}: {name} is {status.st_size:,} bytes, expected {limit:,} at most.")
    return status.st_size


def require_size(place: object, file: str, size: int, expected: int) -> None:
    """Raise CheckpointError for a file that has another size than the manifest says."""
    if size != expected:
        raise CheckpointError(f"{place}: {file} has {size:,} bytes, {expected:,} were written.")


def require_removable(place: object, content: Manifest, foreign: Sequence[str], run: str | None) -> None:
    """Raise CheckpointError for a checkpoint that is not of `run`, or holds `foreign` files."""
    if run is not None and run != content.run:
        raise CheckpointError(f"{place} is not removed: another run wrote it.")
    if foreign:
        raise CheckpointError(f"{place} is not removed: it holds {foreign[0]}, which Legato did not write.")
