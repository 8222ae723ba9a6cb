"""The board of an elastic run: on it launchers and processes tell each other who takes part. A store keeps it.

Only the host, the launcher that keeps the store, writes generations. Everyone may write notes, which the host reads.
"""

import json
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

GroupOrder = Literal["train", "wait", "leave", "over", "lost"]
"""What the members of a generation do: form a group and train; wait for the next generation; form one, save and exit;
exit, as the run is done; exit, as the run has failed."""


@dataclass(frozen=True)
class ElasticOptions:
    """How an elastic run deals with processes that leave and come."""

    min_processes: int = 1
    """With fewer, the run saves a checkpoint and ends, to be resumed."""
    join: str | None = None
    """ "host:port" of the run to join; None: this launcher begins a run."""
    listen: str = "127.0.0.1:0"
    """Where a launcher that begins a run keeps the store; port 0: a free one."""
    timeout: float = 1800.0
    """Seconds after which a process that does not come to a new group is ended."""


@dataclass(frozen=True)
class Member:
    """One process of an elastic run. Its rank is its position in the generation."""

    id: int
    """Its own, never used again."""
    node: int
    """Which launcher started it; 0: the host."""
    slot: int
    """Its index among the processes of that launcher, and so its device."""


@dataclass(frozen=True)
class ElasticWorker:
    """What a process of an elastic run knows when it starts."""

    member: Member
    address: str
    """Where the run's store is, as "host:port"."""
    attempt: int
    """Which of the boards in it is in use."""
    joins: bool
    """Whether the run is under way already."""

    def text(self) -> str:
        """Return all of it as a line."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "ElasticWorker":
        """Read what `text` wrote."""
        values = json.loads(text)
        return cls(**{**values, "member": Member(**values["member"])})


@dataclass(frozen=True)
class Generation:
    """Who takes part from now on."""

    version: int
    members: tuple[Member, ...]
    order: GroupOrder = "train"


class MembershipStore:
    """What stands in the store about one attempt at an elastic run."""

    def __init__(self, entries: "Store", attempt: int) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.attempt, self.root = attempt, entries
        self.entries: Any = PrefixStore(f"legato/elastic/{attempt}", entries)
        self.read = 0
        """Bytes of notes that were read."""

    @classmethod
    def new(cls, entries: "Store") -> "MembershipStore":
        """Begin another attempt, as the host."""
        return cls(entries, entries.add("legato/elastic/attempts", 1))

    @classmethod
    def newest(cls, entries: "Store", timeout: float) -> "MembershipStore":
        """Look at the attempt that is under way, as a guest. Raises ConfigError where none is for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (attempt := entries.add("legato/elastic/attempts", 0)) == 0:  # the host has just opened the store
            if time.monotonic() > deadline:
                raise ConfigError("There is a store at the address of trainer.strategy.join, but no elastic run in it.")
            time.sleep(0.01)
        return cls(entries, attempt)

    # --- generations ------------------------------------------------------------------------------------------------
    def publish(self, generation: Generation) -> None:
        """Publish the next generation; versions go up by one."""
        self.entries.set(f"generation/{generation.version}", json.dumps(asdict(generation)))
        self.entries.add("version", 1)

    def version(self) -> int:
        """Return the newest generation's version; 0: there is none yet."""
        found: int = self.entries.add("version", 0)
        return found

    def generation(self, version: int) -> Generation:
        """Return a generation that was published."""
        values = json.loads(self.entries.get(f"generation/{version}"))
        return Generation(values["version"], tuple(Member(**member) for member in values["members"]), values["order"])

    def arrive(self, generation: Generation, member: Member) -> None:
        """Tell that a member is ready to form the group of a generation."""
        self.entries.set(_arrival(generation, member), "yes")

    def is_complete(self, generation: Generation) -> bool:
        """Return whether there is a group to form, and all its members have come."""
        found: bool = self.entries.check([_arrival(generation, member) for member in generation.members])
        return found

    def missing(self, generation: Generation) -> list[Member]:
        """Return the members that have not come to the group of a generation."""
        return [member for member in generation.members if not self.entries.check([_arrival(generation, member)])]

    # --- notes ------------------------------------------------------------------------------------------------------
    def post(self, what: str, member: Member, **more: Any) -> None:
        """Leave a note for the launchers."""
        self.entries.append("notes", json.dumps({"what": what, "member": asdict(member), **more}) + "\n")

    def new_messages(self) -> list[dict[str, Any]]:
        """Return the notes that came since the last call."""
        if not self.entries.check(["notes"]):
            return []
        notes = self.entries.get("notes")[self.read :]
        self.read += len(notes)
        found = [json.loads(line) for line in notes.splitlines()]
        return [{**note, "member": Member(**note["member"])} for note in found]

    # --- single facts -----------------------------------------------------------------------------------------------
    def set_facts(self, facts: dict[str, Any]) -> None:
        """Tell what everyone who joins must know of the run."""
        self.entries.set("facts", json.dumps(facts))

    def facts(self) -> dict[str, Any] | None:
        """Return what rank 0 told of the run; None before it has."""
        found: dict[str, Any] | None = json.loads(self.entries.get("facts")) if self.entries.check(["facts"]) else None
        return found

    def release_member(self, member: Member, answers: bool) -> None:
        """Let a process that has done its work go; `answers`: it brings its launcher the result."""
        self.entries.set(f"dismissed/{member.id}", "answer" if answers else "go")

    def released(self, member: Member) -> str | None:
        """Return "answer" or "go" once the launcher has said so."""
        key = f"dismissed/{member.id}"
        return self.entries.get(key).decode() if self.entries.check([key]) else None

    def next_ids(self, what: str, count: int = 1) -> int:
        """Return the first of `count` numbers that nobody else gets."""
        return int(self.entries.add(f"numbers/{what}", count)) - count

    def heartbeat(self, node: int) -> None:
        """Show that a launcher lives."""
        self.entries.add(f"beats/{node}", 1)

    def heartbeats(self, nodes: Iterable[int]) -> dict[int, int]:
        """Return how often each launcher has shown that it lives."""
        return {node: self.entries.add(f"beats/{node}", 0) for node in nodes}


