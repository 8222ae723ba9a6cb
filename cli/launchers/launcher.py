"""Launcher: the interface between the command line and a cluster's way to start a run."""

import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from ..config.check import Config


class Launcher:
    """Starts a Legato command on other machines. Its fields are the keys under `launcher:` of a config."""

    name = ""
    """Name in a config."""
    flags = tuple[str, ...]()  # not annotated: it is no key of a config
    """Options and overrides that the command is started with, such as --quiet and task.lr=0.1."""

    def launch(self, command: str, config: "Config") -> int:
        """Start `legato COMMAND` with a config, and return the exit code. Raises ConfigError if that is impossible."""
        raise NotImplementedError


@dataclass(frozen=True)
class Machines:
    """The machines that a run needs, as known from its config alone."""

    nodes: int
    devices: int
    """Devices per node."""
    processes: int
    """Processes per node."""
    gpus: int
    """GPUs per node: all devices or none."""


def make_launcher(config: "Config") -> Launcher | None:
    """Return the launcher named in a config, or None."""
    from ..config.check import class_path, options_of
    from ..config.classes import load_class

    if config.values.get("launcher") is None:
        return None
    name, options = options_of(config.values["launcher"])
    launcher: Launcher = load_class(class_path("launcher", name))(**options)
    return launcher


def without_launcher(config: "Config", **changes: Any) -> str:
    """Return the config as YAML without `launcher`, and with changed arguments of the trainer."""
    values = {name: value for name, value in config.values.items() if name != "launcher"}
    values["trainer"] = {**values["trainer"], **changes}
    return replace(config, values=values).text()


def machines_of(values: Mapping[str, Any], name: str) -> Machines:
    """Return the machines that the config `values` need. Raises ConfigError if they depend on the current machine."""
    # here: what builds a trainer imports torch, which a misspelt launcher is told without
    from ...base.targets import TARGET, call_target
    from ..config.classes import load
    from ..unstarted import processes_of

    trainer = values["trainer"]
    devices, accelerator, strategy = trainer["devices"], trainer["accelerator"], trainer["strategy"]
    count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdecimal() else 0
    if not count or accelerator == "auto":
        raise ConfigError(
            f"launcher={name} starts the run on other machines than this one: set trainer.devices to the number of "
            f"devices of each node, and trainer.accelerator to gpu or cpu, instead of devices={devices!r} and "
            f"accelerator={accelerator!r}."
        )
    options = strategy if isinstance(strategy, Mapping) else {}
    if options.get("elastic"):
        raise ConfigError(
            f"launcher={name} starts a fixed number of processes; an elastic run (strategy.elastic=true) is started on "
            f"each machine by `legato fit` itself. Remove one of the two."
        )
    if TARGET in options:
        strategy = call_target(load(options[TARGET]), {key: options[key] for key in options if key != TARGET}, False)
    # only their number counts: this machine may have none of that kind
    processes, _ = processes_of({**trainer, "strategy": strategy, "devices": count})
    nodes = trainer["num_nodes"]
    return Machines(nodes, count, processes // nodes, 0 if accelerator == "cpu" else count)


def call_tool(launcher: str, *words: str, text: str = "") -> str:
    """Return what a cluster's command prints for this input. Raises WorkerError if it is missing or fails."""
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    except OSError as error:
        raise WorkerError(
            f"launcher={launcher} cannot run {words[0]} ({error.strerror}). Run it on a machine of the cluster; "
            f"launcher.dry_run=true only shows what it gets."
        ) from error
    if done.returncode != 0:
        raise WorkerError(f"`{shlex.join(words)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}.")
    return done.stdout
