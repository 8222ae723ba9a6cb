"""Reports hangs with each rank's position and identifies the rank that failed first, using the ranks' store.

About once a second, a rank that is making no progress writes its position to a board in the store. The rank that
reports a hang reads the board, so it does not have to wait for a rank that cannot respond.
"""

import atexit
import faulthandler
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from torch import distributed
from torch.distributed import DistNetworkError

from ...base.errors import DisagreementError, HangError, LegatoError, WorkerError
from ...base.place import Place
from ...base.torch_private import default_store
from . import connections
from .failures import end_process
from .rendezvous import leave_process_group
from .signals import INTERRUPTED, RESUME_ME
from .stacks import Frame, describe_stack, dump_stacks_to, stack_of, stack_of_error, users_frame, worker_stacks
from .transport import is_communication

if TYPE_CHECKING:
    from ...base.contracts import Trainer

log = logging.getLogger("legato")
T = TypeVar("T")

ANSWER_SECONDS = 3.0
"""Seconds for ranks to write to the board, and for rank 0 to keep the store open after a failure."""
STORE_SECONDS = 10.0
"""Maximum time in seconds for the store to respond."""
REPORT_SECONDS = 120.0
"""Minimum seconds without progress before a report."""
LONGEST_STEPS = 20
"""Minimum time without progress before a report, as a multiple of the longest step so far."""
STALLED = 1.0
"""Seconds without progress after which a rank writes its position."""
DEADLOCKED = 30.0
"""Seconds before a report if all ranks are waiting, at least one of them in a collective that the script called."""
SHOWN_STAGE = {"train": "training", "sanity_check": "the sanity check"}
SAVED = "The run's checkpoints are complete: resume=auto continues the run."
KILLED = "it may have been killed (out of memory: see `dmesg`)"

Position = dict[str, Any]
"""A rank's position: what it is doing, whether it is waiting for others, its seconds without progress, and its step."""


class Board:
    """Holds the notes that the ranks write to their store.

    All methods raise RuntimeError if the store no longer exists or does not respond.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._idle = threading.Lock()

    def write(self, topic: str, note: Any) -> None:
        """Write this rank's note on a topic; None deletes the note."""
        self._ask("set", f"{topic}/{self.rank}", json.dumps(note))

    def read(self, topic: str) -> dict[int, Any]:
        """Return the notes on a topic, keyed by rank."""
        keys = {rank: f"{topic}/{rank}" for rank in range(self.size)}
        notes = {rank: json.loads(self._ask("get", key)) for rank, key in keys.items() if self.has(key)}
        return {rank: note for rank, note in notes.items() if note is not None}

    def read_all(self, *topics: str) -> dict[int, Any]:
        """Wait up to ANSWER_SECONDS for each rank's note on one of the topics. Return the notes, keyed by rank."""
        notes: dict[int, Any] = {}

        def is_complete() -> bool:
            notes.update((rank, note) for topic in reversed(topics) for rank, note in self.read(topic).items())
            return len(notes) == self.size

        _await(is_complete)
        return notes

    def is_first(self, alarm: str) -> bool:
        """Raise an alarm and return whether this rank was the first to raise it."""
        return bool(self._ask("add", alarm, 1) == 1)

    def has(self, alarm: str) -> bool:
        """Return whether any rank has raised the alarm."""
        return bool(self._ask("check", [alarm]))

    def _ask(self, method: str, *arguments: Any) -> Any:
        # While the network is down, torch waits for a response indefinitely. So the call runs in a separate
        # thread, which can be abandoned.
        answer = Future[Any]()

        def call() -> None:
            try:
                answer.set_result(getattr(self.store, method)(*arguments))
            except RuntimeError as error:
                answer.set_exception(error)
            finally:
                self._idle.release()

        if self._idle.acquire(timeout=STORE_SECONDS):  # a connection serves one call at a time
            threading.Thread(target=call, name="legato-store", daemon=True).start()
            with suppress(TimeoutError):
                return answer.result(STORE_SECONDS)
        raise DistNetworkError(f"The ranks' shared store has not responded for {STORE_SECONDS:g} s.")


