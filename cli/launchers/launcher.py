"""Launcher: the interface between the command line and a cluster's way to start a run."""

import shlex
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...base.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from ..config.check import Config


@dataclass(frozen=True)
class Machines:
    """The machines that a run needs, as known from its config alone."""

    nodes: int
    processes: int
    """Processes per node."""
    gpus: int
    """GPUs per node: all devices or none."""


class Launcher:
    """Starts a Legato command on other machines. Its fields are the keys under `launcher:` of a config."""

    name = ""
    """Name in a config."""
    flags = tuple[str, ...]()  # not annotated: it is no key of a config
    """Options and overrides that the command is started with, such as --quiet and task.lr=0.1."""

    def launch(self, command: str, config: "Config") -> int:
        """Start `legato COMMAND` with a config, and return the exit code. Raises ConfigError if that is impossible."""
        # without the launcher, which would start it from there once more
        return self.start(command, config.changed(launcher=None), machines_of(config, self.name))

    def start(self, command: str, config: "Config", machines: Machines) -> int:
        """Start `legato COMMAND` with a config on machines, and return the exit code."""
        raise NotImplementedError

    def call_tool(self, *words: str, text: str = "") -> str:
        """Return what a cluster's command prints for this input. Raises WorkerError if it is missing or fails."""
        try:
            done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
        except OSError as error:
            raise WorkerError(
                f"launcher={self.name} cannot run {words[0]} ({error.strerror}). Run it on a machine of the cluster; "
                f"launcher.dry_run=true only shows what it gets."
            ) from error
        if done.returncode != 0:
            raise WorkerError(f"`{shlex.join(words)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}.")
        return done.stdout


def machines_of(config: "Config", name: str) -> Machines:
    """Return the machines that a config needs. Raises ConfigError if they depend on the current machine."""
    # here: what builds a trainer imports torch, which a misspelt launcher is told without
    from ..unstarted import processes_of

    trainer = config.values["trainer"]
    devices, accelerator, strategy = trainer["devices"], trainer["accelerator"], trainer["strategy"]
    count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdecimal() else 0
    if not count or accelerator == "auto":
        raise ConfigError(
            f"launcher={name} starts the run on other machines than this one: set trainer.devices to the number of "
            f"devices of each node, and trainer.accelerator to gpu or cpu, instead of devices={devices!r} and "
            f"accelerator={accelerator!r}."
        )
    if isinstance(strategy, dict) and strategy.get("elastic"):
        raise ConfigError(
            f"launcher={name} starts a fixed number of processes; an elastic run (strategy.elastic=true) is started on "
            f"each machine by `legato fit` itself. Remove one of the two."
        )
    # only their number counts: this machine may have none of that kind
    processes, _ = processes_of(config.changed({"devices": count}))
    nodes = trainer["num_nodes"]
    gpus = len(set(devices)) if isinstance(devices, list) else count  # an index that is there twice is one for two
    return Machines(nodes, processes // nodes, 0 if accelerator == "cpu" else gpus)
