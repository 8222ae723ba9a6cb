"""Launchers of an elastic run: watch their workers, replace those that die, and decide who is in the next generation.

The host launcher serves the store and publishes generations. Launchers that join later are guests; they report the
state of their workers to the host.
"""

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, WorkerError
from ..processes.rendezvous import host_store, is_loopback
from ..processes.signals import RESUME_ME
from ..processes.transport import Failure, unpack
from ..processes.workers import SignalRelay, WorkerGroup, _send_signal, launch_workers
from .store import (
    ElasticOptions,
    ElasticWorker,
    Generation,
    GroupOrder,
    Member,
    MemberRegistry,
    MembershipStore,
    connect_to_store,
    split_address,
)

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

logger = logging.getLogger("legato")

GUEST_TIMEOUT = 5.0
"""Seconds without a sign of life after which a guest, and with it its workers, counts as dead."""
_LAUNCHER_POLL = 0.05  # seconds between two looks at the board

Enter = Callable[[int, ElasticWorker], Callable[[], None]]
"""What a worker begins with, given how often all were started again and its seat."""


def launch_elastic(
    function: Callable[[], Any], processes: int, options: ElasticOptions, max_restarts: int, enter: Enter, grace: float
) -> Any:
    """Call `function` in `processes` workers that may die and be replaced; return what one of them returned.

    None where the only ones that have done their work are another launcher's. Raises what `launch_workers` raises.
    """
    if options.join is None and processes < options.min_processes:
        raise ConfigError(
            f"min_processes={options.min_processes}, but the run would begin with {processes}: set trainer.devices to "
            f"as many at least."
        )
    if options.join is None:
        host, port = split_address(options.listen)
        store: Any = host_store(host, port, is_loopback(host), "Choose another port in init_method.")
        address = f"{host}:{store.port}"
        logger.info("Others can join this run: trainer.strategy.join=%s", address)
    else:
        store, address = connect_to_store(options.join, timeout=60.0), options.join

    def make_group(folder: Path, ranks: range, world_size: int, relay: SignalRelay) -> WorkerGroup:
        kind = HostWorkerGroup if options.join is None else GuestWorkerGroup
        return kind(folder, ranks, relay, store, address, options)

    return launch_workers(
        function, range(processes), processes, enter, max_restarts=max_restarts, make_group=make_group, grace=grace
    )


