"""Membership store of an elastic run, used by the launcher and workers to exchange generations and messages.

Only the launcher writes generations. Every worker may post messages, which the launcher reads.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

GroupOrder = Literal["train", "over", "lost"]
"""Instruction to the members of a generation: form a group and train ("train"), or exit because the run has finished
("over") or failed ("lost")."""


class Member(NamedTuple):
    """A process in an elastic run. Its rank is its index in the generation."""

    id: int
    """Unique id, never reused."""
    slot: int
    """Index of the process's device; a replacement takes over the dead process's device."""


@dataclass(frozen=True)
class ElasticWorker:
    """Description of a worker in an elastic run, which the worker receives when it starts."""

    member: Member
    port: int
    """Port of the store, on the loopback interface."""
    attempt: int
    """Index of the attempt; part of the prefix of the store's keys."""
    replicas: int | None = None
    """Replicas of the run that this worker joins; None for one of the first members."""

    @property
    def joins(self) -> bool:
        """True if this worker is joining a run in progress."""
        return self.replicas is not None


@dataclass(frozen=True)
class Generation:
    """A list of members, ordered by rank, and an instruction for them."""

    version: int
    members: tuple[Member, ...]
    order: GroupOrder = "train"


class MembershipStore:
    """The entries in torch's store for one attempt at an elastic run."""

    def __init__(self, entries: "Store", attempt: int) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.attempt = attempt
        self.entries: Any = PrefixStore(f"legato/elastic/{attempt}", entries)

    # --- generations ------------------------------------------------------------------------------------------------
    def publish(self, generation: Generation) -> None:
        """Publish the next generation. Its version must be the previous version plus one."""
        # the generation before the version: a process that sees the new version must find its generation
        self.entries.set(
            f"generation/{generation.version}", json.dumps([generation.version, generation.members, generation.order])
        )
        self.entries.add("version", 1)

    def version(self) -> int:
        """Return the version of the latest generation, or 0 before the first generation."""
        # adding 0 returns a number immediately, while `get` blocks until the key exists and returns bytes
        return int(self.entries.add("version", 0))

    def generation(self, version: int) -> Generation:
        """Return a published generation."""
        version, members, order = json.loads(self.entries.get(f"generation/{version}"))
        return Generation(version, tuple(Member(*member) for member in members), order)

    def arrive(self, generation: Generation, member: Member) -> None:
        """Mark a member as ready to join the group of a generation."""
        self.entries.set(_arrival(generation, member), "yes")

    def is_complete(self, generation: Generation) -> bool:
        """Return whether the generation has members and all of them have arrived."""
        # a single call, because every member polls
        return bool(self.entries.check([_arrival(generation, member) for member in generation.members]))

    def missing(self, generation: Generation) -> list[Member]:
        """Return the members that have not arrived yet."""
        return [member for member in generation.members if not self.entries.check([_arrival(generation, member)])]

    # --- messages ---------------------------------------------------------------------------------------------------
    def post(self, event: str, member: Member, number: int = 0) -> None:
        """Send a message to the launcher."""
        self.entries.queue_push("messages", json.dumps([event, member, number]))

    def new_messages(self) -> Iterator[tuple[str, Member, int]]:
        """Yield the event, member and number of each new message, in order of arrival."""
        for _ in range(self.entries.queue_len("messages")):
            event, member, number = json.loads(self.entries.queue_pop("messages"))
            yield event, Member(*member), number

    def release_member(self, member: Member, returns_result: bool) -> None:
        """Allow a finished process to exit. If `returns_result` is True, the process first sends the result."""
        self.entries.set(f"dismissed/{member.id}", "answer" if returns_result else "go")

    def released(self, member: Member) -> str | None:
        """Return "answer" (send the result, then exit), "go" (exit), or None if the process must still wait."""
        key = f"dismissed/{member.id}"
        return self.entries.get(key).decode() if self.entries.check([key]) else None


def _arrival(generation: Generation, member: Member) -> str:
    return f"arrived/{generation.version}/{member.id}"


def connect_to_store(port: int) -> "Store":
    """Return a client of the launcher's store."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)


class MemberRegistry:
    """Members in rank order. Remaining members keep their order; new members are appended.

    As a result, rank 0, the only rank that writes files, changes only if its process dies.
    """

    def __init__(self, members: list[Member]) -> None:
        self.members = list(members)
        self.spares: list[Member] = []
        """Replacements that are ready for the next generation."""
        self.waiting_to_begin = set(members)
        self.have_state = set(members)
        """Members that have the run's state."""
        self.finished: set[Member] = set()
        self.replicas: int | None = None
        """Replicas of the run, once its first members have started training."""
        self.generation = Generation(1, tuple(members))
        self.is_requested = False

    @property
    def running(self) -> bool:
        """True once all first members have started training. From then on, the run can survive a process's death."""
        return not self.waiting_to_begin

    def begin(self, member: Member, replicas: int) -> None:
        """Record that one of the first members has started training."""
        self.waiting_to_begin.discard(member)
        self.replicas = replicas

    def add(self, member: Member) -> None:
        """Record that a process is ready to take part in the run."""
        if member not in self.members:
            self.spares.append(member)

    def remove(self, member: Member) -> None:
        """Record the death of a process."""
        self.spares = [spare for spare in self.spares if spare != member]
        self.members = [remaining for remaining in self.members if remaining != member]

    def finish(self, member: Member) -> None:
        """Record that a member, and therefore the run, has finished. From then on, no process can join."""
        self.remove(member)
        self.finished.add(member)
        # members without the state cannot finish the run
        self.spares += [remaining for remaining in self.members if remaining not in self.have_state]
        self.members = [remaining for remaining in self.members if remaining in self.have_state]

    def request_generation(self, version: int) -> None:
        """Request a new generation, because the group of generation `version` broke even though no process died."""
        self.is_requested |= version == self.generation.version

    def decide(self) -> Generation | None:
        """Return the next generation, or None if none is needed yet."""
        if not self.running or not self.members:
            return None
        if not self.finished:  # once a member has finished, a new member could only wait for the end
            self.members, self.spares = self.members + self.spares, []
        if tuple(self.members) == self.generation.members and not self.is_requested:
            return None
        self.generation, self.is_requested = Generation(self.generation.version + 1, tuple(self.members)), False
        return self.generation