def _await(read: Callable[[], T]) -> T:
    """Call `read` until its result is true, for at most ANSWER_SECONDS; return the last result."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while not (value := read()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


class Watchdog:
    """Monitors this process's progress during a run, from a thread that starts before the rendezvous."""

    def __init__(self, trainer: "Trainer", loop: Any, metrics: Any) -> None:
        """Prepare to monitor a run.

        Args:
            loop: object with this process's current stage (`doing`) and latest step (`step`).
            metrics: object that counts the batches of each stage (`batches`).
        """
        self.trainer, self.loop, self.metrics = trainer, loop, metrics
        self.place = Place()
        """Rank and node of this process, set before the rendezvous and again for each process group."""
        self.end_after: float | None = trainer.hang_timeout
        """Seconds without progress after which the run ends, once startup is over; None if it never ends."""
        self.report_after = REPORT_SECONDS
        self.begun = False
        """True once startup is over."""
        self.longest = 0.0
        """Duration of the longest step (or evaluation batch) so far in seconds, excluding the first."""
        self.reports = 0
        self.token = ""
        """Token of this run, which distinguishes its ranks from those of other runs that use the same store."""
        self.shows_position = self.reported_failure = False
        """True while this rank's position is on the board; true once this rank has reported it after a failure."""
        self.failed_stack: list[Frame] | None = None
        """Stack of the main thread when its collective failed. Later, its stack is that of the reporting code."""
        self.succeeded = False
        """True if the run was closed without an error."""
        self.thread = threading.Thread(target=self._watch, name="legato-watchdog", daemon=True)
        self.watched = threading.get_ident()
        self.done, self.connecting = threading.Event(), threading.Lock()
        self.stacks: Any = None
        self.board: Board | None = None
        self.group: Any = None
        """The process group whose store contains the board."""

    def __enter__(self) -> "Watchdog":
        self.stacks = tempfile.TemporaryFile("w+")
        self.watched = threading.get_ident()
        dump_stacks_to(self.stacks)
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.done.set()
        self.thread.join()
        with suppress(RuntimeError):  # no new connection, because rank 0, which serves the store, may have exited
            if self.succeeded and self.board is not None:
                position = {"where": "has finished its work", "waits": False, "seconds": 0.0, "at": "", "idle": False}
                self.board.write("done", position)
        dump_stacks_to(None)
        self.stacks.close()

    def begin(self) -> None:
        """Mark the end of startup, after which `hang_timeout` applies to all ranks."""
        self.begun = True
        with suppress(RuntimeError):  # connect while all ranks exist: in a short run the thread may be too late
            self._connect()

    # --- the thread -------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        interval = min(1.0, self.report_after / 10, (self.end_after or 10.0) / 10)
        place, since, report_at, changes = self._progress(), time.monotonic(), self.report_after, 0
        while not self.done.wait(interval):
            now, moment = self._progress(), time.monotonic()
            if now != place:
                changes += self.begun
                # leave out startup and the first step, which compiles kernels and fills loaders
                self.longest = max(self.longest, moment - since if changes > 2 else 0.0)
                place, since = now, moment
                report_at = max(self.report_after, LONGEST_STEPS * self.longest)
            stalled, reports = moment - since, self.reports
            # before any request to the store, which may not respond
            if self.begun and self.end_after is not None and stalled >= self.end_after:
                self._end(stalled)
            if stalled >= report_at:
                self._report(stalled)
            with suppress(RuntimeError):  # the store is gone, so the run has ended; another rank reports why
                self._look(stalled)
            if self.reports > reports:
                report_at = 2 * max(stalled, report_at)

    def _look(self, stalled: float) -> None:
        """If this rank is making no progress, write its position to the board and respond to other ranks' alarms."""
        board = self._connect()
        if board is None:
            return
        is_stalled = stalled >= min(STALLED, (self.end_after or STALLED) / 2)
        if is_stalled or self.shows_position:
            board.write("at", self._position(stalled) if is_stalled else None)
            self.shows_position = is_stalled
        if not is_stalled:
            return
        if board.has("end"):
            self._end(stalled)
        if board.has("failed") and not self.reported_failure:
            self.reported_failure = True
            board.write("failed", self._position(stalled, writes_stacks=True))
        if board.has(f"report {self.reports}") or (self.reports == 0 and self._is_deadlocked(stalled, board)):
            self._report(stalled)

    def _is_deadlocked(self, stalled: float, board: Board) -> bool:
        if stalled < max(DEADLOCKED, LONGEST_STEPS * self.longest) or board.size == 1 or not self.begun:
            return False
        positions = board.read("at").values()
        all_wait = len(positions) == board.size and all(position["waits"] for position in positions)
        # not if all are in collectives of the run itself: ranks that run their own backward pass look the same
        return all_wait and any("called in" in position["where"] for position in positions)

    def _end(self, stalled: float) -> None:
        """Write the stacks and terminate the process with an error that lists the positions of all ranks."""
        position = self._position(stalled, writes_stacks=True)
        head = f"No progress for {self.end_after:g} s (trainer.hang_timeout)."
        message, is_first = self._message_of_all("end", position, head)
        end_process(HangError(message), tell=is_first)

    def _report(self, stalled: float) -> None:
        """Write the stacks and continue the run. The first rank to report also logs the positions of all ranks."""
        alarm, position = f"report {self.reports}", self._position(stalled, writes_stacks=True)
        self.reports += 1
        head = f"No progress for {stalled:.0f} s. The run continues; set trainer.hang_timeout to end such a run."
        message, is_first = self._message_of_all(alarm, position, head)
        if is_first:
            log.warning("%s", message)

    def _progress(self) -> tuple[Any, ...]:
        """Return values that change with every step, batch and stage."""
        state, batches = self.trainer.state, tuple(self.metrics.batches.values())
        return self.begun, self.loop.doing, state.global_step, state.epoch, state.epoch_ended, *batches

    def _connect(self) -> Board | None:
        """Return the board. It has its own connection, because the main thread may hang in a call to the store."""
        with self.connecting:
            group = distributed.group.WORLD if distributed.is_initialized() else None
            if group is not self.group:
                try:
                    store = None if group is None else default_store()
                except ValueError:  # an elastic run left its group after `is_initialized`
                    return None
                self.board, self.group, self.reports = None, group, 0
                if store is not None:
                    # a connection serves one call at a time
                    prefix = distributed.PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
                    self.place = self.trainer.strategy.place
                    self.board = Board(prefix, self.place.rank, self.place.world_size)
            return self.board

    # --- calls from the main thread ---------------------------------------------------------------------------------
    def require_all_leave(self, batch_idx: int) -> None:
        """Wait until every rank leaves the epoch at this step. Raises DisagreementError if a rank continues.

        A rank that continues will wait for the others in its backward pass, and its watchdog reports it on the board.
        """
        notes, waiting = self._wait_for_all("leave", "left")
        if waiting:
            staying = [rank for rank, note in enumerate(notes) if note is None]
            raise DisagreementError(
                f"on_train_batch_start returned -1 on rank {self.place.rank} at step "
                f"{self.trainer.state.global_step + 1} (batch_idx {batch_idx}), but {name_ranks(staying)} continued: "
                f"{waiting}. All ranks must leave an epoch together. Use a condition that is the same on all ranks."
            )

    def require_same_end(self, length: str) -> None:
        """Wait until every rank reaches the end of its training stream. Raises DisagreementError if the lengths differ.

        Args:
            length: length of this rank's stream.
        """
        lengths, waiting = self._wait_for_all("end of stream", length)
        if waiting or any(rank_length != length for rank_length in lengths):
            by_rank = [f"rank {rank}: {amount or f'more ({waiting})'}" for rank, amount in enumerate(lengths)]
            raise DisagreementError(
                f"The training stream has different lengths on different ranks in epoch {self.trainer.state.epoch}: "
                f"{'; '.join(by_rank)}. Each rank must read the complete stream, from which Legato selects the rank's "
                f"batches. If each rank reads its own share, set trainer.use_distributed_sampler=false."
            )

    def _wait_for_all(self, event: str, note: str) -> tuple[list[str | None], str]:
        """Wait until every rank has reported the event at the step, or until a rank is waiting elsewhere.

        Return each rank's note (None if it has none), and a description of the rank that is waiting elsewhere, or "".
        """
        state, board = self.trainer.state, self._connect()
        if board is None or board.size == 1 or self.trainer.strategy.elastic:
            return [note], ""
        topic = f"{event} {state.epoch} {state.global_step} {self.token}"
        board.write(topic, note)
        seconds_before = {rank: position["seconds"] for rank, position in board.read("at").items()}
        while True:
            notes, positions = board.read(topic), board.read("at")
            # ignore a position that has not been rewritten since: its rank may have moved on
            waiting = [
                f"rank {rank} {position['where']}"
                for rank, position in positions.items()
                if rank not in notes
                and position["waits"]
                and position["step"] == state.global_step
                and position["seconds"] > seconds_before.get(rank, 0.0)
            ]
            if waiting or len(notes) == board.size:
                return [notes.get(rank) for rank in range(board.size)], waiting[0] if waiting else ""
            time.sleep(0.01)

    def explain(self, error: BaseException) -> BaseException:
        """Return the error to raise instead of `error`, with each rank's position or the first failure if known."""
        if self.place.world_size == 1:
            return error
        with suppress(RuntimeError):  # the store is gone
            self._connect()
        if self.board is None or self.board.size == 1:
            return error
        error = self._explain_collective(error, self.board)
        # Legato's launchers collect their workers' failures, and the script handles those of its own group
        is_collected = self.place.origin in ("alone", "legato", "script")
        return error if is_collected else first_failure(error, self.board)

    def _explain_collective(self, error: BaseException, board: Board) -> BaseException:
        """Return the error to raise for a failed collective, with each rank's position if known."""
        if not isinstance(error, RuntimeError) or isinstance(error, LegatoError):
            return error
        is_late, has_left = "Timed out waiting" in str(error) or "Wait timeout" in str(error), False
        with suppress(RuntimeError):  # the store is gone
            has_left = bool(board.read("done"))
        if is_late:
            timeouts = self.trainer.strategy.timeouts
            limit = f"{timeouts.limits[timeouts.phase].total_seconds():g} s (trainer.strategy.timeout.{timeouts.phase})"
            head = f"Rank {self.place.rank} timed out: it has waited {limit} for other ranks in a collective."
        elif has_left and is_communication(error):
            head = "The ranks called different collectives. All ranks must call the same collectives in the same order."
        else:
            return error
        self.failed_stack = stack_of_error(error)
        kind = HangError if is_late else DisagreementError
        return kind(self._message_of_all("failed", self._position(0.0), head)[0])

    # --- messages ---------------------------------------------------------------------------------------------------
    def _position(self, stalled: float, writes_stacks: bool = False) -> Position:
        """Return this rank's position.

        If `writes_stacks` is true, also write the stacks of this rank and of its loader workers to a file.
        """
        stack = self.failed_stack or stack_of(self.watched)
        where, waits = describe_stack(stack, alone=self.place.world_size == 1)
        at = self._describe_progress(stack)
        if writes_stacks:
            workers = worker_stacks(self.stacks)
            if where == "is waiting for a loader's worker" and (frame := users_frame(workers)) is not None:
                where = f"is waiting for a loader's worker, which is in {frame}"
            self._write_stacks(f"Rank {self.place.rank} {where} for {stalled:.1f} s, at {at}.\n\n", workers)
        step = self.loop.step if self.loop.doing == "train" else None
        position = {"where": where, "waits": waits, "seconds": stalled, "at": at}
        # "idle": this rank has no batch in the step
        return position | {"idle": step is not None and not step.batches, "step": self.trainer.state.global_step}

    def _describe_progress(self, stack: list[Frame]) -> str:
        """Describe the step or batch that this process is running, given its `stack`."""
        state, doing = self.trainer.state, self.loop.doing
        if not self.begun:
            return "startup"
        at = f"step {state.global_step + 1}"
        if doing == "train":
            ended = any(frame.function == "end_epoch" and frame.is_in("/trainer/trainer") for frame in stack)
            return f"the end of epoch {state.epoch}, after step {state.global_step}" if ended else at
        stage = SHOWN_STAGE.get(doing, doing)
        return f"{at}, batch {self.metrics.batches.get(self.metrics.stage, 0)} of {stage}"

    def _write_stacks(self, header: str, workers: list[str]) -> None:
        folder = self._folder
        if folder is None:
            faulthandler.dump_traceback(2, all_threads=True)
            return
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank-{self.place.rank}.txt").open("w", encoding="utf-8") as file:
            file.write(header)
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("".join(f"\n{text}" for text in workers))

    @property
    def _folder(self) -> Path | None:
        return None if self.trainer.run_dir is None else self.trainer.run_dir / "hang"

    def _message_of_all(self, alarm: str, position: Position, head: str) -> tuple[str, bool]:
        """Raise an alarm with this rank's position. Return a message, and whether this rank was the first to raise it.

        The message lists the positions of all ranks or, if the store does not respond, only this rank's.
        """
        board, is_first = self.board, True
        if board is None:
            return self._message({self.place.rank: position}, head), True
        try:
            is_first = board.is_first(alarm)
            board.write(alarm, position)
            positions = board.read_all(alarm, "done")
            message = self._message({rank: positions.get(rank) for rank in range(board.size)}, head)
            # the store goes down with rank 0, which therefore waits until the first rank has read the positions
            if is_first:
                board.is_first(f"{alarm} read")
            _await(lambda: board.has(f"{alarm} read"))
        except RuntimeError as error:
            lost = f"The positions of the other ranks are unknown: {error}"
            network = "The network to the machine of rank 0, or that machine, may be down."
            message = self._message({self.place.rank: position}, f"{head}\n{lost} {network}")
        return message, is_first

    def _message(self, positions: Mapping[int, Position | None], head: str) -> str:
        """Return a message with each rank's position, the ranks blocking the others, and where to find the stacks."""
        ranks_by_text: dict[str, list[int]] = {}
        for rank, position in positions.items():
            text = "is not responding: it was suspended, has exited, has no network, or is holding the interpreter lock"
            if position is not None:
                seconds = f" for {position['seconds']:.0f} s" if position["seconds"] else ""
                text = position["where"] + (f"{seconds}, at {position['at']}" if position["at"] else "")
            ranks_by_text.setdefault(text, []).append(rank)
        process = "The process" if self.place.world_size == 1 else ""
        lines = [head, *(f"  {process or name_ranks(ranks)} {text}" for text, ranks in ranks_by_text.items())]
        to_blame = [rank for rank, position in positions.items() if position is None or not position["waits"]]
        if len(positions) > 1 and not to_blame:
            lines.append("All ranks are waiting for each other. They must call the same collectives in the same order.")
            lines.append(_remedy({rank: position for rank, position in positions.items() if position is not None}))
        elif len(to_blame) < len(positions) > 1:
            lines.append(f"The others are waiting for {name_ranks(to_blame)}.")
        where = "above" if self._folder is None else f"in {self._folder}{os.sep}rank-*.txt"
        lines.append(f"The stacks of all threads are {where}. {SAVED}")
        return "\n".join(lines)