class ElasticWorkerGroup(WorkerGroup):
    """What host and guest have in common: their own workers."""

    def __init__(
        self, folder: Path, ranks: range, relay: SignalRelay, store: "Store", address: str, options: ElasticOptions
    ) -> None:
        super().__init__(folder, ranks, len(ranks), relay)
        self.options, self.address = options, address
        self.store = MembershipStore.new(store) if options.join is None else MembershipStore.newest(store, timeout=60.0)
        self.node = 0
        self.workers: dict[int, Member] = {}
        """The workers of this launcher, by their ids."""
        self.enter: Callable[[ElasticWorker], Callable[[], None]] | None = None
        self.lost: list[Failure] = []
        """Deaths after which the others went on."""
        self.done: set[Member] = set()
        """Workers that have done their work."""
        self.lingering: list[Member] = []
        """Those of them that wait to be dismissed."""
        self.answering: Member | None = None
        self.answer: Any = None
        self.answered = False

    def start(self, context: Any, enter: Callable[..., Callable[[], None]]) -> None:
        """Start a worker for each device."""
        self._context, self._relay.processes, self.enter = context, [], enter
        self.node = 0 if self.options.join is None else 1 + self.store.next_ids("nodes")  # a guest may be here earlier
        first = self.store.next_ids("ids", len(self._ranks))
        for slot in self._ranks:
            self._start_member(Member(first + slot, self.node, slot), joins=self.options.join is not None)

    def _start_member(self, member: Member, joins: bool) -> None:
        assert self.enter is not None
        self.workers[member.id] = member
        self._start_one(member.id, True, self.enter(ElasticWorker(member, self.address, self.store.attempt, joins)))

    def value(self) -> Any:
        """Return the result, from whichever worker brought it."""
        return self.answer

    def _pause(self) -> float:
        return _LAUNCHER_POLL

    # --- the end of a worker ----------------------------------------------------------------------------------------
    def _note_end(self, rank: int, process: BaseProcess) -> None:
        """Take note of a worker's end; here `rank` is its id."""
        member, end = self.workers[rank], self._read_end(rank, process)
        if end != 0 and process.pid is not None:  # what it has started ends with it
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if self._stopped_at is not None:
            super()._note_end(rank, process)
        elif end == RESUME_ME:
            self._preempted_at = self._preempted_at or time.monotonic()
            self._died(member)
        elif isinstance(end, Failure):
            self._note_failure(member, replace(end, **self._rank_fields(member)))
        elif member == self.answering:
            self.answer, self.answered = unpack(self._folder / f"value-{rank}"), True
        self._release_next()

    def _rank_fields(self, member: Member) -> dict[str, Any]:
        """Return how a member is called in messages."""
        return {"rank": member.slot, "world_size": len(self._ranks)}

    def _note_failure(self, member: Member, failure: Failure) -> None:
        raised = bool(failure.text) and not failure.communication
        if member in self.done:
            self.lingering = [other for other in self.lingering if other != member]
            self.answering = None if self.answering == member else self.answering
            return
        if not self._survives(member, raised):
            self._failures.append(failure)
        else:
            self.lost.append(failure)
            replaced = self.restarts_left > 0 and not raised and not self._relay.received
            more = "; another process is being started." if replaced else f".\n\n{failure.text}" if raised else "."
            logger.warning("%s The run goes on without it%s", failure.summary, more)
            if replaced:
                self.restarts_left -= 1
                self._replace(member)
        self._died(member)

    def _replace(self, member: Member) -> None:
        fresh = Member(self.store.next_ids("ids"), self.node, member.slot)
        self._starts(fresh)
        self._start_member(fresh, joins=True)

    def _finished(self, member: Member) -> None:
        if member.id in self.workers:
            self.done.add(member)
            self.lingering.append(member)

    def _release_next(self) -> None:
        """Let one worker that has done its work bring the result, and the others go once it has."""
        while self.lingering and (self.answered or self.answering is None):
            member = self.lingering.pop(0)
            if not self.answered:
                self.answering = member
            self.store.release_member(member, answers=not self.answered)

    def _survives(self, member: Member, raised: bool) -> bool:
        """Return whether the run can go on without this worker, which `raised` an error of its own or was killed."""
        raise NotImplementedError

    def _died(self, member: Member) -> None:
        raise NotImplementedError

    def _starts(self, member: Member) -> None:
        raise NotImplementedError

    def _kill(self, member: Member) -> None:
        """Kill a worker of this launcher."""
        for rank, process in list(self._pending.values()):
            if rank == member.id:
                _send_signal(process, signal.SIGKILL)


