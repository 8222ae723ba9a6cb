"""Manifest of a checkpoint: its files with sizes and hashes. Written last, it is the commit mark."""

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...base.errors import CheckpointError
from ...base.run_names import MANIFEST as MANIFEST
from ...base.version import __version__
from .format import FileSum, unique_keys

MODEL_FILE, TENSORS_FILE, STATE_FILE = "model.safetensors", "tensors.safetensors", "state.json"
FORMAT = 2
"""1 lacked the run that wrote the checkpoint; it is still read."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 64 << 20  # bytes; a manifest of a hundred thousand files is smaller


def is_plain_name(name: str) -> bool:
    """Return whether a file name stays inside the checkpoint's folder."""
    return _PLAIN_NAME.fullmatch(name) is not None and name != MANIFEST


def dump_manifest(files: Mapping[str, FileSum], run: str = "") -> bytes:
    """Return the text of a manifest for these files of `run`; "" for no run."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "legato": __version__,
        "torch": str(torch.__version__),
        "run": run,
        "files": {name: {"size": found.size, "sha256": found.sha256} for name, found in files.items()},
    }
    return json.dumps({**body, "sha256": _own_sum(body)}, indent=1).encode("ascii")


class Manifest(NamedTuple):
    """Contents of a manifest."""

    files: dict[str, FileSum]
    run: str
    """Id of the run that wrote the checkpoint; "": unknown."""


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
    if type(written) is not int or written not in (1, FORMAT):
        raise CheckpointError(f"{MANIFEST}: format must be {FORMAT} or 1, got {str(written)[:40]}.")
    texts = ["legato", "torch", "sha256", *(["run"] if written > 1 else [])]
    _same_fields(body, {"format", "files", *texts}, "")
    if not all(isinstance(body[name], str) for name in texts):
        raise CheckpointError(f"{MANIFEST}: {', '.join(texts)} must be texts.")
    if not isinstance(body["files"], dict):
        raise CheckpointError(f"{MANIFEST}: files must be an object.")
    files = {name: _entry(name, entry) for name, entry in body["files"].items()}
    if lacking := sorted({MODEL_FILE, TENSORS_FILE, STATE_FILE} - files.keys()):
        raise CheckpointError(f"{MANIFEST}: files lacks {', '.join(lacking)}.")
    own = body.pop("sha256")
    # the sums of files say nothing of the manifest itself, which names their sizes and the run
    if own != _own_sum(body):
        raise CheckpointError(f"{MANIFEST} is damaged: its text does not match its own sha256.")
    return Manifest(files, body.get("run", ""))


def _entry(name: str, entry: Any) -> FileSum:
    if not is_plain_name(name):
        raise CheckpointError(
            f"{MANIFEST}: {name[:80]!r} is not a plain file name; it could lie outside the checkpoint."
        )
    if not isinstance(entry, dict):
        raise CheckpointError(f"{MANIFEST}: files.{name} must be an object.")
    _same_fields(entry, {"size", "sha256"}, f"files.{name}.")
    size, digest = entry["size"], entry["sha256"]
    if type(size) is not int or not 0 <= size < 1 << 63:
        raise CheckpointError(f"{MANIFEST}: files.{name}.size must be a number of bytes, got {str(size)[:40]}.")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise CheckpointError(f"{MANIFEST}: files.{name}.sha256 must be 64 hexadecimal digits, got {str(digest)[:80]}.")
    return FileSum(size, digest)


def _same_fields(found: dict[str, Any], expected: set[str], where: str) -> None:
    if missing := sorted(expected - found.keys()):
        raise CheckpointError(f"{MANIFEST}: {where}{missing[0]} is missing.")
    if unknown := sorted(found.keys() - expected):
        raise CheckpointError(f"{MANIFEST}: unknown field {where}{unknown[0][:80]}.")


def _own_sum(body: Mapping[str, Any]) -> str:
    # with its own hash, a flipped bit in any field is found
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def parse_json(data: bytes, name: str) -> Any:
    """Parse strict JSON: UTF-8, no NaN, no key twice; raises CheckpointError with the file's name."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not valid JSON: {str(error)[:200]}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


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
