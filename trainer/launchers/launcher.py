"""Launcher: the contract between the command line and whatever starts a run on other machines."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config.check import Config


class Launcher:
    """Starts a command of Legato elsewhere. Its fields are the keys under `launcher:` of a config."""

    name = ""
    """The word for it in a config."""

    def launch(self, command: str, config: "Config") -> int:
        """Start `legato COMMAND` with a config, and return the exit code; raises ConfigError where that cannot be."""
        raise NotImplementedError


@dataclass(frozen=True)
class Machines:
    """What a run needs of each machine, as far as a config tells without a look at the machines."""

    nodes: int
    devices: int
    """Devices of each node."""
    processes: int
    """Processes on each node."""
    gpus: int
    """How many of the devices are GPUs: all or none."""


def make_launcher(config: "Config") -> Launcher | None:
    """Return the launcher that a config names, None where it names none."""
    from . import LAUNCHERS
    from . import __getattr__ as launcher_class

    wanted = config.values.get("launcher")
    if wanted is None:
        return None
    options = dict(wanted) if isinstance(wanted, Mapping) else {"name": wanted}
    found: Launcher = launcher_class(LAUNCHERS[options.pop("name")].split(":")[1])(**options)
    return found


def without_launcher(config: "Config", **changes: Any) -> str:
    """Return the config as YAML for the machines that run it, with other values for some arguments of the trainer."""
    from ..config.check import Config

    values = {name: value for name, value in config.values.items() if name != "launcher"}
    values["trainer"] = {**values["trainer"], **changes}
    return Config(values, config.origins).text()


def machines_of(values: Mapping[str, Any], name: str) -> Machines:
    """Return what the config `values` ask for. Raises ConfigError where the machine at hand would have to tell."""
    import torch

    trainer = values["trainer"]
    devices, accelerator = trainer["devices"], trainer["accelerator"]
    if isinstance(devices, list):
        count = len(devices)
    elif str(devices).isdecimal() and int(devices) > 0:
        count = int(devices)
    else:
        raise ConfigError(
            f"launcher={name} must know what to ask for, but trainer.devices={devices!r} depends on the machine: set "
            f"it to the number of devices of each node."
        )
    if accelerator not in ("cpu", "cuda", "gpu"):
        raise ConfigError(
            f"launcher={name} must know what to ask for, but trainer.accelerator={accelerator!r} depends on the "
            f"machine: set it to cpu or cuda."
        )
    kind = "cpu" if accelerator == "cpu" else "cuda"
    strategy = _strategy_of(trainer, count)
    strategy.elastic.refuse(
        f"launcher={name} starts a fixed number of processes; an elastic run (strategy.elastic=true) is started on "
        f"each machine by `legato fit` itself. Leave one of the two out."
    )
    processes = strategy.local_processes([torch.device(kind, index) for index in range(count)])
    return Machines(trainer["num_nodes"], count, processes, count if kind == "cuda" else 0)


def _strategy_of(trainer: Mapping[str, Any], devices: int) -> Any:
    from ..config.read import TARGET
    from ..config.signatures import load_class
    from ..strategies import STRATEGIES
    from ..strategies import __getattr__ as strategy_class

    wanted = trainer["strategy"]
    options = dict(wanted) if isinstance(wanted, Mapping) else {"name": wanted}
    if TARGET in options:
        return load_class(options.pop(TARGET))(**options)
    name = options.pop("name")
    if name == "auto":
        name = "ddp" if devices * trainer["num_nodes"] > 1 else "single"
    return strategy_class(STRATEGIES[name].split(":")[1])(**options)
