"""Launcher for an elastic run. It monitors the workers, replaces those that die, and chooses the next generation."""

import itertools
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...base.environment import all_variables
from ...base.errors import ConfigError
from ...base.place import Place
from ..processes.launch import (
    SignalRelay,
    Worker,
    WorkerGroup,
    launch_workers,
    set_worker_environment,
    threads_of_worker,
    warm_up,
)
from ..processes.rendezvous import host_store, keep_to_loopback
from ..processes.signals import RESUME_ME
from ..processes.transport import Failure, unpack
from .store import ElasticWorker, Generation, GroupOrder, Member, MemberRegistry, MembershipStore

log = logging.getLogger("legato")

LAUNCHER_POLL = 0.05
"""Seconds between polls of the store."""

T = TypeVar("T")
_here: ElasticWorker | None = None
"""Description of this process if it is a worker in an elastic run."""


def find_elastic_worker() -> ElasticWorker | None:
    """Return this worker's description, or None outside an elastic run."""
    return _here


def run_elastic_workers(
    function: Callable[[], T], processes: int, timeout: float, *, max_restarts: int = 0, nodes: int = 1
) -> T:
    """Call `function` in `processes` new workers, and replace up to `max_restarts` workers that die.

    Returns the result of one of the workers.

    Args:
        timeout: number of seconds after which a process that has not joined a new group is killed.

    Raises ConfigError if there are multiple nodes. Also raises the same errors as `launch_workers`.
    """
    if nodes > 1:
        raise ConfigError("elastic=true runs on one machine only. Remove trainer.num_nodes.")
    warm_up()
    # The store is in the launcher, not in rank 0, so that the run survives the death of any worker.
    store: Any = host_store("127.0.0.1", 0, True)
    variables, threads, attempts = all_variables(), threads_of_worker(processes), itertools.count(1)

    def make_group(folder: Path, ranks: range, world_size: int, relay: SignalRelay) -> WorkerGroup:
        return ElasticWorkerGroup(folder, ranks, relay, MembershipStore(store, next(attempts)), store.port, timeout)

    def enter(attempt: int, worker: ElasticWorker) -> Callable[[], None]:
        rank, world_size = (0, 1) if worker.joins else (worker.member.slot, processes)
        place = Place(rank, rank, 0, world_size, world_size, 1, "legato")
        return partial(_enter, worker, place, variables, attempt, threads)

    result: T = launch_workers(
        function, range(processes), processes, enter, max_restarts=max_restarts, make_group=make_group
    )
    return result


def _enter(worker: ElasticWorker, place: Place, variables: dict[str, str], attempt: int, threads: int) -> None:
    global _here
    set_worker_environment(place, variables, "127.0.0.1", worker.port, attempt, threads)
    keep_to_loopback()
    _here = worker


