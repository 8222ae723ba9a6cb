"""Launcher: the interface between the command line and a cluster's way to start a run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigError

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
    from .. import launchers

    wanted = config.values.get("launcher")
    if wanted is None:
        return None
    options = dict(wanted) if isinstance(wanted, Mapping) else {"name": wanted}
    found: Launcher = getattr(launchers, launchers.LAUNCHERS[options.pop("name")].split(":")[1])(**options)
    return found


def without_launcher(config: "Config", **changes: Any) -> str:
    """Return the config as YAML without `launcher`, and with changed arguments of the trainer."""
    values = {name: value for name, value in config.values.items() if name != "launcher"}
    values["trainer"] = {**values["trainer"], **changes}
    return replace(config, values=values).text()


def machines_of(values: Mapping[str, Any], name: str) -> Machines:
    """Return the machines that the config `values` need. Raises ConfigError if they depend on the current machine."""
    import torch

    trainer = values["trainer"]
    devices, accelerator = trainer["devices"], trainer["accelerator"]
    if isinstance(devices, list):
        count = len(devices)
    elif str(devices).isdecimal() and int(devices) > 0:
        count = int(devices)
    else:
        raise ConfigError(
            f"launcher={name} needs a fixed number of devices, but trainer.devices={devices!r} depends on the machine: "
            f"set it to the number of devices of each node."
        )
    if accelerator == "auto":
        raise ConfigError(
            f"launcher={name} needs a fixed kind of device, but trainer.accelerator='auto' depends on the machine: add "
            f"trainer.accelerator=gpu, or cpu."
        )
    strategy = _strategy_of(trainer, count)
    strategy.elastic.refuse(
        f"launcher={name} starts a fixed number of processes; an elastic run (strategy.elastic=true) is started on "
        f"each machine by `legato fit` itself. Remove one of the two."
    )
    # only their number counts: this machine may have none of that kind
    processes = strategy.local_processes([torch.device("cpu")] * count)
    return Machines(trainer["num_nodes"], count, processes, 0 if accelerator == "cpu" else count)


def _strategy_of(trainer: Mapping[str, Any], devices: int) -> Any:
    from ...base.targets import TARGET
    from ...trainer import strategies
    from ..config.classes import load_class

    wanted = trainer["strategy"]
    options = dict(wanted) if isinstance(wanted, Mapping) else {"name": wanted}
    if TARGET in options:
        return load_class(options.pop(TARGET))(**options)
    name = options.pop("name")
    if name == "auto":
        name = "ddp" if devices * trainer["num_nodes"] > 1 else "single"
    return getattr(strategies, strategies.STRATEGIES[name].split(":")[1])(**options)
