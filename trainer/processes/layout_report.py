"""Layout of a run's processes over nodes and devices: checked against the config, and printed once."""

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...base.arguments import TrainerArguments
from ...base.errors import ConfigError
from ...base.messages import STDERR, is_quiet
from ..accelerators import name_of
from .environment import Place

if TYPE_CHECKING:
    from ..strategies.strategy import Strategy

ProcessEntry = tuple[int, int, str, str]
"""Rank, node index, host name and device of a process."""


def check_place(trainer: TrainerArguments, strategy: "Strategy", devices: Sequence[torch.device], place: Place) -> None:
    """Raise ConfigError, on every rank, if a launcher started other processes than num_nodes and devices ask for.

    The defaults `devices=auto` and `num_nodes=1` accept any layout.
    """
    if place.origin in ("alone", "legato") or strategy.elastic.changes:
        return
    automatic = trainer.devices in ("auto", -1, "-1")
    local = len(devices) if automatic else strategy.local_processes(devices)
    if place.origin == "script":
        nodes = trainer.num_nodes if trainer.num_nodes > 1 else place.nodes  # the default, 1, accepts any number
        if not automatic and place.world_size != local * nodes:
            raise ConfigError(
                f"The process group that the script has made has {place.world_size} processes, but trainer.devices="
                f"{trainer.devices} on {nodes} nodes asks for {local * nodes}. Make them agree, or set "
                f"trainer.cluster=off to leave that group alone."
            )
        return
    started = f"{place.origin} started {place.world_size} processes on {place.nodes} nodes"
    if trainer.num_nodes > 1 and place.origin != "environment" and place.nodes != trainer.num_nodes:
        raise ConfigError(
            f"trainer.num_nodes={trainer.num_nodes}, but {started}. Start it on {trainer.num_nodes} nodes, or leave "
            f"num_nodes out: the launcher tells it."
        )
    if automatic:
        return
    if place.origin == "environment":  # set by hand, perhaps without LOCAL_WORLD_SIZE: only the product is known
        if place.world_size != local * trainer.num_nodes and place.world_size != local * place.nodes:
            raise ConfigError(
                f"WORLD_SIZE={place.world_size}, but trainer.num_nodes={trainer.num_nodes} x {local} processes a node "
                f"(trainer.devices={trainer.devices}) = {trainer.num_nodes * local}. Make them agree."
            )
    elif place.local_world_size != local:
        raise ConfigError(
            f"trainer.devices={trainer.devices} asks for {local} processes a node, but {started}, "
            f"{place.local_world_size} of them on node {place.node_rank}. Make the two agree, or set "
            f"trainer.devices=auto."
        )


def report_layout(strategy: "Strategy") -> None:
    """Print on rank 0, once, the layout of the ranks and the address of their rendezvous; every rank calls it."""
    place, device = strategy.place, strategy.device
    if not strategy.meeting:  # a group that existed before, one process, or an elastic run, which logs its generations
        return
    entries = strategy.collectives.gather_objects(entry_of(place, device))
    if place.rank == 0 and not is_quiet():
        print(describe_layout(entries, place.origin, strategy.meeting), file=STDERR, flush=True)


def entry_of(place: Place, device: torch.device) -> ProcessEntry:
    """Return what the layout tells of this process."""
    name = name_of(device)
    where = str(device) if name == device.type else f"{device} {name}"
    return place.rank, place.node_rank, socket.gethostname(), where


def describe_layout(entries: Sequence[ProcessEntry], origin: str, meeting: str) -> str:
    """Return the layout as text: a line for the run, and one for each node.

    `origin`: see Place. What started a single process is said only of a launcher: `legato check` starts one for its
    trials, which the run has no need of.
    """
    nodes: dict[tuple[int, str], list[ProcessEntry]] = {}
    for entry in entries:
        nodes.setdefault((entry[1], entry[2]), []).append(entry)
    where = f", met at {meeting}" if meeting else ""
    nodes_there = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    count = f"{len(entries)} process{'es' * (len(entries) != 1)}"
    by = "" if len(entries) == 1 and origin in ("alone", "legato") else f", started by {origin}"
    lines = [f"{count} on {nodes_there}{by}{where}"]
    for (index, host), members in nodes.items():
        lines.append(f"  node {index} {host}: {'; '.join(_ranges(members))}")
    return "\n".join(lines)


def _ranges(members: Sequence[ProcessEntry]) -> list[str]:
    """Return "ranks 0-3 on cpu" for consecutive ranks on the same device, "rank 4 on cuda:0" for a single one."""
    runs: list[list[ProcessEntry]] = []
    for entry in members:
        if runs and runs[-1][-1][0] + 1 == entry[0] and runs[-1][-1][3] == entry[3]:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return [
        f"rank {run[0][0]} on {run[0][3]}" if len(run) == 1 else f"ranks {run[0][0]}-{run[-1][0]} on {run[0][3]}"
        for run in runs
    ]
