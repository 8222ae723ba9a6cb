"""The crews of an elastic run: a worker that dies does not end the others, and another may be started in its place.

The launcher that keeps the store is the host; its crew writes the rosters. Launchers that join are guests; theirs tell
the host what becomes of their workers.
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
from ..processes.workers import Crew, Relay, _send, run
from .store import Board, Member, Order, Registrar, Roster, Seat, Terms, connect, split_address

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

logger = logging.getLogger("legato")

LAUNCHER_PATIENCE = 5.0
"""Seconds without a sign of life after which a guest, and with it its workers, counts as dead."""
_PAUSE = 0.05  # seconds between two looks at the board

Enter = Callable[[int, Seat], Callable[[], None]]
"""What a worker begins with, given how often all were started again and its seat."""


def run_elastic(
    function: Callable[[], Any], processes: int, terms: Terms, max_restarts: int, enter: Enter, grace: float
) -> Any:
    """Call `function` in `processes` workers that may die and be replaced; return what one of them returned.

    None where the only ones that have done their work are another launcher's. Raises what `workers.run` raises.
    """
    if terms.join is None and processes < terms.min_processes:
        raise ConfigError(
            f"min_processes={terms.min_processes}, but the run would begin with {processes}: set trainer.devices to as "
            f"many at least."
        )
    if terms.join is None:
        host, port = split_address(terms.listen)
        store: Any = host_store(host, port, is_loopback(host), "Choose another port in init_method.")
        address = f"{host}:{store.port}"
        logger.info("Others can join this run: trainer.strategy.join=%s", address)
    else:
        store, address = connect(terms.join, timeout=60.0), terms.join

    def gather(folder: Path, ranks: range, world_size: int, relay: Relay) -> Crew:
        kind = HostCrew if terms.join is None else GuestCrew
        return kind(folder, ranks, relay, store, address, terms)

    return run(function, range(processes), processes, enter, max_restarts=max_restarts, gather=gather, grace=grace)


class ElasticCrew(Crew):
    """What host and guest have in common: their own workers."""

    def __init__(self, folder: Path, ranks: range, relay: Relay, store: "Store", address: str, terms: Terms) -> None:
        super().__init__(folder, ranks, len(ranks), relay)
        self.terms, self.address = terms, address
        self.board = Board.new(store) if terms.join is None else Board.newest(store, timeout=60.0)
        self.node = 0
        self.seats: dict[int, Member] = {}
        """The workers of this launcher, by their ids."""
        self.enter: Callable[[Seat], Callable[[], None]] | None = None
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
        self.node = 0 if self.terms.join is None else 1 + self.board.number("nodes")  # a guest may be here earlier
        first = self.board.number("ids", len(self._ranks))
        for slot in self._ranks:
            self._recruit(Member(first + slot, self.node, slot), joins=self.terms.join is not None)

    def _recruit(self, member: Member, joins: bool) -> None:
        assert self.enter is not None
        self.seats[member.id] = member
        self._start_one(member.id, True, self.enter(Seat(member, self.address, self.board.attempt, joins)))

    def value(self) -> Any:
        """Return the result, from whichever worker brought it."""
        return self.answer

    def _pause(self) -> float:
        return _PAUSE

    # --- the end of a worker ----------------------------------------------------------------------------------------
    def _note_end(self, rank: int, process: BaseProcess) -> None:
        """Take note of a worker's end; here `rank` is its id."""
        member, end = self.seats[rank], self._read_end(rank, process)
        if end != 0 and process.pid is not None:  # what it has started ends with it
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if self._stopped_at is not None:
            super()._note_end(rank, process)
        elif end == RESUME_ME:
            self._preempted_at = self._preempted_at or time.monotonic()
            self._died(member)
        elif isinstance(end, Failure):
            self._note_failure(member, replace(end, **self._standing(member)))
        elif member == self.answering:
            self.answer, self.answered = unpack(self._folder / f"value-{rank}"), True
        self._dismiss_next()

    def _standing(self, member: Member) -> dict[str, Any]:
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
        fresh = Member(self.board.number("ids"), self.node, member.slot)
        self._starts(fresh)
        self._recruit(fresh, joins=True)

    def _finished(self, member: Member) -> None:
        if member.id in self.seats:
            self.done.add(member)
            self.lingering.append(member)

    def _dismiss_next(self) -> None:
        """Let one worker that has done its work bring the result, and the others go once it has."""
        while self.lingering and (self.answered or self.answering is None):
            member = self.lingering.pop(0)
            if not self.answered:
                self.answering = member
            self.board.dismiss(member, answers=not self.answered)

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
                _send(process, signal.SIGKILL)