def _arrival(generation: Generation, member: Member) -> str:
    return f"arrived/{generation.version}/{member.id}"


def connect_to_store(address: str, timeout: float) -> "Store":
    """Return a client of the store at "host:port". Raises ConfigError where none answers within `timeout` seconds."""
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    host, port = split_address(address)
    deadline = time.monotonic() + timeout
    while True:
        try:
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
        raise ConfigError(f"{address!r} is no address: expected 'HOST:PORT'.")
    return host.strip("[]"), int(port)


class MemberRegistry:
    """Keeps the members in the order of their ranks: who stays keeps the order, who comes is put at the end.

    So rank 0, which alone writes files, is another process only when the one before it has gone.
    """

    def __init__(self, members: list[Member], options: ElasticOptions) -> None:
        self.options = options
        self.members = list(members)
        self.spares: list[Member] = []
        """Those that could take part at once: the run has no replica for them, or no generation names them yet."""
        self.starting: set[Member] = set()
        """Replacements that are being started."""
        self.waiting_to_begin = set(members)
        self.joined = set(members)
        """Those that have the run's state."""
        self.finished: set[Member] = set()
        self.replicas = len(members)
        """No more processes than this can take part."""
        self.generation = Generation(1, tuple(members))
        self.renewed = False

    @property
    def running(self) -> bool:
        """Whether every first member has begun to train, so that the others can go on when one dies."""
        return not self.waiting_to_begin

    def begin(self, member: Member, replicas: int) -> None:
        """A first member has begun to train."""
        self.waiting_to_begin.discard(member)
        self.replicas = replicas

    def add(self, member: Member) -> None:
        """A process is ready to take part."""
        self.starting.discard(member)
        if member not in self.members:
            self.spares.append(member)

    def remove(self, member: Member) -> bool:
        """A process has died; return whether it took part."""
        self.starting.discard(member)
        self.spares = [spare for spare in self.spares if spare != member]
        took_part = member in self.members
        self.members = [other for other in self.members if other != member]
        return took_part

    def finish(self, member: Member) -> None:
        """A member has done its work; so has everyone who trained with it, and there is nothing more to join."""
        self.remove(member)
        self.finished.add(member)
        self.spares += [other for other in self.members if other not in self.joined]
        self.members = [other for other in self.members if other in self.joined]

    def renew(self, version: int) -> None:
        """The group of a generation broke although nobody died: let its members form another one."""
        self.renewed |= version == self.generation.version

    def decide(self) -> Generation | None:
        """Return the next generation, where one is due."""
        if not self.running or not self.members:
            return None
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
        if (next_generation.members, order) == (self.generation.members, self.generation.order) and not self.renewed:
            return None
        self.generation, self.renewed = next_generation, False
        return next_generation
