"""A process's membership in an elastic run. The process detects changes and continues with the new members.

A broken connection or a new generation interrupts the loop. The process then joins the group of the latest generation,
adopts the latest state, and continues as if it had resumed mid-epoch.
"""

import logging
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ...base.errors import ConfigError, WorkerError
from ...base.place import Place
from ...base.torch_private import reset_group_names, set_group_timeout
from ..processes import connections
from ..processes.membership import Membership, RunFinished
from ..processes.rendezvous import allow_connections, leave_process_group
from ..processes.signals import RESUME_ME, raise_for_signal
from ..processes.transport import is_communication
from . import recovery
from .launcher import find_elastic_worker
from .recovery import MetricSnapshot
from .store import Generation, MembershipStore, connect_to_store

if TYPE_CHECKING:
    from ...base.contracts import Trainer

log = logging.getLogger("legato")

GENERATION_WAIT = 1.0
"""Seconds within which the launcher usually detects a death after a broken connection."""
RECOVERY_TIMEOUT = 10.0
"""Seconds to wait for a new generation after GENERATION_WAIT has passed."""
FORM_TIMEOUT = 2.0
"""Timeout in seconds for forming a group after all members have arrived. This takes milliseconds unless a member dies.

The timeout doubles after each attempt that fails without a death, because a busy machine takes longer.
"""
MAX_BREAKS = 3
"""Number of times that a group may break at the same step without a death before Legato raises an error."""
_STORE_POLL = 0.003  # seconds between polls of the store for few processes


class MembershipChanged(Exception):
    """Raised on all ranks to leave the loop after they agree on a new generation."""


