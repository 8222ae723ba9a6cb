"""The config with which `resume=auto` goes on: the run's own, with what is set on this command line on top of it."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from ...base.location import to_location
from ...base.messages import let_be_seen
from ...base.place import find_place
from ...base.run_names import CONFIG
from ...base.targets import TARGET
from ...base.values import Key, same
from ...trainer.runs.places import newest_to_resume
from ...trainer.runs.record import GIVEN_CONFIG, RECORD, last_replicas
from .check import Config, load_config
from .read import dotted, format_value, leaves, overrides_among, parse_yaml

log = logging.getLogger("legato")

LONGEST_LIST = 8
"""Keys that the message about differences lists."""
OF_THE_COMMAND = ("run", "resume", "checkpoint", "vars", "launcher")
"""Sections that say where a run is and how it is started, or that the stored config has resolved."""


def load_to_fit(arguments: Sequence[str], before_imports: Callable[[Mapping[str, Any]], None] | None = None) -> Config:
    """Read the config of a run to start, as `load_config` does; of one to resume, take the run's own.

    With `resume=auto` the overrides among the arguments are laid on the config of the run that goes on. Each key of the
    given files that says something else is named in a warning. Raises ConfigError where they name another task.
    """
    overrides = overrides_among(arguments)
    # overrides of entries that only the run has: the files alone may be no config with them
    entries = [word for word in overrides if word.startswith(("callbacks.", "loggers.")) and "resume=auto" in arguments]
    given = load_config([word for word in arguments if word not in entries], before_imports)
    where = given.values["run"]
    run = given.directory
    if given.values["resume"] == "auto" and run is None:
        run = newest_to_resume(to_location(where["root"]), where["name"])
    # nothing to resume yet, or the run of a script: then this config is the one
    if given.values["resume"] != "auto" or run is None or not (run / CONFIG).is_file():
        return load_config(arguments) if entries else given
    stored = load_config([str(run / CONFIG), *overrides])
    _require_same_task(run, given, stored)
    replicas, origins = stored.values["trainer"]["replicas"], _origins(run, stored)
    if replicas is None:  # the run keeps them, and so does whoever runs its config again
        replicas, origins["trainer", "replicas"] = last_replicas(run), str(run / RECORD)
    # where the run lies now: its folder may have been moved since
    run_section = stored.values["run"] | {name: where[name] for name in ("root", "name")}
    place = find_place(stored.values["trainer"]["cluster"])
    # once, and not by every rank
    if place is None or place.rank == 0:
        _tell_differences(run, given, stored)
    # told to fit, which must not pick another run: one may have ended meanwhile
    resumed = run if given.directory is None else None
    config = stored.changed({"replicas": replicas}, run=run_section, resume="auto")  # also where a file says it
    return replace(config, origins=origins, directory=given.directory, resumed=resumed)


def _require_same_task(run: Path, given: Config, stored: Config) -> None:
    wanted, trained = (config.values["task"][TARGET] for config in (given, stored))
    if wanted != trained:
        raise ConfigError(
            f"{given.origin(('task', TARGET))}: resume=auto goes on with {run}, which trains {trained!r}, and not "
            f"{wanted!r}. Give a run.name of its own to another task; if the class has moved, write its new name into "
            f"{run / CONFIG}."
        )


def _tell_differences(run: Path, given: Config, stored: Config) -> None:
    differences = list(_differences(given, stored))
    if differences:
        more = f"; and {len(differences) - LONGEST_LIST} more" if len(differences) > LONGEST_LIST else ""
        let_be_seen()
        log.warning(
            "resume=auto goes on with the config of %s, which counts where the given files differ: %s%s. To change a "
            "value, set it on the command line.", run, "; ".join(differences[:LONGEST_LIST]), more,
        )  # fmt: skip


def _differences(given: Config, stored: Config) -> Iterator[str]:
    """Yield each key that a file sets to another value than the run has, with both values."""
    theirs = dict(leaves(stored.values, ()))
    for key, value in leaves(given.values, ()):
        origin = given.origin(key)
        secret = key in given.secrets or key in stored.secrets
        if key[0] in OF_THE_COMMAND or secret or origin.startswith(("default", "override")):
            continue
        if key not in theirs:
            yield f"{dotted(key)} is {format_value(value)} in {origin}, and not in the run's config"
        elif not same(value, theirs[key]):
            yield f"{dotted(key)} is {format_value(theirs[key])} in the run, not {format_value(value)} ({origin})"


def _origins(run: Path, stored: Config) -> dict[Key, str]:
    """Return the origins of the stored values: of those that were defaults when the run began, "default"."""
    path = run / GIVEN_CONFIG
    try:
        given = parse_yaml(path.read_text(encoding="utf-8"), str(path)).origins
    except (OSError, UnicodeDecodeError, ConfigError):  # an old run, or somebody has edited it
        return stored.origins
    return {
        key: origin if key in given or origin.startswith(("override", "default")) else "default"
        for key, origin in stored.origins.items()
    }
