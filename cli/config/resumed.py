"""Builds the config of a run that `resume=auto` continues: its stored config plus the command line's overrides."""

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
"""Maximum number of keys in the message about differences."""
OF_THE_COMMAND = ("run", "resume", "checkpoint", "vars", "launcher")
"""Sections about a run's location and launch, and `vars`, which is already resolved in the stored config."""


def load_to_fit(arguments: Sequence[str], before_imports: Callable[[Mapping[str, Any]], None] | None = None) -> Config:
    """Return the config of a new run, as `load_config` does, or of a run to resume.

    With `resume=auto`, the overrides among the arguments are applied to the resumed run's stored config. A warning
    lists the keys whose values in the files differ from the run's. Raises ConfigError if the files specify a different
    task.
    """
    overrides = overrides_among(arguments)
    # if an override changes an entry that only the stored config has, the files alone are not a valid config
    entries = [word for word in overrides if word.startswith(("callbacks.", "loggers.")) and "resume=auto" in arguments]
    config = load_config([word for word in arguments if word not in entries], before_imports)
    place_of_run = config.values["run"]
    run = config.directory
    if config.values["resume"] == "auto" and run is None:
        run = newest_to_resume(to_location(place_of_run["root"]), place_of_run["name"])
    # nothing to resume yet, or a run that a script started, which has no stored config
    if config.values["resume"] != "auto" or run is None or not (run / CONFIG).is_file():
        return load_config(arguments) if entries else config
    stored = load_config([str(run / CONFIG), *overrides])
    _require_same_task(run, config, stored)
    replicas, origins = stored.values["trainer"]["replicas"], _origins(run, stored)
    if replicas is None:  # keep the run's number of replicas, even in later runs of its config
        replicas, origins["trainer", "replicas"] = last_replicas(run), str(run / RECORD)
    # the run's current location, since its folder may have been moved
    run_section = stored.values["run"] | {name: place_of_run[name] for name in ("root", "name")}
    place = find_place(stored.values["trainer"]["cluster"])
    # only on rank 0
    if place is None or place.rank == 0:
        _warn_of_differences(run, config, stored)
    # passed to fit, which must resume this run even if a newer one ends in the meantime
    resumed = run if config.directory is None else None
    changed = stored.changed({"replicas": replicas}, run=run_section, resume="auto")  # even if a file sets it
    return replace(changed, origins=origins, directory=config.directory, resumed=resumed)


def _require_same_task(run: Path, config: Config, stored: Config) -> None:
    task, trained = (values["task"][TARGET] for values in (config.values, stored.values))
    if task != trained:
        raise ConfigError(
            f"{config.origin(('task', TARGET))}: resume=auto continues {run}, which trains {trained!r}, but this "
            f"config has {task!r}. Set a different run.name. If the class has moved, update its path in {run / CONFIG}."
        )


def _warn_of_differences(run: Path, config: Config, stored: Config) -> None:
    differences = list(_differences(config, stored))
    if differences:
        more = f"; and {len(differences) - LONGEST_LIST} more" if len(differences) > LONGEST_LIST else ""
        let_be_seen()
        log.warning(
            "resume=auto continues with the config of %s and ignores differences in the config files: %s%s. To change "
            "a value, set it on the command line.", run, "; ".join(differences[:LONGEST_LIST]), more,
        )  # fmt: skip


def _differences(config: Config, stored: Config) -> Iterator[str]:
    """Yield each key whose value differs between a file and the run, with both values."""
    stored_values = dict(leaves(stored.values, ()))
    for key, value in leaves(config.values, ()):
        origin = config.origin(key)
        secret = key in config.secrets or key in stored.secrets
        if key[0] in OF_THE_COMMAND or secret or origin.startswith(("default", "override")):
            continue
        if key not in stored_values:
            yield f"{dotted(key)} is {format_value(value)} in {origin}, but missing from the run's config"
        elif not same(value, stored_values[key]):
            value_of_run = format_value(stored_values[key])
            yield f"{dotted(key)} is {value_of_run} in the run, not {format_value(value)} ({origin})"


def _origins(run: Path, stored: Config) -> dict[Key, str]:
    """Return the origins of the stored values, or "default" for values that were defaults when the run started."""
    path = run / GIVEN_CONFIG
    try:
        explicit = parse_yaml(path.read_text(encoding="utf-8"), str(path)).origins
    except (OSError, UnicodeDecodeError, ConfigError):  # the file may be missing or edited
        return stored.origins
    return {
        key: origin if key in explicit or origin.startswith(("override", "default")) else "default"
        for key, origin in stored.origins.items()
    }
