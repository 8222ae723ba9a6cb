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
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...base.environment import all_variables, get_variable, set_variable
from ...base.errors import ConfigError, WorkerError
from ..processes.interfaces import is_loopback, keep_to_route
from ..processes.launch import (
    GRACE,
    SignalRelay,
    WorkerGroup,
    _send_signal,
    launch_workers,
    set_worker_environment,
    threads_of_worker,
    warm_up,
)
from ..processes.place import Place
from ..processes.rendezvous import host_store
from ..processes.signals import RESUME_ME
from ..processes.transport import Failure, unpack
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

log = logging.getLogger("legato")

GUEST_TIMEOUT = 5.0
"""Seconds without a heartbeat after which a guest and its workers count as dead."""
_LAUNCHER_POLL = 0.05  # seconds between two looks at the store

T = TypeVar("T")
VARIABLE = "LEGATO_ELASTIC_WORKER"
"""Environment variable that describes a worker of an elastic run to itself."""


def find_elastic_worker() -> ElasticWorker | None:
    """Return what this process needs to join its elastic run; None outside of one."""
    process, _, text = (get_variable(VARIABLE) or "").partition(" ")
    # what a worker starts inherits the variable and is no member
    return ElasticWorker.read(text) if process == str(os.getpid()) else None


def run_elastic_workers(
    function: Callable[[], T], processes: int, options: ElasticOptions, *, max_restarts: int = 0, grace: float = GRACE
) -> T | None:
    """Call `function` in `processes` new elastic workers, which may die, be replaced, or join another launcher's run.

    Up to `max_restarts` of them are replaced. Returns what one of them returned; None if only another launcher's
    workers finished. Errors: see `launch_workers`.
    """
    warm_up()
    if options.join is None and processes < options.min_processes:
        raise ConfigError(
            f"min_processes={options.min_processes}, but the run would begin with {processes}: set trainer.devices to "
            f"as many at least."
        )
    if options.join is None:
        host, port = split_address(options.listen)
        # The store lives in the launcher, not in rank 0: a worker may die, and with the store would go the run.
        store: Any = host_store(host, port, is_loopback(host), "Choose another port in init_method.")
        address = f"{host}:{store.port}"
        log.info("Others can join this run: trainer.strategy.join=%s", address)
    else:
        store, address = connect_to_store(options.join, timeout=60.0), options.join

    def make_group(folder: Path, ranks: range, world_size: int, relay: SignalRelay) -> WorkerGroup:
        kind = HostWorkerGroup if options.join is None else GuestWorkerGroup
        return kind(folder, ranks, relay, store, address, options)

    variables, threads = all_variables(), threads_of_worker(processes)

    def enter(attempt: int, worker: ElasticWorker) -> Callable[[], None]:
        rank, world_size = (0, 1) if worker.joins else (worker.member.slot, processes)
        place = Place(rank, rank, 0, world_size, world_size, 1, "legato")
        return partial(_enter, worker, place, variables, attempt, threads)

    result: T | None = launch_workers(
        function, range(processes), processes, enter, max_restarts=max_restarts, make_group=make_group, grace=grace
    )
    return result


def _enter(worker: ElasticWorker, place: Place, variables: dict[str, str], attempt: int, threads: int) -> None:
    host, port = split_address(worker.address)
    set_worker_environment(place, variables, host, port, attempt, threads)
    set_variable(VARIABLE, f"{os.getpid()} {worker.text()}")
    keep_to_route(host)


