"""Launcher: the base class for starting a run on a cluster."""

import shlex
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...base.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from ..config.check import Config


@dataclass(frozen=True)
class Machines:
    """The machines that a run needs according to its config."""

    nodes: int
    processes: int
    """Processes per node."""
    gpus: int
    """GPUs per node, or 0 on the CPU."""


class Launcher:
    """Base class for starting a Legato command on other machines. Its fields are the keys of the `launcher` section."""

    name = ""
    """Name of the launcher in a config."""
    flags = tuple[str, ...]()  # not annotated, since it is not a config key
    """Options and overrides for the command, such as --quiet and task.lr=0.1."""

    def launch(self, command: str, config: "Config") -> int:
        """Start `legato COMMAND` with a config and return the exit code. Raises ConfigError if it cannot start."""
        # without the launcher, which the started command would otherwise use again
        return self.start(command, config.changed(launcher=None), machines_of(config, self.name))

    def start(self, command: str, config: "Config", machines: Machines) -> int:
        """Start `legato COMMAND` with a config on these machines and return the exit code."""
        raise NotImplementedError

    def call_tool(self, *words: str, text: str = "") -> str:
        """Run a cluster tool with `text` as input and return its output. Raises WorkerError if the tool fails."""
        try:
            done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
        except OSError as error:
            raise WorkerError(
                f"launcher={self.name} cannot run {words[0]} ({error.strerror}). Run this command on a machine in the "
                f"cluster. launcher.dry_run=true prints the job without starting it."
            ) from error
        if done.returncode != 0:
            raise WorkerError(f"`{shlex.join(words)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}.")
        return done.stdout


def machines_of(config: "Config", name: str) -> Machines:
    """Return the machines that a config needs. Raises ConfigError if the config does not determine them."""
    # imported here, since it imports torch, which the check of a launcher's name does not need
    from ..unstarted import processes_of

    trainer = config.values["trainer"]
    devices, accelerator, strategy = trainer["devices"], trainer["accelerator"], trainer["strategy"]
    count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdecimal() else 0
    if not count or accelerator == "auto":
        raise ConfigError(
            f"launcher={name} cannot resolve devices={devices!r} and accelerator={accelerator!r}, as the run starts on "
            f"other nodes. Set trainer.devices to the number of devices per node and trainer.accelerator to gpu or cpu."
        )
    if isinstance(strategy, dict) and strategy.get("elastic"):
        raise ConfigError(
            f"launcher={name} starts a fixed number of processes, so it cannot be combined with an elastic run "
            f"(strategy.elastic=true). Remove the launcher and run `legato fit`, or remove strategy.elastic."
        )
    # counts devices without looking for them, since this machine may not have them
    processes, _ = processes_of(config.changed({"devices": count}))
    nodes = trainer["num_nodes"]
    gpus = len(set(devices)) if isinstance(devices, list) else count  # a repeated index is one shared device
    return Machines(nodes, processes // nodes, 0 if accelerator == "cpu" else gpus)
