"""Watchdog: reports ranks that make no progress, with the line of user code or the collective they are in."""

import faulthandler
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from torch import distributed

from ...base.errors import DisagreementError, HangError, LegatoError
from ...base.torch_private import collectives_called, default_store
from ..data.workers import dump_stacks_to
from ..metrics.log import Metrics
from ..state import State
from .environment import Place
from .failures import end_process
from .first_failure import with_first_failure
from .script_collectives import ScriptCollectives, describe_counts
from .stacks import Frame, collective_of, describe_stack, stack_of, stack_of_error, users_frame, worker_stacks
from .timed_store import TimedStore
from .transport import is_communication

if TYPE_CHECKING:
    from ..strategies.strategy import Strategy

log = logging.getLogger("legato")

ANSWER_SECONDS = 3.0
"""Seconds that ranks have to report their position."""
LONGEST_STEPS = 20
"""Multiple of the longest step so far after which a report is due."""
LOOKS = 3
"""Number of looks, a second apart, at which all ranks must wait at the same places to count as deadlocked."""
IDLE = 0.02
"""Share of a processor below which a rank waits in its backward rather than computes."""
LISTEN_AFTER = 1.0
"""Seconds without progress after which a rank looks for requests of other ranks."""
SHOWN_STAGE = {"train": "training", "sanity_check": "the sanity check"}

Position = dict[str, Any]
"""Position of a rank: where it is, whether it waits for others, and for how many seconds it has been there."""


class Watched(Protocol):
    """Attributes of a trainer that a watchdog reads."""

    hang_timeout: float | None
    hang_report_seconds: float | None
    run_dir: Path | None
    state: State
    strategy: "Strategy"


class Doing(Protocol):
    """Attributes of the loop that a watchdog reads: its stage, and the newest step of this process."""

    doing: str
    step: Any


