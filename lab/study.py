"""The study of a run from Python: `history_of` opens its history, whether a config or a script began it."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ..base.run_names import CONFIG
from ..trainer.runs.directory import RunDirectory, find_run
from .history import StudiedRun
from .script import ScriptHistory


def history_of(run: "str | Path | RunDirectory", overrides: Sequence[str] = ()) -> StudiedRun:
    """Return the history of a run; its `make` and `unstarted` make the objects of a step.

    overrides: such as "trainer.devices=2"; of a run by a config any of its keys.

    Raises ConfigError where there is no such run.
    """
    directory = run.path if isinstance(run, RunDirectory) else find_run(run).path
    if not (directory / CONFIG).is_file():
        return ScriptHistory(directory, overrides)
    # what builds a config lies above this room
    history: StudiedRun = import_module("..cli.history", __package__).ConfigHistory(directory, overrides)
    return history
