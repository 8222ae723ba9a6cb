"""Membership store of an elastic run: launchers and workers exchange generations, messages and heartbeats through it.

Only the host launcher writes generations. Every process may post messages, which the host reads.
"""

import json
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from ...base.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

GroupOrder = Literal["train", "wait", "leave", "over", "lost"]
"""Instruction to the members of a generation: form a group and train; wait for the next generation; form a group, save
and exit; exit, as the run is done; exit, as the run has failed."""


@dataclass(frozen=True)
class ElasticOptions:
    """Options of an elastic run."""

    min_processes: int = 1
    """Least number of processes: with fewer the run saves a checkpoint and exits, to be resumed."""
    join: str | None = None
    """"host:port" of the run to join; None: this launcher starts a run."""
    listen: str = "127.0.0.1:0"
    """Address of the store of a launcher that starts a run; port 0: a free one."""
    timeout: float = 1800.0
    """Seconds after which a process that does not join a new group is killed."""


@dataclass(frozen=True)
class Member:
    """One process of an elastic run. Its rank is its index in the generation."""

    id: int
    """Unique id, never reused."""
    node: int
    """Index of the launcher that started it; 0: the host."""
    slot: int
    """Index among the processes of that launcher, and so of its device."""


@dataclass(frozen=True)
class ElasticWorker:
    """Description of a worker of an elastic run, which gets it at start."""

    member: Member
    address: str
    """Address of the store, "host:port"."""
    attempt: int
    """Number of the attempt, part of the store's prefix."""
    joins: bool
    """Whether the run is under way already."""

    def text(self) -> str:
        """Return all fields as a line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "ElasticWorker":
        """Parse what `text` returned."""
        values = json.loads(text)
        return cls(**{**values, "member": Member(**values["member"])})


@dataclass(frozen=True)
class Generation:
    """Members of the process group from now on, by rank, and what they do."""

    version: int
    members: tuple[Member, ...]
    order: GroupOrder = "train"


class MembershipStore:
    """Keys of one attempt at an elastic run, in torch's store."""

    def __init__(self, entries: "Store", attempt: int) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.attempt, self.root = attempt, entries
        self.entries: Any = PrefixStore(f"legato/elastic/{attempt}", entries)
        self.read = 0
        """Bytes of messages that were read."""

    @classmethod
    def new(cls, entries: "Store") -> "MembershipStore":
        """Start another attempt, as the host."""
        return cls(entries, entries.add("legato/elastic/attempts", 1))

    @classmethod
    def newest(cls, entries: "Store", timeout: float) -> "MembershipStore":
        """Open the current attempt, as a guest. Raises ConfigError if there is none for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (attempt := entries.add("legato/elastic/attempts", 0)) == 0:  # the host has just opened the store
            if time.monotonic() > deadline:
                raise ConfigError("There is a store at the address of trainer.strategy.join, but no elastic run in it.")
            time.sleep(0.01)
        return cls(entries, attempt)

    # --- generations ------------------------------------------------------------------------------------------------
    def publish(self, generation: Generation) -> None:
        """Publish the next generation; versions go up by one."""
        # first the value, then the version: a process that sees the new version must find its generation
        self.entries.set(f"generation/{generation.version}", json.dumps(asdict(generation)))
        self.entries.add("version", 1)

    def version(self) -> int:
        """Return the newest generation's version; 0: there is none yet."""
        # `add` of 0 reads without waiting; `get` blocks until the key is there, and then has no number but bytes
        found: int = self.entries.add("version", 0)
        return found

    def generation(self, version: int) -> Generation:
        """Return a published generation."""
        values = json.loads(self.entries.get(f"generation/{version}"))
        return Generation(values["version"], tuple(Member(**member) for member in values["members"]), values["order"])

    def arrive(self, generation: Generation, member: Member) -> None:
        """Mark a member as ready to form the group of a generation."""
        self.entries.set(_arrival(generation, member), "yes")

    def is_complete(self, generation: Generation) -> bool:
        """Return whether the generation has members, and all have arrived."""
        found: bool = self.entries.check([_arrival(generation, member) for member in generation.members])
        return found

    def missing(self, generation: Generation) -> list[Member]:
        """Return the members that have not arrived."""
        return [member for member in generation.members if not self.entries.check([_arrival(generation, member)])]

    # --- notes ------------------------------------------------------------------------------------------------------
    def post(self, what: str, member: Member, **more: Any) -> None:
        """Append a message for the launchers."""
        # one key for all, as `append` is atomic on the server: no message is lost where several are sent at once
        self.entries.append("notes", json.dumps({"what": what, "member": asdict(member), **more}) + "\n")

    def new_messages(self) -> list[dict[str, Any]]:
        """Return the messages since the last call."""
        if not self.entries.check(["notes"]):
            return []
        notes = self.entries.get("notes")[self.read :]
        self.read += len(notes)
        found = [json.loads(line) for line in notes.splitlines()]
        return [{**note, "member": Member(**note["member"])} for note in found]

    # --- single facts -----------------------------------------------------------------------------------------------
    def set_facts(self, facts: dict[str, Any]) -> None:
        """Publish the run's settings for processes that join."""
        self.entries.set("facts", json.dumps(facts))

    def facts(self) -> dict[str, Any] | None:
        """Return the run's settings; None until rank 0 has published them."""
        found: dict[str, Any] | None = json.loads(self.entries.get("facts")) if self.entries.check(["facts"]) else None
        return found

    def release_member(self, member: Member, returns_result: bool) -> None:
        """Permit a finished process to exit; with `returns_result` it sends the result to its launcher first."""
        self.entries.set(f"dismissed/{member.id}", "answer" if returns_result else "go")

    def released(self, member: Member) -> str | None:
        """Return "answer" or "go" if the process may exit."""
        key = f"dismissed/{member.id}"
        return self.entries.get(key).decode() if self.entries.check([key]) else None

    def next_ids(self, what: str, count: int = 1) -> int:
        """Reserve `count` unique numbers and return the first."""
        return int(self.entries.add(f"numbers/{what}", count)) - count

    def heartbeat(self, node: int) -> None:
        """Count a heartbeat of a launcher."""
        self.entries.add(f"beats/{node}", 1)

    def heartbeats(self, nodes: Iterable[int]) -> dict[int, int]:
        """Return the number of heartbeats of each launcher."""
        return {node: self.entries.add(f"beats/{node}", 0) for node in nodes}


