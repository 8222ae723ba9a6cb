"""Watchdog: ends a run that makes no progress, with one message that says which rank is where and who waits for whom.

A thread in each process looks at what the loop counts anyway, so that the loop itself does nothing for it. Where that
stands still for `hang_timeout`, every rank writes its stacks to the run directory and tells the others where it is.
"""

import faulthandler
import json
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import distributed

from .data.loader_workers import dump_stacks_to
from .errors import HangError
from .processes.ending import end_process
from .processes.stacks import describe, stack_of, users_frame, worker_stacks
from .torch_private import default_store

if TYPE_CHECKING:
    from .run import Run

ANSWER = 3.0
"""Seconds that ranks have to say where they are."""
WORDS = {"train": "training", "sanity_check": "the sanity check"}

Position = dict[str, Any]
"""What a rank says: where it is, whether it waits for others, and for how many seconds it has been there."""


class Watchdog:
    """Watches this process's part of a run, while it is entered. `seconds`: the longest time without any progress."""

    def __init__(self, run: "Run", seconds: float) -> None:
        self.run, self.seconds = run, seconds
        self.thread = threading.Thread(target=self._watch, name="legato-watchdog", daemon=True)
        self.watched = threading.get_ident()
        self.done = threading.Event()
        self.stacks = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed when the run is left)
        self.store: Any = None
        self.store_of: Any = None

    def __enter__(self) -> "Watchdog":
        dump_stacks_to(self.stacks)
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.done.set()
        self.thread.join()
        with suppress(RuntimeError):
            self._connect()
            self._say({"where": "has done its work", "waits": False, "seconds": 0.0, "at": ""})
        dump_stacks_to(None)
        self.stacks.close()

    # --- watching ---------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        interval = min(1.0, self.seconds / 10)
        place, since = self._progress(), time.monotonic()
        while not self.done.wait(interval):
            now = self._progress()
            if now != place:
                place, since = now, time.monotonic()
            stalled = time.monotonic() - since
            with suppress(RuntimeError):  # the store has gone, and with it the run: somebody else tells why
                self._connect()
                if stalled >= self.seconds or (self.store is not None and self.store.check(["alarm"])):
                    self._end(stalled)

    def _progress(self) -> tuple[Any, ...]:
        """Return something that changes with every step, batch and stage."""
        run = self.run
        return run.doing, run.state.global_step, run.state.epoch, run.state.epoch_ended, *run.metrics.turns.values()

    def _connect(self) -> None:
        """Open a connection of our own to the store at which the ranks have met; the other one's user may be stuck."""
        group = distributed.group.WORLD if distributed.is_initialized() else None
        if group is not self.store_of:
            self.store, self.store_of = None, group
            if group is not None:
                store = default_store()
                if store is not None:
                    self.store = distributed.PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]

    # --- the end ----------------------------------------------------------------------------------------------------
    def _end(self, stalled: float) -> None:
        """Write the stacks, tell the others, and end the process with what they have told."""
        first = self.store is None or self.store.add("alarm", 1) == 1
        try:
            own = self._look(stalled)
            message = self._exchange(own, first)
        except RuntimeError:  # the store has gone
            message = self._message({self._rank: own})
        end_process(HangError(message), tell=first)

    @property
    def _rank(self) -> int:
        return self.run.strategy.place.rank

    def _look(self, stalled: float) -> Position:
        """Write down the stacks of this process and its loaders' workers; return where it stands."""
        place, run = self.run.strategy.place, self.run
        where, waits = describe(stack_of(self.watched), alone=place.world_size == 1)
        workers = worker_stacks(self.stacks)
        if where == "waits for a loader's worker" and (frame := users_frame(workers)) is not None:
            where = f"waits for a loader's worker, which is in {frame}"
        at = f"step {run.state.global_step + 1}"
        if run.doing != "train":
            at += f", batch {run.metrics.turns.get(run.metrics.stage, 0)} of {WORDS.get(run.doing, run.doing)}"
        header = f"Rank {place.rank} {where} since {stalled:.1f} s, at {at}.\n\n"
        folder = self._folder
        if folder is None:
            faulthandler.dump_traceback(2, all_threads=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"rank-{place.rank}.txt").open("w", encoding="utf-8") as file:
                file.write(header)
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.write("".join(f"\n{text}" for text in workers))
        return {"where": where, "waits": waits, "seconds": stalled, "at": at}

    @property
    def _folder(self) -> Path | None:
        return None if self.run.trainer.run_dir is None else self.run.trainer.run_dir / "hang"

    def _say(self, position: Position) -> None:
        if self.store is not None:
            self.store.set(f"position/{self._rank}", json.dumps(position))

    def _exchange(self, own: Position, first: bool) -> str:
        """Tell the others where this rank is; return the message that the first one makes of what all have told."""
        if self.store is None:
            return self._message({self._rank: own})
        self._say(own)
        ranks, deadline = range(self.run.strategy.place.world_size), time.monotonic() + ANSWER
        told: dict[int, Position] = {}
        while len(told) < len(ranks) and time.monotonic() < deadline + (0 if first else ANSWER):
            if not first and self.store.check(["message"]):
                return str(self.store.get("message").decode())
            for rank in ranks:
                if rank not in told and self.store.check([f"position/{rank}"]):
                    told[rank] = json.loads(self.store.get(f"position/{rank}"))
            time.sleep(0.05)
        while not first and time.monotonic() < deadline + ANSWER:
            if self.store.check(["message"]):
                return str(self.store.get("message").decode())
            time.sleep(0.05)
        message = self._message(told)
        self.store.set("message", message)
        return message

    def _message(self, told: Mapping[int, Position]) -> str:
        """Say which rank is where since when, what the others wait for, and where the stacks are."""
        lines = [f"No progress for {self.seconds:g} s (trainer.hang_timeout)."]
        alike: dict[str, list[int]] = {}
        for rank in range(self.run.strategy.place.world_size):
            position = told.get(rank)
            words = "does not answer: its process is stopped, or gone, or in code that lets no other thread run"
            if position is not None:
                since = f" since {position['seconds']:.0f} s, at {position['at']}" if position["at"] else ""
                words = f"{position['where']}{since}"
            alike.setdefault(words, []).append(rank)
        alone = self.run.strategy.place.world_size == 1
        lines += [f"  {'The process' if alone else name_ranks(ranks)} {words}" for words, ranks in alike.items()]
        to_blame = [rank for words, ranks in alike.items() for rank in ranks if not told.get(rank, {}).get("waits")]
        if not alone and to_blame and len(to_blame) < self.run.strategy.place.world_size:
            lines.append(f"The others wait for {name_ranks(sorted(to_blame))}.")
        elif not alone and not to_blame:
            lines.append("All wait, for each other: they must call the same collectives in the same order.")
        where = "above" if self._folder is None else f"in {self._folder}{os.sep}rank-*.txt"
        lines.append(f"The stacks of all threads are {where}. What the run has saved is whole: resume=auto goes on.")
        return "\n".join(lines)


def name_ranks(ranks: list[int]) -> str:
    """Return "rank 1", or "ranks 0, 2, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
