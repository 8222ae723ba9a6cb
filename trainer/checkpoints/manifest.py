"""Manifest of a checkpoint: its files with sizes and hashes. Written last, it is the commit mark."""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...base.errors import CheckpointError
from ...base.run_names import MANIFEST as MANIFEST
from ...base.version import LAST_READER, __version__
from .hashed import FileSum
from .hashed import parse_json as parse_json

MODEL_FILE, TENSORS_FILE, STATE_FILE = "model.safetensors", "tensors.safetensors", "state.json"
SHARD_FILE = re.compile(r"(model|tensors)-[0-9]{5,}\.safetensors")
FORMAT = 4
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 64 << 20  # bytes; a manifest of a hundred thousand files is smaller


def are_file_names(names: Iterable[str]) -> bool:
    """Return whether these are names of files that a checkpoint may have."""
    whole = (MODEL_FILE, TENSORS_FILE, STATE_FILE, MANIFEST)
    return all(name in whole or SHARD_FILE.fullmatch(name) for name in names)


def dump_manifest(files: Mapping[str, FileSum], run: str = "") -> bytes:
    """Return the text of a manifest for these files of `run`; "" for no run."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "legato": __version__,
        "run": run,
        "files": {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in files.items()},
    }
    return json.dumps({**body, "sha256": _sum_of(body)}, indent=1).encode("ascii")


class Manifest(NamedTuple):
    """Contents of a manifest."""

    files: dict[str, FileSum]
    run: str
    """Id of the run that wrote the checkpoint; "": none."""


def parse_manifest(data: bytes) -> Manifest:
    """Parse a manifest's text; raises CheckpointError with the wrong field."""
    body = parse_json(data, MANIFEST)
    if not isinstance(body, dict):
        raise CheckpointError(f"{MANIFEST} must hold an object.")
    written = body.get("format")
    if type(written) is int and written > FORMAT:
        raise CheckpointError(
            f"{MANIFEST}: format {written} is newer than this Legato reads ({FORMAT}); update Legato."
        )
    # `type`, not isinstance: true is an int, and equal to 1
    if type(written) is int and 1 <= written < FORMAT:
        raise CheckpointError(
            f"{MANIFEST}: format {written} is of an earlier Legato; the last commit that reads it is {LAST_READER}."
        )
    if type(written) is not int or written != FORMAT:
        raise CheckpointError(f"{MANIFEST}: format must be {FORMAT}, got {str(written)[:40]}.")
    texts = ["legato", "sha256", "run"]
    _same_fields(body, {"format", "files", *texts}, "")
    if not all(isinstance(body[name], str) for name in texts):
        raise CheckpointError(f"{MANIFEST}: {', '.join(texts)} must be texts.")
    if not isinstance(body["files"], dict):
        raise CheckpointError(f"{MANIFEST}: files must be an object.")
    files = {name: _entry(name, entry) for name, entry in body["files"].items()}
    if lacking := sorted({MODEL_FILE, TENSORS_FILE, STATE_FILE} - files.keys()):
        raise CheckpointError(f"{MANIFEST}: files lacks {', '.join(lacking)}.")
    recorded = body.pop("sha256")
    # the sums of files say nothing of the manifest itself, which names their sizes and the run
    if recorded != _sum_of(body):
        raise CheckpointError(f"{MANIFEST} is damaged: its text does not match its own sha256.")
    return Manifest(files, body["run"])


def _entry(name: str, entry: Any) -> FileSum:
    if name == MANIFEST or not are_file_names([name]):  # such as one that lies outside the checkpoint
        raise CheckpointError(f"{MANIFEST}: {name[:80]!r} is not the name of a checkpoint's file.")
    if not isinstance(entry, dict):
        raise CheckpointError(f"{MANIFEST}: files.{name} must be an object.")
    _same_fields(entry, {"size", "sha256"}, f"files.{name}.")
    size, digest = entry["size"], entry["sha256"]
    if type(size) is not int or not 0 <= size < 1 << 63:
        raise CheckpointError(f"{MANIFEST}: files.{name}.size must be a number of bytes, got {str(size)[:40]}.")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise CheckpointError(f"{MANIFEST}: files.{name}.sha256 must be 64 hexadecimal digits, got {str(digest)[:80]}.")
    return FileSum(size, digest)


def _same_fields(fields: dict[str, Any], expected: set[str], where: str) -> None:
    if missing := sorted(expected - fields.keys()):
        raise CheckpointError(f"{MANIFEST}: {where}{missing[0]} is missing.")
    if unknown := sorted(fields.keys() - expected):
        raise CheckpointError(f"{MANIFEST}: unknown field {where}{unknown[0][:80]}.")


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
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise CheckpointError(f"{directory}: {name} {reason}.") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "no regular file"
        raise CheckpointError(f"{directory}: {name} is {kind}; a checkpoint holds its own files only.")
    if limit is not None and status.st_size > limit:
        raise CheckpointError(f"{directory}: {name} is {status.st_size:,} bytes, expected {limit:,} at most.")
    return status.st_size


def require_removable(directory: Path, run: str | None) -> None:
    """Raise CheckpointError for what is no checkpoint of `run`, or holds files that its manifest does not name."""
    if directory.is_symlink() or not directory.is_dir():
        kind = "a link" if directory.is_symlink() else "not there" if not directory.exists() else "no directory"
        raise CheckpointError(f"{directory} is not removed: it is {kind}.")
    try:
        content = load_manifest(directory)
        foreign = sorted({entry.name for entry in os.scandir(directory)} - {*content.files, MANIFEST})
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{directory} is not removed: it does not look like a checkpoint. {error}") from error
    if run is not None and run != content.run:
        raise CheckpointError(f"{directory} is not removed: another run wrote it.")
    if foreign:
        raise CheckpointError(f"{directory} is not removed: it holds {foreign[0]}, which Legato did not write.")