def _arrival(generation: Generation, member: Member) -> str:
    return f"arrived/{generation.version}/{member.id}"


def connect_to_store(address: str, timeout: float) -> "Store":
    """Return a client of the store at "host:port". Raises ConfigError if none answers within `timeout` seconds."""
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    host, port = split_address(address)
    deadline = time.monotonic() + timeout
    while True:
        try:
            # A plain connection first: TCPStore tries again by itself, long beyond the limit it is given (13 s for 5 s,
            # torch 2.13).
            socket.create_connection((host, port), timeout=5).close()
            return TCPStore(host, port, None, False, timedelta(seconds=60), wait_for_workers=False)
        except (OSError, DistError) as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"No elastic run answers at {address} ({error}). A run with elastic: true logs its address when it "
                    "starts; from other machines it can be joined where its init_method is tcp://HOST:PORT."
                ) from error
            time.sleep(0.1)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port"; raises ConfigError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{address!r} is not an address: expected 'HOST:PORT'.")
    return host.strip("[]"), int(port)


class MemberRegistry:
    """Members in the order of their ranks: members that stay keep their order, new ones are appended.

    So rank 0, the only one to write files, changes only when its process has died.
    """

    def __init__(self, members: list[Member], options: ElasticOptions) -> None:
        self.options = options
        self.members = list(members)
        self.spares: list[Member] = []
        """Processes that could take part at once, but for lack of a replica, or until the next generation."""
        self.starting: set[Member] = set()
        """Replacements that are being started."""
        self.waiting_to_begin = set(members)
        self.have_state = set(members)
        """Members that have the run's state."""
        self.finished: set[Member] = set()
        self.replicas = len(members)
        """Maximum number of members."""
        self.generation = Generation(1, tuple(members))
        self.is_requested = False

    @property
    def running(self) -> bool:
        """Whether every first member has begun to train; from then on the run survives deaths."""
        return not self.waiting_to_begin

    def begin(self, member: Member, replicas: int) -> None:
        """Record that a first member has begun to train."""
        self.waiting_to_begin.discard(member)
        self.replicas = replicas

    def add(self, member: Member) -> None:
        """Record that a process is ready to take part."""
        self.starting.discard(member)
        if member not in self.members:
            self.spares.append(member)

    def remove(self, member: Member) -> None:
        """Record the death of a process."""
        self.starting.discard(member)
        self.spares = [spare for spare in self.spares if spare != member]
        self.members = [other for other in self.members if other != member]

    def finish(self, member: Member) -> None:
        """Record that a member has finished, and with it the run: nothing can join any more."""
        self.remove(member)
        self.finished.add(member)
        self.spares += [other for other in self.members if other not in self.have_state]
        self.members = [other for other in self.members if other in self.have_state]

    def request_generation(self, version: int) -> None:
        """Request another generation, as the group of this one broke without a death."""
        self.is_requested |= version == self.generation.version

    def decide(self) -> Generation | None:
        """Return the next generation if one is due."""
        if not self.running or not self.members:
            return None
        # once some have finished, or all save to leave, a newcomer could only wait for an end
        if not self.finished and self.generation.order != "leave":
            room = self.replicas - len(self.members)
            self.members += self.spares[:room] if room > 0 else []
            self.spares = [spare for spare in self.spares if spare not in self.members]
        order: GroupOrder = "train"
        if len(self.members) < self.options.min_processes and not self.finished:
            order = "wait" if self.starting else "leave"
        if self.generation.order == "leave":
            order = "leave"
        next_generation = Generation(self.generation.version + 1, tuple(self.members), order)
        is_same = replace(next_generation, version=self.generation.version) == self.generation
        if is_same and not self.is_requested:
            return None
        self.generation, self.is_requested = next_generation, False
        return next_generation