class ElasticWorkerGroup(WorkerGroup):
    """Worker group of one launcher of an elastic run; base of host and guest."""

    def __init__(
        self, folder: Path, ranks: range, relay: SignalRelay, store: "Store", address: str, options: ElasticOptions
    ) -> None:
        super().__init__(folder, ranks, len(ranks), relay)
        self.options, self.address = options, address
        self.store = MembershipStore.new(store) if options.join is None else MembershipStore.newest(store, timeout=60.0)
        self.node = 0
        self.workers: dict[int, Member] = {}
        """Workers of this launcher, by id."""
        self.enter: Callable[[ElasticWorker], Callable[[], None]] | None = None
        self.survived_failures: list[Failure] = []
        """Failures after which the run continued."""
        self.finished_members: set[Member] = set()
        """Workers that have finished."""
        self.waiting_to_exit: list[Member] = []
        """Finished workers that wait for permission to exit."""
        self.returning: Member | None = None
        self.result: Any = None
        self.has_result = False

    def start(self, context: Any, enter: Callable[..., Callable[[], None]]) -> None:
        """Start a worker for each device."""
        self._context, self._relay.processes, self.enter = context, [], enter
        # Guests count from 1, as one may be numbered before the host starts its workers.
        self.node = 0 if self.options.join is None else 1 + self.store.next_ids("nodes")
        first = self.store.next_ids("ids", len(self._ranks))
        for slot in self._ranks:
            self._start_member(Member(first + slot, self.node, slot), joins=self.options.join is not None)

    def _start_member(self, member: Member, joins: bool) -> None:
        assert self.enter is not None
        self.workers[member.id] = member
        self._start_one(member.id, True, self.enter(ElasticWorker(member, self.address, self.store.attempt, joins)))

    def value(self) -> Any:
        """Return the result of whichever worker sent it."""
        return self.result

    def _pause(self) -> float:
        return _LAUNCHER_POLL

    # --- the end of a worker ----------------------------------------------------------------------------------------
    def _record_end(self, rank: int, process: BaseProcess) -> None:
        """Record a worker's end; `rank` is its id here."""
        member, end = self.workers[rank], self._read_end(rank, process)
        if end != 0 and process.pid is not None:  # kill its children as well
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if self._stopped_at is not None:
            super()._record_end(rank, process)
        elif end == RESUME_ME:
            self._preempted_at = self._preempted_at or time.monotonic()
            self._on_death(member)
        elif isinstance(end, Failure):
            self._note_failure(member, replace(end, **self._rank_fields(member)))
        elif member == self.returning:
            self.result, self.has_result = unpack(self._folder / f"value-{rank}"), True
        self._release_next()

    def _rank_fields(self, member: Member) -> dict[str, Any]:
        """Return the rank and world size to name in messages about a member."""
        return {"rank": member.slot, "world_size": len(self._ranks)}

    def _note_failure(self, member: Member, failure: Failure) -> None:
        # a broken connection is an error of somebody else's
        raised = bool(failure.text) and not failure.communication
        if member in self.finished_members:
            self.waiting_to_exit = [other for other in self.waiting_to_exit if other != member]
            self.returning = None if self.returning == member else self.returning
            return
        if not self._is_survivable(member, raised):
            self._failures.append(failure)
        else:
            self.survived_failures.append(failure)
            # told to end by a signal: what has died is not replaced any more
            replaced = self.restarts_left > 0 and not raised and not self._relay.received
            more = "; another process is being started." if replaced else f".\n\n{failure.text}" if raised else "."
            log.warning("%s The run continues without it%s", failure.summary, more)
            if replaced:
                self.restarts_left -= 1
                self._replace(member)
        self._on_death(member)

    def _replace(self, member: Member) -> None:
        fresh = Member(self.store.next_ids("ids"), self.node, member.slot)
        self._on_start(fresh)
        self._start_member(fresh, joins=True)

    def _on_finish(self, member: Member) -> None:
        if member.id in self.workers:
            self.finished_members.add(member)
            self.waiting_to_exit.append(member)

    def _release_next(self) -> None:
        """Let one finished worker return the result, and the others exit after it."""
        # One after the other: the first returns the result, and if it dies on the way there the next one does.
        while self.waiting_to_exit and (self.has_result or self.returning is None):
            member = self.waiting_to_exit.pop(0)
            if not self.has_result:
                self.returning = member
            self.store.release_member(member, returns_result=not self.has_result)

    def _is_survivable(self, member: Member, raised: bool) -> bool:
        """Return whether the run can continue without this worker; `raised`: it failed by an error of its own."""
        raise NotImplementedError

    def _on_death(self, member: Member) -> None:
        raise NotImplementedError

    def _on_start(self, member: Member) -> None:
        raise NotImplementedError

    def _kill(self, member: Member) -> None:
        for rank, process in list(self._pending.values()):
            if rank == member.id:
                _send_signal(process, signal.SIGKILL)