class HostCrew(ElasticCrew):
    """The crew of the launcher that keeps the store: it decides who takes part."""

    def __init__(self, folder: Path, ranks: range, relay: Relay, store: "Store", address: str, terms: Terms) -> None:
        super().__init__(folder, ranks, relay, store, address, terms)
        self.registrar = Registrar([], terms)
        self.published_at = 0.0
        self.signs: dict[int, tuple[int, float]] = {}
        """For each guest that is here how many signs of life it gave, and when the newest was seen."""
        self.closed = False

    def start(self, context: Any, enter: Callable[..., Callable[[], None]]) -> None:
        """Start the first members."""
        super().start(context, enter)
        self.registrar = Registrar(list(self.seats.values()), self.terms)
        self._publish(self.registrar.roster)

    def _publish(self, roster: Roster) -> None:
        self.board.publish(roster)
        self.published_at = time.monotonic()
        if roster.version > 1 and not self.registrar.finished:
            logger.debug("Roster %d: %d processes, to %s.", roster.version, len(roster.members), roster.order)

    def _goes_on(self) -> bool:
        going = self._stopped_at is None and not self._failures
        return super()._goes_on() or (going and (bool(self.registrar.members) or bool(self.signs)))

    def _look_around(self) -> None:
        if self._stopped_at is not None or self._failures:
            return
        self._take_notes()
        self._look_after_guests()
        self._look_for_the_late()
        roster = self.registrar.decide()
        if roster is not None:
            self._publish(roster)
        if self.registrar.running and not self.registrar.members and not self.closed:
            self._close()
        self._dismiss_next()

    def _close(self) -> None:
        """Nobody is left who trains: the run is done, or lost; who waits for a place in it need not wait on."""
        self.closed = True
        if not self.registrar.finished and self._preempted_at is None:
            self._failures += self.lost
        self._announce_end()
        for member in [*self.registrar.spares, *self.registrar.starting]:
            self.registrar.remove(member)
            self._kill(member)

    def _take_notes(self) -> None:
        for note in self.board.hear():
            self._take(note["what"], note["member"], note)

    def _take(self, what: str, member: Member, note: dict[str, Any]) -> None:
        registrar = self.registrar
        if member.node != self.node:
            self.signs.setdefault(member.node, (-1, time.monotonic()))
        if what == "begun":
            registrar.begin(member, note["replicas"])
        elif what == "ready":
            registrar.add(member)
        elif what == "joined":
            registrar.joined.add(member)
        elif what == "starting":
            registrar.starting.add(member)
        elif what == "died":
            registrar.remove(member)
        elif what == "broken":
            registrar.renew(note["version"])
        elif what == "finished":
            registrar.finish(member)
            self._finished(member)
        elif what == "left":
            self.signs.pop(member.node, None)

    def _look_after_guests(self) -> None:
        now, registrar = time.monotonic(), self.registrar
        for node, count in self.board.beats(self.signs).items():
            before, when = self.signs[node]
            self.signs[node] = (count, now if count != before else when)
            if now - self.signs[node][1] > LAUNCHER_PATIENCE:
                logger.warning("Launcher %d has given no sign of life for %g s.", node, LAUNCHER_PATIENCE)
                del self.signs[node]
                for member in [*registrar.members, *registrar.spares, *registrar.starting]:
                    if member.node == node:
                        registrar.remove(member)

    def _look_for_the_late(self) -> None:
        roster = self.registrar.roster
        if roster.version == 1 or time.monotonic() < self.published_at + self.terms.timeout:
            return
        self.published_at = time.monotonic()
        for member in self.board.missing(roster):
            if member in self.registrar.members:
                logger.warning("Process %d did not come within %g s.", member.id, self.terms.timeout)
                self._kill(member)
                if member.id not in self.seats:
                    self.registrar.remove(member)

    def _note_failure(self, member: Member, failure: Failure) -> None:
        self._take_notes()  # what was told before the death counts before it, whenever this launcher gets to it
        if not self.closed or member in self.done:
            super()._note_failure(member, failure)

    def _survives(self, member: Member, raised: bool) -> bool:
        takes_part = member in self.registrar.members
        return self.registrar.running and not (raised and takes_part)

    def _standing(self, member: Member) -> dict[str, Any]:
        members = self.registrar.roster.members
        rank = members.index(member) if member in members else member.id
        return {"rank": rank, "world_size": len(members)}

    def _died(self, member: Member) -> None:
        self.registrar.remove(member)

    def _starts(self, member: Member) -> None:
        self.registrar.starting.add(member)

    def end(self) -> None:
        """See that no process lives on, and tell guests that there is nothing more to join."""
        if not self.closed:
            self._announce_end()
        super().end()

    def _announce_end(self) -> None:
        order: Order = "over" if self.registrar.finished and not self._failures else "lost"
        self.board.publish(Roster(self.registrar.roster.version + 1, (), order))


class GuestCrew(ElasticCrew):
    """The crew of a launcher whose workers join a run: it tells the host what becomes of them."""

    def _look_around(self) -> None:
        if self._stopped_at is not None or self._failures:
            return
        try:
            self.board.beat(self.node)
            for note in self.board.hear():
                if note["what"] == "finished":
                    self._finished(note["member"])
            self._dismiss_next()
        except RuntimeError as error:
            raise WorkerError(
                f"The launcher at {self.terms.join}, with which this run began, has gone. Go on from the run's newest "
                "checkpoint with resume=auto."
            ) from error

    def _survives(self, member: Member, raised: bool) -> bool:
        return not raised and (bool(self._pending) or self.restarts_left > 0)

    def _died(self, member: Member) -> None:
        self.board.tell("died", member)

    def _starts(self, member: Member) -> None:
        self.board.tell("starting", member)

    def end(self) -> None:
        """See that no process lives on, and tell the host, which waits for that."""
        super().end()
        with suppress(RuntimeError):
            self.board.tell("left", Member(-1, self.node, 0))
