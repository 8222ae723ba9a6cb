"""StoredRun: a run on disk, of which a command line asks for a checkpoint by word."""

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import checkpoint, run_directory
from .commit import STEP_NAME

log = logging.getLogger("legato")

FRESH = "checkpoint=none takes fresh weights."


@dataclass(frozen=True)
class StoredRun:
    """The run in `directory`, or without one the newest of a name that has a whole checkpoint.

    Resolved by the process that decides for all, rank 0 or the one that starts the workers.
    """

    root: Path
    name: str
    directory: Path | None
    word: str
    """ "best", "last", "auto" (go on with the run), or "" for the best, or the last where there is no best."""

    def weights(self, callbacks: Sequence[Any]) -> Path:
        """Return the checkpoint to evaluate, and say which it is; `callbacks` are the run's Checkpoint callbacks.

        A damaged one is passed over with a warning. Raises CheckpointError where there is none.
        """
        for callback, newest in self._newest(callbacks):
            which, found = ("last", newest) if self.word == "last" else self._best(newest, callback)
            named = self.directory is None and newest.parent.parent.parent == self.root / self.name
            of = f" of the newest run of {self.name!r} that has one" if named else ""
            log.info("checkpoint: the %s%s, %s. %s", which, of, found, FRESH)
            return found
        place = self.directory if self.directory is not None else self.root / self.name
        raise CheckpointError(f"There is no whole checkpoint in {place}. Train first, or name a checkpoint; {FRESH}")

    def to_resume(self, check: checkpoint.Check) -> tuple[Path | None, Path | None]:
        """Return the run directory and the checkpoint to go on from; None for both where there is no checkpoint."""
        assert self.directory is not None
        found = run_directory.newest_in(self.directory, check)
        if found is None:
            log.info("resume=auto: there is no whole checkpoint in %s, so the run begins anew.", self.directory)
            return None, None
        return self.directory, found

    def _newest(self, callbacks: Sequence[Any]) -> Iterator[tuple[Any, Path]]:
        """Yield the newest whole checkpoint of each place where the run may save, with the callback that does."""
        for callback in callbacks:
            if callback.dirpath is not None:
                found = checkpoint.newest_whole(Path(callback.dirpath))
                if found is not None:
                    yield callback, found
        inside = next((callback for callback in callbacks if callback.dirpath is None), None)
        if self.directory is not None:
            found = run_directory.newest_in(self.directory)
        else:
            found = (run_directory.newest_checkpoint(self.root, self.name) or (None, None))[1]
        if found is not None:
            yield inside, found

    def _best(self, newest: Path, callback: Any) -> tuple[str, Path]:
        """Return the best whole checkpoint beside the newest one, which knows their values; else the newest."""
        state = None if callback is None else checkpoint.read_callback(newest, callback.state_key)
        if state is None:
            if self.word == "best":
                raise CheckpointError(
                    f"{newest} does not say which checkpoint is the best. Set checkpoint=last or to a path."
                )
            return "last", newest
        ranking = copy.copy(callback)
        ranking.load_state_dict(state)
        ranking.dirpath = newest.parent
        ranking.scores = {
            name: score
            for name, score in ranking.scores.items()
            if STEP_NAME.fullmatch(name) and (newest.parent / name).is_dir()
        }
        passed_over = False
        while ranking.best_model_path:
            best = Path(ranking.best_model_path)
            try:
                if best != newest:
                    checkpoint.verify(best)
            except CheckpointError as error:
                log.warning("The best checkpoint is passed over, it is not whole. %s", error)
                del ranking.scores[best.name]
                passed_over = True
            else:
                return ("best that is whole" if passed_over else "best"), best
        if self.word == "best" and not passed_over:
            raise CheckpointError(
                f"No checkpoint in {newest.parent} has a value of {callback.monitor!r}. Set checkpoint=last or a path."
            )
        return "last", newest
