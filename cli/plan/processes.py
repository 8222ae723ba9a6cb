"""Processes of a plan: their number, mesh axes and servers, from a config. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...base.errors import ConfigError
from ...trainer.data.sampling import Layout
from ...trainer.strategies.mesh.sizes import AXES, Sizes, fit_sizes, read_sizes
from ..config.read import read_strategy

ONE_PROCESS = ("single", "data_parallel")
"""Strategies with a single process."""
KNOWN = ("auto", "ddp", "ddp_model_parallel", "ddp_rpc", "zero1", "fsdp", "mesh", *ONE_PROCESS)


@dataclass(frozen=True)
class Processes:
    """The processes of a run; servers have the last ranks."""

    count: int
    nodes: int = 1
    sizes: Sizes | None = None
    """Axis sizes of the mesh; None without one, when each process has its own samples."""
    servers: int = 0
    """Number of processes that hold remote modules and have no samples."""

    @property
    def data_size(self) -> int:
        """Number of groups of processes with different replicas; servers do not count."""
        return self.count - self.servers if self.sizes is None else self.sizes.replicating

    @property
    def together(self) -> int:
        """Number of consecutive ranks with the same replicas: the axis tensor."""
        return 1 if self.sizes is None else self.sizes.tensor

    @property
    def pipeline(self) -> int:
        """Number of pipeline stages."""
        return 1 if self.sizes is None else self.sizes.pipeline

    def owned(self, rank: int, layout: Layout) -> range:
        """Return the replicas of a rank; none for a server."""
        if rank >= self.count - self.servers:
            return range(0)
        return layout.owned(rank if self.sizes is None else self.sizes.data_rank(rank))


def find_processes(trainer: Mapping[str, Any]) -> Processes:
    """Return the processes of a config's trainer section. Raises ConfigError for an impossible layout."""
    name, options = read_strategy(trainer)
    nodes = trainer["num_nodes"]
    if name not in KNOWN:
        raise ConfigError(f"plan knows the strategies {', '.join(KNOWN)} by name, got {trainer['strategy']!r}.")
    devices = count_devices(trainer["devices"], trainer["accelerator"])
    for word, count in (("nodes", nodes), ("devices", devices)):
        if count < 1:
            raise ConfigError(f"{word}={count}: expected at least 1.")
    if name in ONE_PROCESS:
        if nodes > 1:
            raise ConfigError(
                f"strategy {name!r} runs in one process, but trainer.num_nodes={nodes}; use strategy ddp."
            )
        return Processes(1)
    if name == "ddp_rpc":
        return with_servers(options, nodes, devices)
    if name == "ddp_model_parallel":
        parts = options.get("part_devices") or ()
        devices, size = len(parts) or devices, options.get("devices_per_replica") or len(parts) or 2
        if devices % size:
            raise ConfigError(f"devices={devices} is no multiple of devices_per_replica={size}.")
        devices //= size
    count, sizes = nodes * devices, None
    if name == "mesh":
        asked = {axis: options.get(axis, 1) for axis in AXES}
        read_sizes(asked)
        sizes = fit_sizes(asked, count, nodes)
    elif name == "fsdp":
        sizes = Sizes(data=1, shard=count, tensor=1, pipeline=1)
    return Processes(count, nodes if count > 1 else 1, sizes)


def with_servers(options: Mapping[str, Any], nodes: int, devices: int) -> Processes:
    """Return the processes of ddp_rpc: one trainer per device, and the servers. Raises ConfigError for invalid
    numbers."""
    servers = options.get("servers", 1)
    if isinstance(servers, bool) or not isinstance(servers, int) or servers < 1:
        raise ConfigError(f"servers={servers!r}: expected at least 1 process for the remote modules.")
    if nodes > 1:
        raise ConfigError(f"strategy ddp_rpc runs on one node, but trainer.num_nodes={nodes}. Set num_nodes to 1.")
    return Processes(devices + servers, servers=servers)


def count_parts(trainer: Mapping[str, Any], processes: Processes) -> tuple[int, int] | None:
    """Return the number of parts of weights (with gradients) and of optimizer state, if they are equal parts.

    None for ddp_rpc, whose division depends on the task.
    """
    if processes.servers:
        return None
    if processes.sizes is not None:
        cut = processes.count // processes.sizes.data
        return cut, cut
    return (1, processes.count) if read_strategy(trainer)[0] == "zero1" else (1, 1)


def count_devices(devices: Any, accelerator: str) -> int:
    """Return the number of devices per machine; "auto" counts those of this machine."""
    if isinstance(devices, list):
        return len(devices) or 1
    if isinstance(devices, str) and devices.isdecimal():
        return int(devices)
    if devices in ("auto", -1, "-1"):
        if accelerator == "cpu":
            return 1
        from ...trainer.processes.devices import find_devices

        return len(find_devices(accelerator, devices))
    if isinstance(devices, int):
        return devices
    raise ConfigError(f"trainer.devices={devices!r}: expected a positive count, a list of indices, -1 or 'auto'.")