class Waiting:
    """Detects a deadlock of all ranks: one in a collective of the script, others waiting elsewhere."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.place: tuple[Any, ...] = ()
        """Position of this rank at the last look, down to the collective."""
        self.places = self.looks = 0
        """Number of positions so far, and number of looks at this one."""
        self.worked, self.looked_at = 0.0, 0.0
        """Seconds of processor time at the last look, and the time of that look."""
        self.first_seen: dict[int, tuple[int, int]] = {}
        """Position and looks of each rank when this rank first saw it there."""

    def look(self, store: Any, rank: int, size: int, count: int) -> bool:
        """Share the position of this rank if it waits; return whether all ranks have waited for `LOOKS` looks.

        `count`: number of collectives of the script on this rank. The rank with the most checks all ranks.
        """
        stack, worked, now = stack_of(self.thread), time.process_time(), time.monotonic()
        # A backward computes or waits, and its stack looks alike: only processor time tells. Collectives are counted,
        # since in a loop of short ones the stack is the same at each look.
        idle = worked - self.worked < IDLE * (now - self.looked_at)
        place = stack[:1], count, collectives_called()
        stays = place == self.place
        self.place, self.worked, self.looked_at = place, worked, now
        collective, in_backward = collective_of(stack), any(frame.is_backward for frame in stack)
        in_tree = bool(stack) and stack[0].is_in("/trainer/strategies/bitwise/tree")
        if not stays or not (collective is not None or (idle and (in_backward or in_tree))):
            self.places, self.looks, self.first_seen = self.places + 1, 0, {}
            return False
        self.looks += 1
        store.set(f"waits/{rank}", json.dumps([self.places, self.looks, count]))
        keys = [f"waits/{other}" for other in range(size)]
        if collective is None or in_backward or not store.check(keys):
            return False
        told = [json.loads(store.get(key)) for key in keys]
        for other, (places, looks, _) in enumerate(told):
            if self.first_seen.get(other, (-1, 0))[0] != places:
                self.first_seen[other] = places, looks
        counts = [count_of_other for *_, count_of_other in told]
        long = all(looks - self.first_seen[other][1] >= LOOKS for other, (_, looks, _) in enumerate(told))
        return long and count == max(counts) > min(counts)


class Watchdog:
    """Thread that watches this process's progress through a run, from before the rendezvous."""

    def __init__(self, trainer: Watched, loop: Doing, metrics: Metrics, script_collectives: ScriptCollectives) -> None:
        self.trainer, self.loop, self.metrics, self.script_collectives = trainer, loop, metrics, script_collectives
        self.place = Place()
        """Place of this process, set before the rendezvous."""
        self.end_after: float | None = trainer.hang_timeout
        """Seconds without progress after which the run ends, once start-up is over; None: never."""
        self.report_after = float("inf") if trainer.hang_report_seconds is None else trainer.hang_report_seconds
        self.begun = False
        """Whether start-up is over."""
        self.longest = 0.0
        """Seconds of the longest step (or batch of an evaluation) so far, without the first."""
        self.reports = 0
        self.token = ""
        """Word that the ranks of this run share, and no other run at the same store."""
        self.left = ""
        """Newest step at which this rank left an epoch."""
        self.waiting = Waiting(threading.get_ident())
        self.succeeded = False
        """Whether the run was closed without an error."""
        self.thread = threading.Thread(target=self._watch, name="legato-watchdog", daemon=True)
        self.watched = threading.get_ident()
        self.done = threading.Event()
        self.stacks: Any = None
        self.store: Any = None
        self.store_of: Any = None
        self.connecting = threading.Lock()

    def __enter__(self) -> "Watchdog":
        self.stacks = tempfile.TemporaryFile("w+")
        self.watched = self.waiting.thread = threading.get_ident()
        dump_stacks_to(self.stacks)
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.done.set()
        self.thread.join()
        with suppress(RuntimeError):  # no new connection: rank 0, which has the store, may have ended
            if self.succeeded:
                self._share_position(
                    {"where": "has done its work", "waits": False, "seconds": 0.0, "at": "", "idle": False}, "done"
                )
        dump_stacks_to(None)
        self.stacks.close()

    # --- watching ---------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Mark the end of start-up: from now on `hang_timeout` counts, on all ranks."""
        self.begun = True
        with suppress(RuntimeError):  # while all ranks are there: in a short run the thread may not come to it
            self._connect()

    def _watch(self) -> None:
        interval = min(1.0, self.report_after / 10, (self.end_after or 10.0) / 10)
        place, since, report_at, changes = self._progress(), time.monotonic(), self.report_after, 0
        while not self.done.wait(interval):
            now, moment = self._progress(), time.monotonic()
            if now != place:
                changes += self.begun
                # without start-up and the first step, which compiles and fills loaders
                self.longest = max(self.longest, moment - since if changes > 2 else 0.0)
                place, since = now, moment
                report_at = max(self.report_after, LONGEST_STEPS * self.longest)
            stalled = moment - since
            # before the store is asked, which may not answer
            if self.begun and self.end_after is not None and stalled >= self.end_after:
                self._end(stalled)
            if stalled >= report_at:
                report_at = 2 * max(stalled, report_at)
                self._report(stalled)
            with suppress(RuntimeError):  # the store is gone, and with it the run: another rank reports why
                self._connect()
                self._answer_leaving_rank(stalled)
                if self._is_deadlocked(stalled) or self._is_asked(stalled, "surplus"):
                    self._end_deadlock(stalled)
                if self._is_asked(stalled, "end"):
                    self._end(stalled)
                elif self._is_asked(stalled, f"report {self.reports}"):
                    report_at = 2 * max(stalled, report_at)
                    self._report(stalled)
                elif self._is_asked(stalled, "failed"):
                    self._share_position(self._write_stacks(stalled), "failed")
                    self.done.wait(ANSWER_SECONDS)

    def require_all_leave(self, batch_idx: int) -> None:
        """Wait until every rank leaves the epoch at this step; raise DisagreementError if one stays in it.

        That one waits for the others in its backward pass, where its own watchdog sees the request.
        """
        told, stays = self._wait_for_all("leave", "left")
        if stays:
            others = [rank for rank, said in enumerate(told) if said is None]
            raise DisagreementError(
                f"on_train_batch_start returned -1 on rank {self._rank} at step {self.trainer.state.global_step + 1} "
                f"(batch_idx {batch_idx}), but {name_ranks(others)} went on: {stays}. All ranks must leave an epoch "
                f"together; decide by something that is the same on all of them."
            )

    def require_same_end(self, length: str) -> None:
        """Wait until every rank is at the end of its stream; raise DisagreementError if one is not.

        `length`: that of this rank's stream, which must be the same on all.
        """
        told, stays = self._wait_for_all("end", length)
        if stays or any(said != length for said in told):
            every = [f"rank {rank}: {said or f'more ({stays})'}" for rank, said in enumerate(told)]
            raise DisagreementError(
                f"The training stream has different lengths on different ranks in epoch {self.trainer.state.epoch}: "
                f"{'; '.join(every)}. Each rank must read all of it, of which its own batches are kept; where each "
                f"brings its own share, set trainer.use_distributed_sampler=false."
            )

    def _wait_for_all(self, what: str, said: str) -> tuple[list[str | None], str]:
        """Wait for every rank in this step; return each one's `said`, and the position of one that does not come."""
        state, size = self.trainer.state, self._size
        self._connect()
        if self.store is None or size == 1 or self.trainer.strategy.elastic.changes:
            return [said], ""
        topic = f"{what} {state.epoch} {state.global_step} {self.token}"
        self.left = topic
        self.store.set(f"{topic}/{self._rank}", said)
        self.store.set("leaving", topic)
        ranks, stays = [f"{topic}/{rank}" for rank in range(size)], ""
        while not stays and not self.store.check(ranks):
            if self.store.check([f"{topic}/stays"]):
                stays = self.store.get(f"{topic}/stays").decode()
            else:
                time.sleep(0.01)
        return [self.store.get(key).decode() if self.store.check([key]) else None for key in ranks], stays

    def _answer_leaving_rank(self, stalled: float) -> None:
        """Answer a rank that leaves the epoch, if this one stays in it and waits for that rank."""
        if stalled < LISTEN_AFTER or self.store is None or not self.store.check(["leaving"]):
            return
        topic = self.store.get("leaving").decode()
        where, waits = describe_stack(stack_of(self.watched), alone=False)
        if waits and topic != self.left and topic.split()[2] == str(self.trainer.state.global_step):
            self.store.set(f"{topic}/stays", f"rank {self._rank} {where}")

    def _is_deadlocked(self, stalled: float) -> bool:
        if stalled < LISTEN_AFTER or self.store is None or not self.trainer.strategy.leaves_default_group:
            return False
        return self.waiting.look(self.store, self._rank, self._size, self.script_collectives.count)

    def _end_deadlock(self, stalled: float) -> None:
        first, own = self._is_first("surplus"), self._write_stacks(stalled)
        self._share_position(own, "surplus")
        counts = [json.loads(self.store.get(f"waits/{rank}"))[2] for rank in range(self._size)]
        message = self._exchange(own, first, "surplus", describe_counts(counts))
        end_process(DisagreementError(message), tell=first)

    def _is_asked(self, stalled: float, topic: str) -> bool:
        """Return whether another rank asks for positions while this one makes no progress."""
        listens = stalled >= min(LISTEN_AFTER, (self.end_after or LISTEN_AFTER) / 2)
        return listens and self.store is not None and bool(self.store.check([f"{topic}/alarm"]))

    def _progress(self) -> tuple[Any, ...]:
        """Return values that change with every step, batch and stage."""
        state, batches = self.trainer.state, tuple(self.metrics.batches.values())
        return self.begun, self.loop.doing, state.global_step, state.epoch, state.epoch_ended, *batches

    def _connect(self) -> None:
        """Open a second connection to the ranks' store; the first one's user may hang."""
        with self.connecting:
            group = distributed.group.WORLD if distributed.is_initialized() else None
            if group is not self.store_of:
                self.store, self.store_of = None, group
                if group is not None:
                    # a connection of its own: the main thread may hang in a wait on the other one, which serves one
                    # call at a time
                    store = default_store()
                    if store is not None:
                        prefix = distributed.PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
                        self.store = TimedStore(prefix)
                    self.reports = 0

    # --- what it tells ----------------------------------------------------------------------------------------------
    def _end(self, stalled: float) -> None:
        """Write the stacks, exchange positions, and end the process with the result."""
        first, head = self._is_first("end"), f"No progress for {self.end_after:g} s (trainer.hang_timeout)."
        message = self._exchange(self._write_stacks(stalled), first, "end", head)
        end_process(HangError(message), tell=first)

    def _report(self, stalled: float) -> None:
        """Log the positions of all ranks, on the first to raise the alarm; the run continues."""
        topic = f"report {self.reports}"
        self.reports += 1
        first, own = self._is_first(topic), self._write_stacks(stalled)
        head = f"No progress for {stalled:.0f} s; the run is not ended (trainer.hang_timeout would do that)."
        if first:
            log.warning("%s", self._exchange(own, first, topic, head))
        else:
            with suppress(RuntimeError):  # the store is gone
                self._share_position(own, topic)

    def explain(self, error: BaseException) -> BaseException:
        """Return the error to raise for one on this rank: it names each rank's position, or who failed first."""
        found = self._explain_collective(error)
        with suppress(RuntimeError):  # the store is gone
            self._connect()
        if self.place.origin in ("alone", "legato", "script") or self.store is None or self._size == 1:
            return found
        return with_first_failure(found, self.store, self._rank, self._size)

    def _explain_collective(self, error: BaseException) -> BaseException:
        """Return the error to raise for a failed collective: one that names each rank's position, if known."""
        text = str(error)
        late = "Timed out waiting" in text or "Wait timeout" in text
        if not isinstance(error, RuntimeError) or isinstance(error, LegatoError) or self.place.world_size == 1:
            return error
        left = False
        with suppress(RuntimeError):  # the store is gone
            self._connect()
            left = self.store is not None and any(self.store.check([f"done/{rank}"]) for rank in range(self._size))
        if self.store is None or not (late or (left and is_communication(error))):
            return error
        where, waits = describe_stack(stack_of_error(error), alone=False)
        first = self._is_first("failed")
        own: Position = {
            "where": where,
            "waits": waits,
            "seconds": 0.0,
            "at": self._describe_progress(stack_of_error(error)),
            "idle": self._lacks_batch(),
        }
        timeouts = self.trainer.strategy.timeouts
        limit = f"{timeouts.limits[timeouts.phase].total_seconds():g} s (trainer.strategy.timeout.{timeouts.phase})"
        if late:
            head = f"Rank {self._rank} has waited {limit} in a collective for others, which is the limit."
            return HangError(self._exchange(own, first, "failed", head))
        head = "The ranks called different collectives: each must call the same ones in the same order."
        return DisagreementError(self._exchange(own, first, "failed", head))

    def _is_first(self, topic: str) -> bool:
        """Return whether this rank is the first to raise the alarm, and so words the message."""
        try:
            return self.store is None or self.store.add(f"{topic}/alarm", 1) == 1
        except RuntimeError:  # the store is gone: no other rank can word it for this one
            return True

    @property
    def _rank(self) -> int:
        return (self.trainer.strategy.place if self.store is not None else self.place).rank

    @property
    def _size(self) -> int:
        return (self.trainer.strategy.place if self.store is not None else self.place).world_size

    def _describe_progress(self, stack: list[Frame]) -> str:
        """Describe the step or batch of this process, given its stack."""
        state, doing = self.trainer.state, self.loop.doing
        if not self.begun:
            return "start-up"
        at = f"step {state.global_step + 1}"
        if doing == "train":
            ended = any(frame.function == "end_epoch" and frame.is_in("/trainer/trainer") for frame in stack)
            return f"the end of epoch {state.epoch}, after step {state.global_step}" if ended else at
        stage = SHOWN_STAGE.get(doing, doing)
        return f"{at}, batch {self.metrics.batches.get(self.metrics.stage, 0)} of {stage}"

    def _write_stacks(self, stalled: float) -> Position:
        """Write the stacks of this process and its loader workers to a file; return its position."""
        stack = stack_of(self.watched)
        where, waits = describe_stack(stack, alone=self._size == 1)
        workers = worker_stacks(self.stacks)
        if where == "waits for a loader's worker" and (frame := users_frame(workers)) is not None:
            where = f"waits for a loader's worker, which is in {frame}"
        at = self._describe_progress(stack)
        header = f"Rank {self._rank} {where} since {stalled:.1f} s, at {at}.\n\n"
        folder = self._folder
        if folder is None:
            faulthandler.dump_traceback(2, all_threads=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"rank-{self._rank}.txt").open("w", encoding="utf-8") as file:
                file.write(header)
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.write("".join(f"\n{text}" for text in workers))
        return {"where": where, "waits": waits, "seconds": stalled, "at": at, "idle": self._lacks_batch()}

    def _lacks_batch(self) -> bool:
        """Return whether this process has no batch in the step that it takes part in."""
        step = self.loop.step if self.loop.doing == "train" else None
        return step is not None and not step.batches

    @property
    def _folder(self) -> Path | None:
        return None if self.trainer.run_dir is None else self.trainer.run_dir / "hang"

    def _share_position(self, position: Position, topic: str) -> None:
        if self.store is not None:
            self.store.set(f"{topic}/{self._rank}", json.dumps(position))

    def _exchange(self, own: Position, first: bool, topic: str, head: str) -> str:
        """Share this rank's position; return the message that the first rank makes of all positions.

        Without a store that answers the message has this rank's position alone.
        """
        if self.store is None:
            return self._message({self._rank: own}, [self._rank], head)
        try:
            return self._exchange_positions(own, first, topic, head)
        except RuntimeError as error:
            lost = f"The other ranks' positions are not known: {error}"
            network = "The network to the machine of rank 0, or that machine, may be down."
            return self._message({self._rank: own}, [self._rank], f"{head}\n{lost} {network}")

    def _exchange_positions(self, own: Position, first: bool, topic: str, head: str) -> str:
        self._share_position(own, topic)
        ranks, deadline = range(self._size), time.monotonic() + ANSWER_SECONDS
        positions: dict[int, Position] = {}
        while len(positions) < len(ranks) and time.monotonic() < deadline + (0 if first else ANSWER_SECONDS):
            if not first and self.store.check([f"{topic}/message"]):
                return str(self.store.get(f"{topic}/message").decode())
            for rank in ranks:
                for place in (topic, "done"):
                    if rank not in positions and self.store.check([f"{place}/{rank}"]):
                        positions[rank] = json.loads(self.store.get(f"{place}/{rank}"))
            time.sleep(0.05)
        # the first words the message when its own time is up, so the others wait for twice that
        while not first and time.monotonic() < deadline + ANSWER_SECONDS:
            if self.store.check([f"{topic}/message"]):
                return str(self.store.get(f"{topic}/message").decode())
            time.sleep(0.05)
        message = self._message(positions, ranks, head)
        self.store.set(f"{topic}/message", message)
        return message

    def _message(self, positions: Mapping[int, Position], asked: Sequence[int], head: str) -> str:
        """Return a message: the position of each rank in `asked`, the ranks waited for, and the file of the stacks."""
        lines = [head]
        alike: dict[str, list[int]] = {}
        for rank in asked:
            position = positions.get(rank)
            words = "does not answer: it is stopped, has ended, has no network, or holds the interpreter lock"
            if position is not None:
                seconds = f" since {position['seconds']:.0f} s" if position["seconds"] else ""
                since = f"{seconds}, at {position['at']}" if position["at"] else ""
                words = f"{position['where']}{since}"
            alike.setdefault(words, []).append(rank)
        process, alone = "The process" if self._size == 1 else "", len(asked) == 1
        lines += [f"  {process or name_ranks(ranks)} {words}" for words, ranks in alike.items()]
        to_blame = [
            rank for words, ranks in alike.items() for rank in ranks if not positions.get(rank, {}).get("waits")
        ]
        if not alone and to_blame and len(to_blame) < sum(map(len, alike.values())):
            lines.append(f"The others wait for {name_ranks(sorted(to_blame))}.")
        elif not alone and not to_blame:
            lines.append("All wait, for each other: they must call the same collectives in the same order.")
            idle = sorted(rank for rank, position in positions.items() if position["idle"])
            if idle:
                lines.append(
                    f"The data do not go evenly into the batches of all ranks: this step has none for "
                    f"{name_ranks(idle)}, where training_step is not called. What helps: drop_last=True, or gathering "
                    f"when the epoch ends."
                )
            elif len({position["at"] for position in positions.values()}) > 1:
                lines.append("They are at different steps: their loaders may have different lengths.")
        where = "above" if self._folder is None else f"in {self._folder}{os.sep}rank-*.txt"
        lines.append(f"The stacks of all threads are {where}. What the run has saved is whole: resume=auto continues.")
        return "\n".join(lines)


def name_ranks(ranks: list[int]) -> str:
    """Return "rank 1", or "ranks 0, 2, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
