"""The board of an elastic run: on it launchers and processes tell each other who takes part. A store keeps it.

Only the host, the launcher that keeps the store, writes rosters. Everyone may write notes, which the host reads.
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

Order = Literal["train", "wait", "leave", "over", "lost"]
"""What a roster tells: form a group and train; wait for the next roster; form one, save and end; the run is done; the
run has failed."""


@dataclass(frozen=True)
class Terms:
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
    """One process of an elastic run. Its rank is its position in the roster."""

    id: int
    """Its own, never used again."""
    node: int
    """Which launcher started it; 0: the host."""
    slot: int
    """Its index among the processes of that launcher, and so its device."""


@dataclass(frozen=True)
class Seat:
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
    def read(cls, text: str) -> "Seat":
        """Read what `text` wrote."""
        values = json.loads(text)
        return cls(**{**values, "member": Member(**values["member"])})


@dataclass(frozen=True)
class Roster:
    """Who takes part from now on."""

    version: int
    members: tuple[Member, ...]
    order: Order = "train"


class Board:
    """What stands in the store about one attempt at an elastic run."""

    def __init__(self, store: "Store", attempt: int) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.attempt, self.root = attempt, store
        self.store: Any = PrefixStore(f"legato/elastic/{attempt}", store)
        self.read = 0
        """Bytes of notes that were read."""

    @classmethod
    def new(cls, store: "Store") -> "Board":
        """Begin another attempt, as the host."""
        return cls(store, store.add("legato/elastic/attempts", 1))

    @classmethod
    def newest(cls, store: "Store", timeout: float) -> "Board":
        """Look at the attempt that is under way, as a guest. Raises ConfigError where none is for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (attempt := store.add("legato/elastic/attempts", 0)) == 0:  # the host has just opened the store
            if time.monotonic() > deadline:
                raise ConfigError("There is a store at the address of trainer.strategy.join, but no elastic run in it.")
            time.sleep(0.01)
        return cls(store, attempt)

    # --- rosters ----------------------------------------------------------------------------------------------------
    def publish(self, roster: Roster) -> None:
        """Let everyone see a roster. Versions go up by one."""
        self.store.set(f"roster/{roster.version}", json.dumps(asdict(roster)))
        self.store.add("version", 1)

    def version(self) -> int:
        """Return the newest roster's version; 0: there is none yet."""
        found: int = self.store.add("version", 0)
        return found

    def roster(self, version: int) -> Roster:
        """Return a roster that was published."""
        values = json.loads(self.store.get(f"roster/{version}"))
        return Roster(values["version"], tuple(Member(**member) for member in values["members"]), values["order"])

    def arrive(self, roster: Roster, member: Member) -> None:
        """Tell that a member is ready to form the group of a roster."""
        self.store.set(_arrival(roster, member), "yes")

    def is_complete(self, roster: Roster) -> bool:
        """Return whether there is a group to form, and all its members have come."""
        found: bool = self.store.check([_arrival(roster, member) for member in roster.members])
        return found

    def missing(self, roster: Roster) -> list[Member]:
        """Return the members that have not come to the group of a roster."""
        return [member for member in roster.members if not self.store.check([_arrival(roster, member)])]

    # --- notes ------------------------------------------------------------------------------------------------------
    def tell(self, what: str, member: Member, **more: Any) -> None:
        """Leave a note for the launchers."""
        self.store.append("notes", json.dumps({"what": what, "member": asdict(member), **more}) + "\n")

    def hear(self) -> list[dict[str, Any]]:
        """Return the notes that came since the last call."""
        if not self.store.check(["notes"]):
            return []
        notes = self.store.get("notes")[self.read :]
        self.read += len(notes)
        found = [json.loads(line) for line in notes.splitlines()]
        return [{**note, "member": Member(**note["member"])} for note in found]

    # --- single facts -----------------------------------------------------------------------------------------------
    def set_facts(self, facts: dict[str, Any]) -> None:
        """Tell what everyone who joins must know of the run."""
        self.store.set("facts", json.dumps(facts))

    def facts(self) -> dict[str, Any] | None:
        """Return what rank 0 told of the run; None before it has."""
        found: dict[str, Any] | None = json.loads(self.store.get("facts")) if self.store.check(["facts"]) else None
        return found

    def dismiss(self, member: Member, answers: bool) -> None:
        """Let a process that has done its work go; `answers`: it brings its launcher the result."""
        self.store.set(f"dismissed/{member.id}", "answer" if answers else "go")

    def dismissed(self, member: Member) -> str | None:
        """Return "answer" or "go" once the launcher has said so."""
        key = f"dismissed/{member.id}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def number(self, what: str, count: int = 1) -> int:
        """Return the first of `count` numbers that nobody else gets."""
        return int(self.store.add(f"numbers/{what}", count)) - count

    def beat(self, node: int) -> None:
        """Show that a launcher lives."""
        self.store.add(f"beats/{node}", 1)

    def beats(self, nodes: Iterable[int]) -> dict[int, int]:
        """Return how often each launcher has shown that it lives."""
        return {node: self.store.add(f"beats/{node}", 0) for node in nodes}


def _arrival(roster: Roster, member: Member) -> str:
    return f"arrived/{roster.version}/{member.id}"


def connect(address: str, timeout: float) -> "Store":
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


class Registrar:
    """Keeps the members in the order of their ranks: who stays keeps the order, who comes is put at the end.

    So rank 0, which alone writes files, is another process only when the one before it has gone.
    """

    def __init__(self, members: list[Member], terms: Terms) -> None:
        self.terms = terms
        self.members = list(members)
        self.spares: list[Member] = []
        """Those that could take part at once: the run has no replica for them, or no roster names them yet."""
        self.starting: set[Member] = set()
        """Replacements that are being started."""
        self.waiting_to_begin = set(members)
        self.joined = set(members)
        """Those that have the run's state."""
        self.finished: set[Member] = set()
        self.replicas = len(members)
        """No more processes than this can take part."""
        self.roster = Roster(1, tuple(members))
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
        """The group of a roster broke although nobody died: let its members form another one."""
        self.renewed |= version == self.roster.version

    def decide(self) -> Roster | None:
        """Return the next roster, where one is due."""
        if not self.running or not self.members:
            return None
        if not self.finished and self.roster.order != "leave":
            room = self.replicas - len(self.members)
            self.members += self.spares[:room] if room > 0 else []
            self.spares = [spare for spare in self.spares if spare not in self.members]
        order: Order = "train"
        if len(self.members) < self.terms.min_processes and not self.finished:
            order = "wait" if self.starting else "leave"
        if self.roster.order == "leave":
            order = "leave"
        following = Roster(self.roster.version + 1, tuple(self.members), order)
        if (following.members, order) == (self.roster.members, self.roster.order) and not self.renewed:
            return None
        self.roster, self.renewed = following, False
        return following
