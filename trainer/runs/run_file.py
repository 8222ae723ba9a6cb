"""RunFile: `run.json`, which marks a folder as a run directory and contains the run's identity and state.

legato, id, stage        version, identity of the run, and its stage: fit, validate, test or predict
state                    starting, running, done, failed or preempted; for the last two, also error and traceback
created, began, ended    when the run was first launched, last launched, and ended, in seconds since the Unix epoch
step, epoch, elapsed     progress when training started or ended, plus max_steps and max_epochs
monitor, mode, best      the metric that ranks checkpoints, and its best value (that of best_checkpoint)
config, set              the config by dotted key, and the keys set by files or on the command line

Rank 0 replaces the file when a run starts, begins training, and ends. A killed process writes nothing, so the state
"running" is valid only while the directory is locked.
"""

import json
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from ...base.run_names import RUN_FILE, parse_small
from ...base.version import LAST_READER_OF_RUNS, __version__
from ..checkpoints.storage import replace_file

STARTING, RUNNING, DONE, FAILED, PREEMPTED = "starting", "running", "done", "failed", "preempted"
LONGEST_TRACEBACK = 20_000
"""Maximum number of characters in a stored traceback. A longer traceback is truncated at its start."""
_RESUME_ME = 75  # as in processes/signals.py, whose imports a reader does not need
_BEFORE = (".run", "status.json")


class RunFile:
    """Maintains `run.json` during one call to fit, validate, test or predict."""

    def __init__(self) -> None:
        self._started: dict[str, Any] = {}
        """Contents written when training began; empty before that."""

    def begin(self, directory: Path, stage: str, values: Mapping[str, Any]) -> None:
        """Mark the run as running.

        Args:
            values: additional fields, as listed in the module's docstring.
        """
        if _owns(directory, stage):
            previous = {**read(directory), "state": RUNNING, "began": time.time()}
            ended = ("ended", "error", "traceback")
            self._started = {name: value for name, value in previous.items() if name not in ended} | dict(values)
            _replace(directory, self._started)

    def store_config(self, directory: Path, values: Mapping[str, Any]) -> None:
        """Write the config of a resumed run after the run has trained a step. `values` come from `config_of`."""
        self._started |= values
        _replace(directory, {**read(directory), **values})

    def end(self, directory: Path, stage: str, values: Mapping[str, Any], error: BaseException | None) -> None:
        """Record how the run ended. If an attempt to resume was rejected, the file is left unchanged."""
        if _owns(directory, stage) and (self._started or read(directory)["state"] == STARTING):
            _replace(directory, {**read(directory), **self._started, **values, "ended": time.time(), **_outcome(error)})


def create(directory: Path, identity: str, stage: str) -> None:
    """Turn a folder into a run directory by writing `run.json`. Raises OSError if the folder is not writable."""
    if identity_of(directory) != identity:
        _write(directory, new_run(identity, stage))


def new_run(identity: str, stage: str) -> dict[str, Any]:
    """Return the initial contents of `run.json`."""
    return {"legato": __version__, "id": identity, "stage": stage, "state": STARTING, "created": time.time()}


def fail(directory: Path, error: BaseException, since: float) -> None:
    """Record the failure of a run whose workers this process started at time `since`.

    Workers do not record it, because only this process knows which worker failed first. A file written before `since`
    is left unchanged, because the workers did not resume that run.
    """
    values = read(directory)
    if values and values.get("began", since) >= since:
        _replace(directory, {**values, "ended": time.time(), **_outcome(error)})


def read(directory: Path) -> dict[str, Any]:
    """Return the contents of `run.json` in a run directory; {} for any other folder."""
    # require both keys, because other programs write a run.json too; their folders are never listed or deleted
    values = parse_small(directory / RUN_FILE)
    if not isinstance(values, dict) or not values.get("legato"):
        return {}
    return values if isinstance(values.get("id"), str) and values["id"] else {}


def identity_of(directory: Path | None) -> str:
    """Return the identity of the run in a run directory; "" for any other folder."""
    return "" if directory is None else str(read(directory).get("id", ""))


def require_readable(directory: Path) -> None:
    """Raise ConfigError for a run directory written by an earlier version of Legato."""
    if not (directory / RUN_FILE).exists() and any((directory / name).is_file() for name in _BEFORE):
        raise ConfigError(
            f"{directory} was written by an earlier version of Legato and has no {RUN_FILE}. The last commit that can "
            f"read it is {LAST_READER_OF_RUNS}."
        )


def config_of(text: str | None, explicit: str | None) -> dict[str, Any]:
    """Return the config's entries for `run.json`, given the config's text with and without defaults."""
    entries: dict[str, Any] = {} if text is None else {"config": flat_config(text)}
    return entries if explicit is None else {**entries, "set": list(flat_config(explicit))}


def flat_config(text: str) -> dict[str, Any]:
    """Return the values of a YAML config as a dict with dotted keys. A list counts as a single value."""
    import yaml  # not at the top: readers of runs do not need it

    flat: dict[str, Any] = {}

    def add(values: Mapping[str, Any], above: str) -> None:
        for name, value in values.items():
            if isinstance(value, dict) and value:
                add(value, f"{above}{name}.")
            else:
                flat[f"{above}{name}"] = value

    add(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}, "")
    return flat


def _owns(directory: Path, stage: str) -> bool:
    """Return whether a call may write to the file. An evaluation must not overwrite the record of its training run."""
    # an evaluation may run in the directory of its training
    return read(directory).get("stage") == stage


def _outcome(error: BaseException | None) -> dict[str, Any]:
    """Return the run's state after `error` (None means success), with the error's text and traceback."""
    if error is None:
        return {"state": DONE}
    # a preempted run has not failed: `legato runs` lists it as resumable
    if isinstance(error, KeyboardInterrupt):
        return {"state": PREEMPTED, "error": "Ctrl-C"}
    if isinstance(error, SystemExit) and error.code == _RESUME_ME:
        return {"state": PREEMPTED, "error": "ended by a signal"}
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    return {"state": FAILED, "error": text, "traceback": "".join(lines)[-LONGEST_TRACEBACK:]}


def _replace(directory: Path, values: Mapping[str, Any]) -> None:
    # writers of results report a directory that is missing, full or read-only
    with suppress(OSError):
        _write(directory, values)


def _write(directory: Path, values: Mapping[str, Any]) -> None:
    replace_text(directory / RUN_FILE, json.dumps(values, indent=1, default=str))


def replace_text(path: Path, text: str) -> None:
    """Replace a file in a run directory atomically: if the process is killed, the old file or the new one remains."""
    # Python stores a path's invalid bytes as lone surrogates, which backslashreplace turns into JSON escapes
    replace_file(path, text.encode("utf-8", "backslashreplace"))