class HostWorkerGroup(ElasticWorkerGroup):
    """Worker group of the host launcher, which serves the store and decides on generations."""

    def __init__(
        self, folder: Path, ranks: range, relay: SignalRelay, store: "Store", address: str, options: ElasticOptions
    ) -> None:
        super().__init__(folder, ranks, relay, store, address, options)
        self.registry = MemberRegistry([], options)
        self.published_at = 0.0
        self.guest_heartbeats: dict[int, tuple[int, float]] = {}
        """Number of heartbeats of each guest, and when the newest was seen."""
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
            log.debug(
                "Generation %d: %d processes, to %s.", generation.version, len(generation.members), generation.order
            )

    def _is_running(self) -> bool:
        going = self._stopped_at is None and not self._failures
        return super()._is_running() or (going and (bool(self.registry.members) or bool(self.guest_heartbeats)))

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
        """End the run after its last member: succeeded, or failed if none finished. Spare and starting workers are
        killed."""
        self.closed = True
        # all members have died, so failures that were survived one by one are what ended the run
        if not self.registry.finished and self._preempted_at is None:
            self._failures += self.survived_failures
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
            # any message is a first sign of life; heartbeats may not have begun
            self.guest_heartbeats.setdefault(member.node, (-1, time.monotonic()))
        if what == "begun":
            registry.begin(member, note["replicas"])
        elif what == "ready":
            registry.add(member)
        elif what == "joined":
            registry.have_state.add(member)
        elif what == "starting":
            registry.starting.add(member)
        elif what == "died":
            registry.remove(member)
        elif what == "broken":
            registry.request_generation(note["version"])
        elif what == "finished":
            registry.finish(member)
            self._on_finish(member)
        elif what == "left":
            self.guest_heartbeats.pop(member.node, None)

    def _drop_silent_guests(self) -> None:
        now, registry = time.monotonic(), self.registry
        for node, count in self.store.heartbeats(self.guest_heartbeats).items():
            before, when = self.guest_heartbeats[node]
            # heartbeats are counted and not dated, so that no clocks of two machines are compared
            self.guest_heartbeats[node] = (count, now if count != before else when)
            if now - self.guest_heartbeats[node][1] > GUEST_TIMEOUT:
                log.warning("Launcher %d has given no sign of life for %g s.", node, GUEST_TIMEOUT)
                del self.guest_heartbeats[node]
                for member in [*registry.members, *registry.spares, *registry.starting]:
                    if member.node == node:
                        registry.remove(member)

    def _kill_late_members(self) -> None:
        generation = self.registry.generation
        # the first group may take long, as processes start and import; a process that never comes there is seen at its
        # timeout
        if generation.version == 1 or time.monotonic() < self.published_at + self.options.timeout:
            return
        # as long again before the next look, since a kill takes a while to be noted
        self.published_at = time.monotonic()
        for member in self.store.missing(generation):
            if member in self.registry.members:
                log.warning("Process %d did not come within %g s.", member.id, self.options.timeout)
                self._kill(member)
                if member.id not in self.workers:
                    self.registry.remove(member)

    def _note_failure(self, member: Member, failure: Failure) -> None:
        self._read_messages()  # reports sent before the death count first, however late this launcher reads them
        if not self.closed or member in self.finished_members:
            super()._note_failure(member, failure)

    def _is_survivable(self, member: Member, raised: bool) -> bool:
        takes_part = member in self.registry.members
        # An error that a member raised would be raised again by those that repeat its step; the death of a process
        # would not.
        return self.registry.running and not (raised and takes_part)

    def _rank_fields(self, member: Member) -> dict[str, Any]:
        members = self.registry.generation.members
        rank = members.index(member) if member in members else member.id
        return {"rank": rank, "world_size": len(members)}

    def _on_death(self, member: Member) -> None:
        self.registry.remove(member)

    def _on_start(self, member: Member) -> None:
        self.registry.starting.add(member)

    def end(self) -> None:
        """Kill all processes, and tell guests that the run is over."""
        if not self.closed:
            self._announce_end()
        super().end()

    def _announce_end(self) -> None:
        order: GroupOrder = "over" if self.registry.finished and not self._failures else "lost"
        self.store.publish(Generation(self.registry.generation.version + 1, (), order))


class GuestWorkerGroup(ElasticWorkerGroup):
    """Worker group of a launcher that joins a run; reports its workers' state to the host."""

    def _poll(self) -> None:
        if self._stopped_at is not None or self._failures:
            return
        try:
            self.store.heartbeat(self.node)
            for note in self.store.new_messages():
                if note["what"] == "finished":
                    self._on_finish(note["member"])
            self._release_next()
        except RuntimeError as error:
            raise WorkerError(
                f"The launcher at {self.options.join}, with which this run began, has gone. Go on from the newest "
                "checkpoint of the run with resume=auto."
            ) from error

    def _is_survivable(self, member: Member, raised: bool) -> bool:
        return not raised and (bool(self._pending) or self.restarts_left > 0)

    def _on_death(self, member: Member) -> None:
        self.store.post("died", member)

    def _on_start(self, member: Member) -> None:
        self.store.post("starting", member)

    def end(self) -> None:
        """Kill all processes, and tell the host, which waits for that."""
        super().end()
        with suppress(RuntimeError):
            self.store.post("left", Member(-1, self.node, 0))
