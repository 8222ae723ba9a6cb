"""RunStatus: `status.json` in a run directory, with the state of the run: running, done, failed or preempted.

Rank 0 writes it when the training begins and when it ends, by an atomic replacement. A process that is killed writes
nothing, so "running" holds only while somebody has the directory's lock; `run_directory.py` reads both.
"""

import json
import math
import os
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...base.run_names import identity_of, parse_small

STATUS = "status.json"
RUNNING, DONE, FAILED, PREEMPTED = "running", "done", "failed", "preempted"
LONGEST_TRACEBACK = 20_000
"""Characters of a traceback that are kept, from its end."""
_RESUME_ME = 75  # processes/signals.py, which loads more than a reader needs


class RunStatus:
    """The status file that one call of fit keeps in its run directory."""

    def __init__(self) -> None:
        self._values: dict[str, Any] | None = None
        """The record written when the training began; None before."""

    def begin(self, directory: Path, progress: Mapping[str, Any]) -> None:
        """Write that the run is under way.

        progress: "step", "epoch" counted from 1, "elapsed" in seconds over all resumes, and further values.
        """
        first = read_status(directory).get("created")
        now = time.time()
        self._values = {"state": RUNNING, "created": first or now, "began": now}
        _replace(directory, {**self._values, **progress})

    def end(self, directory: Path, progress: Mapping[str, Any], error: BaseException | None) -> None:
        """Write how the run ended. A resume that was refused before it began leaves the file as it is."""
        if self._values is None and read_status(directory):
            return
        _replace(directory, {**(self._values or {}), **progress, "ended": time.time(), **_outcome(error)})


def fail(directory: Path, error: BaseException, since: float) -> None:
    """Write how workers ended that this process started at the time `since`: it knows which of them failed first.

    A file of before is left as it is: the workers refused to resume that run.
    """
    found = read_status(directory)
    if not found or found.get("began", since) >= since:
        _replace(directory, {**found, "ended": time.time(), **_outcome(error)})


def read_status(directory: Path) -> dict[str, Any]:
    """Return what the status file of a run directory says; {} if there is none, or none that can be read."""
    found = parse_small(directory / STATUS)
    return found if isinstance(found, dict) else {}


def finite_only(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among values that strict JSON can hold."""
    return {str(name): one for name, one in values.items() if isinstance(one, int | float) and math.isfinite(one)}


def _outcome(error: BaseException | None) -> dict[str, Any]:
    """Return the state that an error leaves a run in, with the error's text and traceback."""
    if error is None:
        return {"state": DONE}
    if isinstance(error, KeyboardInterrupt):
        return {"state": PREEMPTED, "error": "Ctrl-C"}
    if isinstance(error, SystemExit) and error.code == _RESUME_ME:
        return {"state": PREEMPTED, "error": "a signal asked it to end"}
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    said = "".join(traceback.format_exception_only(type(error), error)).strip()
    return {"state": FAILED, "error": said, "traceback": "".join(lines)[-LONGEST_TRACEBACK:]}


def _replace(directory: Path, values: Mapping[str, Any]) -> None:
    """Replace the file; a directory that is gone, full or read-only is for those to report who write results."""
    # `legato clean` deletes a run only where both files name the same one: others write a status.json, too
    values = {**values, "run": identity_of(directory)}
    partial = directory / f".{STATUS}.partial"
    with suppress(OSError):
        partial.write_text(json.dumps(values, indent=1, default=str), encoding="utf-8")
        os.replace(partial, directory / STATUS)
