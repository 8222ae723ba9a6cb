"""The processes of a plan: how many a config asks for, on which axes, and which of them only serve. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...data.sampling import Layout
from ...errors import ConfigError
from ...strategies.mesh.sizes import AXES, Sizes, fit_sizes, read_sizes

ONE_PROCESS = ("single", "data_parallel")
"""The strategies that run in one process, on however many devices; ddp has a process for each."""
KNOWN = ("auto", "ddp", "ddp_model_parallel", "ddp_rpc", "zero1", "fsdp", "mesh", *ONE_PROCESS)


@dataclass(frozen=True)
class Processes:
    """The processes of a run; the ranks of the servers are the last ones."""

    count: int
    nodes: int = 1
    sizes: Sizes | None = None
    """The axes of the mesh in which they stand; None: in none, each has samples of its own."""
    servers: int = 0
    """How many hold remote modules, and have no samples."""

    @property
    def data_size(self) -> int:
        """How many share out the replicas: the servers do not, and in a mesh several may have the same ones."""
        return self.count - self.servers if self.sizes is None else self.sizes.replicating

    @property
    def together(self) -> int:
        """How many neighbours have the same replicas: those of the axis tensor."""
        return 1 if self.sizes is None else self.sizes.tensor

    @property
    def pipeline(self) -> int:
        """How many places a pipeline has."""
        return 1 if self.sizes is None else self.sizes.pipeline

    def owned(self, rank: int, layout: Layout) -> range:
        """Return the replicas that a rank works on; a server has none."""
        if rank >= self.count - self.servers:
            return range(0)
        return layout.owned(rank if self.sizes is None else self.sizes.data_rank(rank))


def find_processes(trainer: Mapping[str, Any]) -> Processes:
    """Return the processes of the wanted layout. Raises ConfigError for one that there cannot be."""
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


def read_strategy(trainer: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the name of the strategy, and its options."""
    strategy = trainer["strategy"]
    options = dict(strategy) if isinstance(strategy, dict) else {"name": strategy}
    return options.pop("name", None), options


def with_servers(options: Mapping[str, Any], nodes: int, devices: int) -> Processes:
    """Return the processes of ddp_rpc: one trainer a device, and the servers. Raises ConfigError where it has none."""
    servers = options.get("servers", 1)
    if isinstance(servers, bool) or not isinstance(servers, int) or servers < 1:
        raise ConfigError(f"servers={servers!r}: expected at least 1 process for the remote modules.")
    if nodes > 1:
        raise ConfigError(f"strategy ddp_rpc runs on one node, but trainer.num_nodes={nodes}. Set num_nodes to 1.")
    return Processes(devices + servers, servers=servers)


def count_parts(trainer: Mapping[str, Any], processes: Processes) -> tuple[int, int] | None:
    """Return into how many parts ranks take weights and gradients, and the optimizer's state, if these are equal.

    None where a number of parameters does not even tell who has how many.
    """
    if processes.servers:
        return None
    if processes.sizes is not None:
        cut = processes.count // processes.sizes.data
        return cut, cut
    return (1, processes.count) if read_strategy(trainer)[0] == "zero1" else (1, 1)


def count_devices(devices: Any, accelerator: str) -> int:
    """Return how many devices each machine has; "auto" are those of this one, and only they must be there."""
    if isinstance(devices, list):
        return len(devices) or 1
    if isinstance(devices, str) and devices.isdecimal():
        return int(devices)
    if devices in ("auto", -1, "-1"):
        if accelerator == "cpu":
            return 1
        from ...processes.devices import find_devices

        return len(find_devices(accelerator, devices))
    if isinstance(devices, int):
        return devices
    raise ConfigError(f"trainer.devices={devices!r}: expected a positive count, a list of indices, -1 or 'auto'.")