class HostWorkerGroup(ElasticWorkerGroup):
    """The crew of the launcher that keeps the store: it decides who takes part."""

    def __init__(
        self, folder: Path, ranks: range, relay: SignalRelay, store: "Store", address: str, options: ElasticOptions
    ) -> None:
        super().__init__(folder, ranks, relay, store, address, options)
        self.registry = MemberRegistry([], options)
        self.published_at = 0.0
        self.signs: dict[int, tuple[int, float]] = {}
        """For each guest that is here how many signs of life it gave, and when the newest was seen."""
        self.closed = False

    def start(self, context: Any, enter: Callable[..., Callable[[], None]]) -> None:
        """Start the first members."""
        super().start(context, enter)
        self.registry = MemberRegistry(list(self.workers.values()), self.options)
        self._publish(self.registry.generation)

    def _publish(self, generation: Generation) -> None:
        self.store.publish(generation)
        self.published_at = time.monotonic()
        if generation.version > 1 and not self.registry.finished:
            logger.debug(
                "Generation %d: %d processes, to %s.", generation.version, len(generation.members), generation.order
            )

    def _is_running(self) -> bool:
        going = self._stopped_at is None and not self._failures
        return super()._is_running() or (going and (bool(self.registry.members) or bool(self.signs)))

    def _poll(self) -> None:
        if self._stopped_at is not None or self._failures:
            return
        self._read_messages()
        self._drop_silent_guests()
        self._kill_late_members()
        generation = self.registry.decide()
        if generation is not None:
            self._publish(generation)
        if self.registry.running and not self.registry.members and not self.closed:
            self._close()
        self._release_next()

    def _close(self) -> None:
        """Nobody is left who trains: the run is done, or lost; who waits for a place in it need not wait on."""
        self.closed = True
        if not self.registry.finished and self._preempted_at is None:
            self._failures += self.lost
        self._announce_end()
        for member in [*self.registry.spares, *self.registry.starting]:
            self.registry.remove(member)
            self._kill(member)

    def _read_messages(self) -> None:
        for note in self.store.new_messages():
            self._handle(note["what"], note["member"], note)

    def _handle(self, what: str, member: Member, note: dict[str, Any]) -> None:
        registry = self.registry
        if member.node != self.node:
            self.signs.setdefault(member.node, (-1, time.monotonic()))
        if what == "begun":
            registry.begin(member, note["replicas"])
        elif what == "ready":
            registry.add(member)
        elif what == "joined":
            registry.joined.add(member)
        elif what == "starting":
            registry.starting.add(member)
        elif what == "died":
            registry.remove(member)
        elif what == "broken":
            registry.renew(note["version"])
        elif what == "finished":
            registry.finish(member)
            self._finished(member)
        elif what == "left":
            self.signs.pop(member.node, None)

    def _drop_silent_guests(self) -> None:
        now, registry = time.monotonic(), self.registry
        for node, count in self.store.heartbeats(self.signs).items():
            before, when = self.signs[node]
            self.signs[node] = (count, now if count != before else when)
            if now - self.signs[node][1] > GUEST_TIMEOUT:
                logger.warning("Launcher %d has given no sign of life for %g s.", node, GUEST_TIMEOUT)
                del self.signs[node]
                for member in [*registry.members, *registry.spares, *registry.starting]:
                    if member.node == node:
                        registry.remove(member)

    def _kill_late_members(self) -> None:
        generation = self.registry.generation
        if generation.version == 1 or time.monotonic() < self.published_at + self.options.timeout:
            return
        self.published_at = time.monotonic()
        for member in self.store.missing(generation):
            if member in self.registry.members:
                logger.warning("Process %d did not come within %g s.", member.id, self.options.timeout)
                self._kill(member)
                if member.id not in self.workers:
                    self.registry.remove(member)

    def _note_failure(self, member: Member, failure: Failure) -> None:
        self._read_messages()  # what was told before the death counts before it, whenever this launcher gets to it
        if not self.closed or member in self.done:
            super()._note_failure(member, failure)

    def _survives(self, member: Member, raised: bool) -> bool:
        takes_part = member in self.registry.members
        return self.registry.running and not (raised and takes_part)

    def _rank_fields(self, member: Member) -> dict[str, Any]:
        members = self.registry.generation.members
        rank = members.index(member) if member in members else member.id
        return {"rank": rank, "world_size": len(members)}

    def _died(self, member: Member) -> None:
        self.registry.remove(member)

    def _starts(self, member: Member) -> None:
        self.registry.starting.add(member)

    def end(self) -> None:
        """See that no process lives on, and tell guests that there is nothing more to join."""
        if not self.closed:
            self._announce_end()
        super().end()

    def _announce_end(self) -> None:
        order: GroupOrder = "over" if self.registry.finished and not self._failures else "lost"
        self.store.publish(Generation(self.registry.generation.version + 1, (), order))


class GuestWorkerGroup(ElasticWorkerGroup):
    """The crew of a launcher whose workers join a run: it tells the host what becomes of them."""

    def _poll(self) -> None:
        if self._stopped_at is not None or self._failures:
            return
        try:
            self.store.heartbeat(self.node)
            for note in self.store.new_messages():
                if note["what"] == "finished":
                    self._finished(note["member"])
            self._release_next()
        except RuntimeError as error:
            raise WorkerError(
                f"The launcher at {self.options.join}, with which this run began, has gone. Go on from the newest "
                "checkpoint of the run with resume=auto."
            ) from error

    def _survives(self, member: Member, raised: bool) -> bool:
        return not raised and (bool(self._pending) or self.restarts_left > 0)

    def _died(self, member: Member) -> None:
        self.store.post("died", member)

    def _starts(self, member: Member) -> None:
        self.store.post("starting", member)

    def end(self) -> None:
        """See that no process lives on, and tell the host, which waits for that."""
        super().end()
        with suppress(RuntimeError):
            self.store.post("left", Member(-1, self.node, 0))
