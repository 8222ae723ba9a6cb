"""RunFile: `run.json`, which makes a folder a run directory, and says which run that is and how it stands.

legato, id, stage        version, identity of the run, and what was called: fit, validate, test or predict
state                    starting, running, done, failed or preempted; error and traceback of the last two
created, began, ended    times of the first start, of the newest one, and of its end, in seconds since 1970
step, epoch, elapsed     of the training, when it began or ended; max_steps and max_epochs
monitor, mode, best      the metric that checkpoints go by, its best value, and best_checkpoint that has it
config, set              the config under dotted keys, and those of them that files or the command line have set

Rank 0 replaces it when a run starts, begins to train and ends. A process that is killed writes nothing, so "running"
holds only while somebody has the directory's lock.
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
"""Characters of a traceback that are kept, from its end."""
_RESUME_ME = 75  # processes/signals.py, which loads more than a reader needs
_BEFORE = (".run", "status.json")


class RunFile:
    """The `run.json` that one call of fit, validate, test or predict keeps in its run directory."""

    def __init__(self) -> None:
        self._begun: dict[str, Any] = {}
        """What was written when the training began; empty before."""

    def begin(self, directory: Path, stage: str, values: Mapping[str, Any]) -> None:
        """Write that the run is under way; `values`: what it has of the fields above."""
        if _takes(directory, stage):
            known = {**read(directory), "state": RUNNING, "began": time.time()}
            ended = ("ended", "error", "traceback")
            self._begun = {name: value for name, value in known.items() if name not in ended} | dict(values)
            _replace(directory, self._begun)

    def store_config(self, directory: Path, values: Mapping[str, Any]) -> None:
        """Write the config of a start that goes on with a run, once it has trained weights; `values`: `config_of`."""
        self._begun |= values
        _replace(directory, {**read(directory), **values})

    def end(self, directory: Path, stage: str, values: Mapping[str, Any], error: BaseException | None) -> None:
        """Write how the run ended. A resume that was refused before it began leaves the file as it is."""
        if _takes(directory, stage) and (self._begun or read(directory)["state"] == STARTING):
            _replace(directory, {**read(directory), **self._begun, **values, "ended": time.time(), **_outcome(error)})


def create(directory: Path, identity: str, stage: str) -> None:
    """Make a folder the directory of a run. Raises OSError where it cannot be written to."""
    if identity_of(directory) != identity:
        _write(directory, new_run(identity, stage))


def new_run(identity: str, stage: str) -> dict[str, Any]:
    """Return the first contents of the file."""
    return {"legato": __version__, "id": identity, "stage": stage, "state": STARTING, "created": time.time()}


def fail(directory: Path, error: BaseException, since: float) -> None:
    """Write how workers ended that this process started at the time `since`: it knows which of them failed first.

    A file of before is left as it is: the workers refused to resume that run.
    """
    values = read(directory)
    if values and values.get("began", since) >= since:
        _replace(directory, {**values, "ended": time.time(), **_outcome(error)})


def read(directory: Path) -> dict[str, Any]:
    """Return the `run.json` of a run directory; {} for a folder that is none."""
    # both words, as other programs write a run.json, too; nothing of theirs is listed or deleted
    values = parse_small(directory / RUN_FILE)
    if not isinstance(values, dict) or not values.get("legato"):
        return {}
    return values if isinstance(values.get("id"), str) and values["id"] else {}


def identity_of(directory: Path | None) -> str:
    """Return the identity of the run in a run directory; "" for a folder that is none."""
    return "" if directory is None else str(read(directory).get("id", ""))


def require_readable(directory: Path) -> None:
    """Raise ConfigError for a run directory of an earlier Legato."""
    if not (directory / RUN_FILE).exists() and any((directory / name).is_file() for name in _BEFORE):
        raise ConfigError(
            f"{directory} is the run directory of an earlier Legato, without {RUN_FILE}; the last commit that reads it "
            f"is {LAST_READER_OF_RUNS}."
        )


def config_of(text: str | None, given: str | None) -> dict[str, Any]:
    """Return what `run.json` holds of a config: its values, and the keys that files and the command line have set."""
    found: dict[str, Any] = {} if text is None else {"config": flat_config(text)}
    return found if given is None else {**found, "set": list(flat_config(given))}


def flat_config(text: str) -> dict[str, Any]:
    """Return the values of a YAML config under dotted keys; a list is one value."""
    import yaml  # a reader of runs does without

    flat: dict[str, Any] = {}

    def add(values: Mapping[str, Any], above: str) -> None:
        for name, value in values.items():
            if isinstance(value, dict) and value:
                add(value, f"{above}{name}.")
            else:
                flat[f"{above}{name}"] = value

    add(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}, "")
    return flat


def _takes(directory: Path, stage: str) -> bool:
    """Return whether a call writes here: the evaluation of a trainer's own run must not overwrite how that ended."""
    # an evaluation may also run in the directory of its training
    return read(directory).get("stage") == stage


def _outcome(error: BaseException | None) -> dict[str, Any]:
    """Return the state that an error leaves a run in, with the error's text and traceback."""
    if error is None:
        return {"state": DONE}
    # asked to end is not failed: `legato runs` lists what can simply go on
    if isinstance(error, KeyboardInterrupt):
        return {"state": PREEMPTED, "error": "Ctrl-C"}
    if isinstance(error, SystemExit) and error.code == _RESUME_ME:
        return {"state": PREEMPTED, "error": "a signal asked it to end"}
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    said = "".join(traceback.format_exception_only(type(error), error)).strip()
    return {"state": FAILED, "error": said, "traceback": "".join(lines)[-LONGEST_TRACEBACK:]}


def _replace(directory: Path, values: Mapping[str, Any]) -> None:
    # a directory that is gone, full or read-only is for those to report who write results
    with suppress(OSError):
        _write(directory, values)


def _write(directory: Path, values: Mapping[str, Any]) -> None:
    replace_text(directory / RUN_FILE, json.dumps(values, indent=1, default=str))


def replace_text(path: Path, text: str) -> None:
    """Write a file of a run directory; a kill leaves either the old or the new one."""
    # a byte of a path that is no character is a lone surrogate in Python, which this makes an escape of JSON
    replace_file(path, text.encode("utf-8", "backslashreplace"))