class ElasticWorkerGroup(WorkerGroup):
    """The workers in one attempt at an elastic run. In the inherited methods, `rank` is a member's id."""

    def __init__(
        self, folder: Path, ranks: range, relay: SignalRelay, store: MembershipStore, port: int, timeout: float
    ) -> None:
        super().__init__(folder, ranks, len(ranks), relay)
        self.timeout, self.store, self.port = timeout, store, port
        self.ids = itertools.count()
        self.members: dict[int, Member] = {}
        """Members, keyed by id, including those that have exited."""
        self.registry = MemberRegistry([])
        self.published_at = 0.0
        self.enter: Callable[[ElasticWorker], Callable[[], None]] | None = None
        self.survived_failures: list[Failure] = []
        """Failures that the run has survived."""
        self.waiting_to_exit: list[Member] = []
        """Finished members that are waiting for permission to exit."""
        self.returning: Member | None = None
        self.result: Any = None
        self.has_result = self.closed = False

    def start(self, enter: Callable[..., Callable[[], None]]) -> None:
        """Start the first members."""
        self.enter = enter
        for slot in self._ranks:
            self._start_member(Member(next(self.ids), slot))
        self.registry = MemberRegistry(list(self.members.values()))
        self._publish(self.registry.generation)

    def _start_member(self, member: Member) -> None:
        assert self.enter is not None
        self.members[member.id] = member
        worker = ElasticWorker(member, self.port, self.store.attempt, self.registry.replicas)
        self._start_one(member.id, self.enter(worker))

    def _publish(self, generation: Generation) -> None:
        self.store.publish(generation)
        self.published_at = time.monotonic()
        if generation.version > 1 and not self.registry.finished:
            log.debug(
                "Generation %d: %d processes, to %s.", generation.version, len(generation.members), generation.order
            )

    def value(self) -> Any:
        """Return the result that one of the members sent."""
        return self.result

    def _pause(self) -> float:
        return LAUNCHER_POLL

    # --- while they run ---------------------------------------------------------------------------------------------
    def _is_running(self) -> bool:
        going = self._stopped_at is None and not self._failures
        return super()._is_running() or (going and bool(self.registry.members))

    def _poll(self) -> None:
        if self._stopped_at is not None or self._failures:
            return
        self._read_messages()
        self._kill_late_members()
        generation = self.registry.decide()
        if generation is not None:
            self._publish(generation)
        if self.registry.running and not self.registry.members and not self.closed:
            self._close()
        self._release_next()

    def _read_messages(self) -> None:
        registry = self.registry
        for event, member, number in self.store.new_messages():
            match event:
                case "begun":
                    registry.begin(member, number)
                case "ready":
                    registry.add(member)
                case "joined":
                    registry.have_state.add(member)
                case "broken":
                    registry.request_generation(number)
                case "finished":
                    registry.finish(member)
                    self.waiting_to_exit.append(member)

    def _kill_late_members(self) -> None:
        generation = self.registry.generation
        # Forming the first group may take a long time, because processes are starting and importing modules. Its
        # members detect a missing process through the group's timeout.
        if generation.version == 1 or time.monotonic() < self.published_at + self.timeout:
            return
        # wait for another timeout before the next kill, because a death is recorded with a delay
        self.published_at = time.monotonic()
        for member in self.store.missing(generation):
            if member in self.registry.members:
                log.warning("Process %d did not join the new group within %g s. Killing it.", member.id, self.timeout)
                self._kill(member)

    def _kill(self, member: Member) -> None:
        for worker in self.running:
            if worker.rank == member.id:
                worker.send(signal.SIGKILL)

    # --- a worker's exit --------------------------------------------------------------------------------------------
    def _record_end(self, worker: Worker, end: "int | Failure") -> None:
        member = self.members[worker.rank]
        if end != 0:
            worker.kill_group()
        if self._stopped_at is not None:
            super()._record_end(worker, end)
            return
        # otherwise, each replacement would leak two file descriptors, which adds up in a long run
        self.workers.remove(worker)
        worker.process.close()
        if end == RESUME_ME:
            self._preempted_at = self._preempted_at or time.monotonic()
            self.registry.remove(member)
        elif isinstance(end, Failure):
            members = self.registry.generation.members
            place = members.index(member) if member in members else member.id
            self._note_failure(member, replace(end, rank=place, world_size=len(members)))
        elif member == self.returning:
            self.result, self.has_result = unpack(worker.report, 1), True
        self._release_next()

    def _note_failure(self, member: Member, failure: Failure) -> None:
        self._read_messages()  # first handle messages sent before the death, even if this launcher reads them late
        if member in self.registry.finished:
            self.waiting_to_exit = [waiting for waiting in self.waiting_to_exit if waiting != member]
            self.returning = None if self.returning == member else self.returning
            return
        if self.closed:  # it was killed because the run is over
            return
        # a broken connection is caused by another process
        raised = bool(failure.text) and not failure.communication
        # An error that a member raised would recur when the step is repeated, but the death of a process does not
        # recur.
        if not self.registry.running or (raised and member in self.registry.members):
            self._failures.append(failure)
        else:
            self.survived_failures.append(failure)
            # no replacements after a signal to end the run
            replaced = self.restarts_left > 0 and not raised and not self._relay.received
            details = "; starting a replacement." if replaced else f".\n\n{failure.text}" if raised else "."
            log.warning("%s The run continues without it%s", failure.summary, details)
            if replaced:
                self.restarts_left -= 1
                self._start_member(Member(next(self.ids), member.slot))
        self.registry.remove(member)

    # --- the end of the run -----------------------------------------------------------------------------------------
    def _release_next(self) -> None:
        """Let one finished member return the result, then let the other members exit."""
        # one at a time: if the first member dies before it returns the result, the next member returns it
        while self.waiting_to_exit and (self.has_result or self.returning is None):
            member = self.waiting_to_exit.pop(0)
            if not self.has_result:
                self.returning = member
            self.store.release_member(member, returns_result=not self.has_result)

    def _close(self) -> None:
        """End the run after the last member has exited. The run succeeds if any member finished.

        Processes that have not joined yet are killed.
        """
        self.closed = True
        # if all members have died, the failures survived so far are the cause
        if not self.registry.finished and self._preempted_at is None:
            self._failures += self.survived_failures
        self._announce_end()
        for member in set(self.members.values()) - self.registry.finished:
            self._kill(member)

    def end(self) -> None:
        """Kill all processes that are still running."""
        if not self.closed:
            self._announce_end()
        super().end()

    def _announce_end(self) -> None:
        order: GroupOrder = "over" if self.registry.finished and not self._failures else "lost"
        self.store.publish(Generation(self.registry.generation.version + 1, (), order))
