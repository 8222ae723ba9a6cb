"""Files of a sweep and of its trials."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError

SWEEP = "sweep.json"
"""The sweep's file: what it was asked for."""
PLAN, CONFIG, RESULT, LOG, LOCK = "trial.json", "config.yaml", "result.json", "log.txt", ".lock"
"""A trial's files: its values, its config, its result (once it is done or has failed), what it printed, its lock."""


def write_json(path: Path, content: Any) -> None:
    """Write a file as a whole: a reader sees the old one or the new one."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole."""
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(text, encoding="utf-8", errors="backslashreplace")  # see `run_record`
    beside.replace(path)


def read_json(path: Path) -> Any:
    """Return what a file holds; None where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}. Delete it, or the folder it is in.") from error


@contextmanager
def hold(path: Path, wait: bool = False) -> Iterator[None]:
    """Hold a lock that ends with the process. Raises ConfigError where another has it, unless it may `wait`."""
    try:
        import fcntl
    except ImportError:  # Windows: two sweeps in one folder are the user's to avoid
        yield
        return
    file = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise ConfigError(f"Another process runs the sweep in {path.parent}. Wait for it, or end it.") from error
        yield
    finally:
        os.close(file)
