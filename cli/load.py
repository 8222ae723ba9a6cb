"""First steps of commands that run a config: load it, hand it to a launcher if it names one, or find its weights."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError
from ..base.messages import is_quiet, shown_options
from ..trainer.processes.environment import find_place, warm_up_for
from .config.build import build_config
from .config.check import load_config
from .config.read import read_strategy
from .config.resumed import load_to_fit

if TYPE_CHECKING:
    from .config.build import ConfiguredRun
    from .config.check import Config


_STRATEGIES = ("auto", "ddp", "zero1", "fsdp", "mesh", "ddp_rpc")
"""Strategies with a process for each device, wherever there are several."""


def load_or_launch(arguments: Sequence[str], command: str) -> "Config":
    """Return the config; if it names a launcher, run the command there instead and exit."""
    config = load_to_fit(arguments) if command == "fit" else load_config(arguments)
    if config.values.get("launcher") is not None:
        from .launchers.launcher import make_launcher

        launcher = make_launcher(config)
        assert launcher is not None
        # with resume=auto the job lays these on the run's own config once more
        launcher.flags = (*shown_options(), *(config.override_words() if command == "fit" else ()))
        if config.directory is not None:
            _resolve_own_run(config, command)
        sys.exit(launcher.launch(command, config))
    trainer = config.values["trainer"]
    (strategy, _), devices = read_strategy(trainer), trainer["devices"]
    several = devices > 1 if isinstance(devices, int) else isinstance(devices, list) and len(devices) > 1
    # only where it is plain without torch that there will be workers
    if several and strategy in _STRATEGIES and find_place(trainer["cluster"]) is None:
        warm_up_for(strategy, trainer)  # it imports torch while this process does
    return config


def build_run(config: "Config") -> "ConfiguredRun":
    """Build the objects of a config; with --quiet without the callbacks that only show something."""
    from ..callbacks.model_summary import ModelSummary
    from ..callbacks.progress_bar import ProgressDisplay

    run = build_config(config)
    if is_quiet():
        shown = (ModelSummary, ProgressDisplay)
        run.trainer.callbacks = [one for one in run.trainer.callbacks if not isinstance(one, shown)]
    return run


def weights_of(run: "ConfiguredRun") -> Any:
    """Return the checkpoint to evaluate: by default the best one of the config's run; None for a fresh task."""
    if run.checkpoint == "none":
        return None
    return run.stored(run.checkpoint or "") if run.checkpoint in (None, "best", "last") else run.checkpoint


def _resolve_own_run(config: "Config", command: str) -> None:
    """Resolve what a run's own config means by its place, since a launcher takes only the values along.

    Raises ConfigError if `resume=auto` would mean another run there.
    """
    from ..trainer.runs.places import newest_checkpoint

    values, run = config.values, build_config(config)
    if command == "fit" and values["resume"] == "auto":
        newest = newest_checkpoint(Path(run.trainer.default_root_dir), run.trainer.run_name)
        if newest is not None and not newest[0].samefile(config.directory or ""):
            raise ConfigError(
                f"resume=auto with a launcher resumes the newest run of {run.trainer.run_name!r}, {newest[0]}, and "
                f"not {config.directory}, whose config this is. Give resume=PATH, or remove the launcher."
            )
    elif command != "fit" and values["checkpoint"] in (None, "best", "last"):
        values["checkpoint"] = os.path.abspath(weights_of(run).weights(run.trainer.checkpoint_callbacks))
