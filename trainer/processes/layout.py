"""Checks the layout of a run's processes across nodes and devices against the config, and prints it."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from ...base.arguments import TrainerArguments
from ...base.errors import ConfigError
from ...base.messages import STDERR, is_quiet
from ...base.place import Place
from ...base.quantities import counted
from ..accelerators import assigned_device, name_of
from .ranks import Ranks, legatos_group

ProcessEntry = tuple[int, int, str, str]
"""Rank, node index, host name and device of a process."""


def located(place: Place) -> Place:
    """Return the place of a process in a script's own process group, with its node and local rank filled in.

    The node and the local rank are derived from the host names of all ranks, so all ranks must call this. A local rank
    set by LOCAL_RANK (0 or greater) is kept. If the group does not come from a script, return the place unchanged.
    """
    if place.origin != "script":
        return place
    group = legatos_group() if place.world_size > 1 else None
    hosts = Ranks(place.rank, place.world_size, group).gather_objects(socket.gethostname())
    host, names = hosts[place.rank], list(dict.fromkeys(hosts))
    return replace(
        place,
        local_rank=hosts[: place.rank].count(host) if place.local_rank < 0 else place.local_rank,
        node_rank=names.index(host),
        local_world_size=hosts.count(host),
        nodes=len(names),
    )


def check_place(trainer: TrainerArguments, count: Callable[[], int], place: Place) -> None:
    """Raise ConfigError, on every rank, if the launcher's processes do not match `num_nodes` and `devices`.

    `count` returns the number of processes that `devices` requests on each node. The defaults `devices=auto` and
    `num_nodes=1` accept any layout.
    """
    if place.origin in ("alone", "legato"):
        return
    # num_nodes=1 is the default, so the user may not have chosen it
    nodes = trainer.num_nodes if trainer.num_nodes > 1 else place.nodes
    local = place.world_size // nodes if trainer.devices in ("auto", -1, "-1") else count()
    # if ranks were set manually, without LOCAL_WORLD_SIZE, or by a script's group, only the world size is certain
    source = {"environment": "WORLD_SIZE says", "script": "the script's process group has"}.get(place.origin)
    if place.world_size == local * nodes and (source or place.nodes == nodes):
        return
    raise ConfigError(
        f"trainer.devices={trainer.devices} and num_nodes={trainer.num_nodes} request {counted(local, 'process')} per "
        f"node on {counted(nodes, 'node')}, but {source or f'{place.origin} started'} "
        f"{counted(place.world_size, 'process')} on {counted(place.nodes, 'node')}. Change or omit devices and "
        f"num_nodes. To ignore the other processes, set trainer.cluster=off."
    )


def report_layout(place: Place, device: torch.device, ranks: Ranks, meeting: str) -> None:
    """On rank 0, print the layout of the ranks and the address of their rendezvous. All ranks must call this.

    Args:
        meeting: the address. Nothing is printed if it is empty, as it is for an existing group, a single process or an
            elastic run.
    """
    if not meeting:
        return
    entries = ranks.gather_objects(entry_of(place, device))
    if place.rank == 0 and not is_quiet():
        print(describe_layout(entries, place.origin, meeting), file=STDERR, flush=True)


def entry_of(place: Place, device: torch.device) -> ProcessEntry:
    """Return this process's entry in the layout."""
    name = name_of(device)
    text = str(device) if name == device.type else f"{device} {name}"
    if place.local_world_size > 1 and device.type != "cpu" and (assigned := assigned_device(device)):
        text += f" ({assigned})"  # otherwise the devices of all ranks would have the same name
    return place.rank, place.node_rank, socket.gethostname(), text


def describe_layout(entries: Sequence[ProcessEntry], origin: str, meeting: str) -> str:
    """Return the layout as text: one line for the run and one for each node.

    Args:
        origin: see Place. The text omits it for a single process without a launcher, because `legato check` starts a
            process in cases where the run does not.
    """
    nodes: dict[tuple[int, str], list[ProcessEntry]] = {}
    for entry in entries:
        nodes.setdefault((entry[1], entry[2]), []).append(entry)
    address = f", met at {meeting}" if meeting else ""
    starter = "" if len(entries) == 1 and origin in ("alone", "legato") else f", started by {origin}"
    lines = [f"{counted(len(entries), 'process')} on {counted(len(nodes), 'node')}{starter}{address}"]
    for (index, host), members in nodes.items():
        spans = []
        # for consecutive ranks on the same device, the difference between rank and index is constant
        for (device, _), span in groupby(enumerate(members), lambda pair: (pair[1][3], pair[1][0] - pair[0])):
            ranks = [entry[0] for _, entry in span]
            spans.append(f"ranks {ranks[0]}-{ranks[-1]} on {device}" if ranks[1:] else f"rank {ranks[0]} on {device}")
        lines.append(f"  node {index} {host}: {'; '.join(spans)}")
    places = [(host, device) for _, _, host, device in entries if device != "cpu"]
    if len(set(places)) < len(places):
        lines.append("  Ranks on the same device share its memory and compute.")
    return "\n".join(lines)