def _remedy(positions: Mapping[int, Position]) -> str:
    """Return advice for a run whose ranks are all waiting for each other."""
    idle = sorted(rank for rank, position in positions.items() if position["idle"])
    if idle:
        return (
            f"The data does not divide evenly among the ranks: this step has no batch for {name_ranks(idle)}, so "
            f"training_step is not called there. Set drop_last=True, or gather at the end of the epoch."
        )
    if len({position["at"] for position in positions.values()}) > 1:
        return "They are at different steps: their loaders may have different lengths."
    return "To compare each collective between ranks, set TORCH_DISTRIBUTED_DEBUG=DETAIL."


def name_ranks(ranks: list[int]) -> str:
    """Return "rank 1" or "ranks 0, 2, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# --- the first failure ------------------------------------------------------------------------------------------------
def first_failure(error: BaseException, board: Board) -> BaseException:
    """Return the error to raise on this rank if no Legato launcher collects the failures.

    If this rank merely lost its connection to another rank, the result is a WorkerError that identifies the first rank
    that failed. Otherwise, the result is the rank's own error, which is written to the board if it is the first.
    """
    is_end = isinstance(error, SystemExit) and error.code in (None, 0, RESUME_ME, INTERRUPTED)
    if is_end or not isinstance(error, (Exception, SystemExit)):
        return error
    failures: dict[int, str] = {}
    cause = f"and no rank has reported an error: {KILLED}, or its machine went down"
    try:
        if board.rank == 0:
            atexit.register(_stay, board)  # runs before handlers registered earlier, which close the store
        if is_communication(error):
            failures = _await(lambda: board.read("first failure"))
        elif board.is_first("failure"):
            board.write("first failure", _sentence(error))
        board.write("knows", True)
    except RuntimeError:
        cause = f"and rank 0, which serves the ranks' shared store, has exited without an error message: {KILLED}"
    if not is_communication(error):
        return error
    for first, text in failures.items():  # of at most one rank
        return WorkerError(
            f"Rank {first} of {board.size} failed first: {text} Its traceback is in its own output; rank {board.rank} "
            f"only lost the connection to it.",
            board.rank,
        )
    return WorkerError(f"Rank {board.rank} of {board.size} lost its connection to another rank, {cause}.", board.rank)


def _sentence(error: BaseException) -> str:
    """Return an error as a single line, with the file and line where it was raised."""
    frame = next(iter(stack_of_error(error)), None)
    where = "" if frame is None else f" ({frame.file}:{frame.line})"
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}{where}."


def _stay(board: Board) -> None:
    """Leave the process group so that the other ranks notice a failure, and serve the store until they know the cause.

    This takes at most ANSWER_SECONDS.
    """
    store = board.store
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    # leaving alone closes them only if nothing refers to a group; a file store has no port
    connections.shut_down(keep_port=getattr(store, "port", None))
    leave_process_group()
    with suppress(RuntimeError):
        board.read_all("knows")