class ElasticMembership(Membership):
    """This process's membership in an elastic run.

    Used as a context manager, it recovers from broken connections and switches to new generations.
    """

    def __init__(self, trainer: "Trainer") -> None:
        """Create the membership.

        Raises ConfigError if Legato did not start this process, or if use_distributed_sampler is False.
        """
        elastic_worker = find_elastic_worker()
        if elastic_worker is None:
            raise ConfigError(
                "elastic=true requires Legato to start the processes. Run the script directly, or use `legato fit`, "
                "without torchrun, srun or mpirun, and do not initialize a process group in the script."
            )
        if not trainer.use_distributed_sampler:
            raise ConfigError(
                "elastic=true needs use_distributed_sampler=true, because surviving processes take over the samples of "
                "a dead process."
            )
        self.trainer, self.member = trainer, elastic_worker.member
        self.timeout = trainer.strategy.timeouts.limits["step"].total_seconds()
        self.store = MembershipStore(connect_to_store(elastic_worker.port), elastic_worker.attempt)
        self.replicas = elastic_worker.replicas
        self.joins = elastic_worker.joins
        """True if this process is joining a run in progress and has not taken part yet."""
        self.generation = Generation(0, ())
        self.agreed_version = 0
        """Version of the latest generation that the ranks have agreed on."""
        self.place = Place()
        self.taking_part = self.broken = False
        self.consistent = not elastic_worker.joins
        """True if this process's weights and loop state are consistent with each other and belong to this run."""
        self.loggers_open = False
        """True if this process's loggers are open."""
        self.snapshot = MetricSnapshot(trainer)
        self.broke_at, self.breaks = -1, 0

    # --- before training --------------------------------------------------------------------------------------------
    def connect(self, place: Place) -> Place:
        """Form the first group.

        A process that joins a run in progress gets its group after setup and has a nonzero rank until then.
        """
        if self.joins:
            self.trainer.num_sanity_val_steps = 0  # the run has already done its sanity check
            # any rank except 0, because rank 0 writes files
            return replace(place, rank=1)
        self._form(self.store.generation(1), self.timeout)  # a long timeout: processes start at different times
        return self.place

    def adopt_settings(self) -> None:
        """Adopt the number of replicas and the run directory of the run this process is joining."""
        trainer = self.trainer
        if self.joins:  # the launcher assigns the directory, as rank 0 no longer broadcasts it
            trainer.replicas, trainer.run_dir = self.replicas, trainer.assigned_dir

    def _take_part(self) -> None:
        """Start taking part in the run.

        The first members already have a group. Later members wait for a generation that includes them.
        """
        self.taking_part = True
        self.snapshot.start()
        # Only rank 0 polls the version, and the ranks agree on it. Otherwise ranks might see a new version in different
        # steps, and their collectives would no longer match.
        self.trainer.current_run.agreement.add(
            lambda: [float(self.store.version() if self.place.rank == 0 else 0)], self._update_agreed_version
        )
        if self.joins:
            # posted after setup, because this message makes the members leave their group and wait for this process
            self.store.post("ready", self.member)
            self.broken = True
            return
        self.loggers_open = self.place.rank == 0
        self.store.post("begun", self.member, self.trainer.current_run.state.replicas)

    # --- while training ---------------------------------------------------------------------------------------------
    def _update_agreed_version(self, versions: list[float]) -> bool:
        self.agreed_version = int(versions[0])
        return self.agreed_version > self.generation.version

    def check_members(self) -> None:
        """Raise MembershipChanged if the agreed generation is newer than the current one."""
        if self.agreed_version > self.generation.version:
            raise MembershipChanged

    def __enter__(self) -> None:
        """If the group is broken, form a new group and adopt the latest state."""
        if not self.taking_part:
            self._take_part()
        while self.broken:
            try:
                self._recover()
            except RuntimeError as error:
                if not self._is_broken_by(error):
                    raise
                traceback.clear_frames(error.__traceback__)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Suppress errors from a broken group.

        Recovery is left to the next `__enter__`, because by then no traceback references the group's objects.
        """
        if error is None or self.trainer.current_run.loop.remaining == "nothing":
            return False
        if isinstance(error, MembershipChanged) or self._is_broken_by(error):
            self.broken = True
            if not isinstance(error, MembershipChanged):  # which all ranks raise together
                connections.shut_down()
            # An interrupted update may have changed some weights and cannot be undone. In that case, this process
            # adopts another process's weights. Otherwise, it repeats the step from its own state.
            optimization = self.trainer.current_run.optimization
            self.consistent = self.consistent and not optimization.updating
            optimization.updating = False
            # Objects in the frames (such as a Work) would keep the old group's connections open, and other ranks would
            # wait on them: gloo closes its sockets when the last reference is dropped, not in abort() or shutdown().
            traceback.clear_frames(trace)
        return self.broken

    def _is_broken_by(self, error: BaseException) -> bool:
        """Return whether a broken connection caused the error and a newer generation can continue the run."""
        if not is_communication(error):
            return False
        # the launcher has usually detected the death by now; if not, connections may have broken without a death
        if self._newer_generation_within(GENERATION_WAIT):
            return True
        step = self.trainer.state.global_step
        self.breaks = self.breaks + 1 if step == self.broke_at else 1
        self.broke_at = step
        if self.breaks > MAX_BREAKS:
            return False
        log.warning("Connections were lost even though no process died (%s). Reconnecting.", error)
        self.store.post("broken", self.member, self.generation.version)
        return self._newer_generation_within(RECOVERY_TIMEOUT)

    @property
    def _pause(self) -> float:
        """Seconds between polls of the store. In total, the processes poll at most about 1000 times per second."""
        # 63 survivors that poll every 3 ms keep two cores busy, so other ranks detect a death later
        return max(_STORE_POLL, len(self.generation.members) / 1000)

    def _newer_generation_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.store.version() <= self.generation.version:
            if time.monotonic() > deadline or self.trainer.current_run.preemption.signal:
                return False
            time.sleep(self._pause)
        return True

    # --- from one group to the next ---------------------------------------------------------------------------------
    def _recover(self) -> None:
        run = self.trainer.current_run
        # release all references to the old group first, then the group: peers detect the break when its sockets close
        run.strategy.regroup(None)
        leave_process_group()
        breaks = self.breaks if self.broke_at == run.state.global_step else 0
        generation = self._next_generation()
        # gloo connects every pair of ranks: 64 processes on two cores take 6 s, so 2 s would never suffice
        self._form(generation, FORM_TIMEOUT * max(1, len(generation.members) / 8) * 2**breaks)
        open_outputs = self.open_outputs if self.place.rank == 0 and not self.loggers_open else None
        recovery.transfer_state(run, self.place, self.snapshot, self.consistent, open_outputs)
        if self.joins:
            self.store.post("joined", self.member)
        self.joins, self.consistent, self.loggers_open = False, True, self.place.rank == 0
        recovery.repeat_after_step(run)
        self.broken = False
        if self.place.rank == 0:
            log.info("Step %d: continuing with %d processes.", run.state.global_step, self.place.world_size)

    def _next_generation(self) -> Generation:
        """Wait until all members of the latest generation have arrived, and return it."""
        seen, generation, began = self.generation.version, self.generation, time.monotonic()
        while True:
            version = self.store.version()
            if version > seen:
                seen, generation = version, self.store.generation(version)
                self._raise_if_over(generation)
                if self.member in generation.members:
                    self.store.arrive(generation, self.member)
                elif not self.joins:
                    raise WorkerError(f"The run continued without process {self.member.id}, which arrived too late.")
            if (
                seen > self.generation.version
                and self.member in generation.members
                and self.store.is_complete(generation)
            ):
                return generation
            if self.trainer.current_run.preemption.signal and time.monotonic() > began + RECOVERY_TIMEOUT:
                raise_for_signal(self.trainer.current_run.preemption.signal)
            time.sleep(self._pause)

    def _raise_if_over(self, generation: Generation) -> None:
        if generation.order == "lost":
            raise SystemExit(RESUME_ME)
        if generation.order == "over":
            raise RunFinished("The run finished before this process could join it.")

    def _form(self, generation: Generation, seconds: float) -> None:
        rank = generation.members.index(self.member)
        slot, world = self.member.slot, len(generation.members)
        self.generation, self.place = generation, Place(rank, slot, 0, world, world, 1, "legato")
        if world > 1:
            allow_connections(world)
            # A prefix per generation: otherwise gloo would find addresses of an earlier group, and wait for dead
            # processes (pytorch/pytorch#135712 is the same bug in torch's elastic agent).
            store = PrefixStore(f"group/{generation.version}", self.store.entries)
            # torch numbers the groups of a process, including failed ones, but all ranks must use the same number
            reset_group_names()
            # a short timeout while the group forms, which only a death can delay; afterwards the timeout for steps
            timeout = timedelta(seconds=seconds)
            with connections.noting():
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
            set_group_timeout(timedelta(seconds=self.timeout))

    # --- after training ---------------------------------------------------------------------------------------------
    def returns_result(self, rank: int) -> bool:
        """Wait for permission to exit. Return whether this process must return the run's result."""
        self.store.post("finished", self.member)
        while (permission := self.store.released(self.member)) is None:
            time.sleep(self._pause)
        return permission == "answer"
