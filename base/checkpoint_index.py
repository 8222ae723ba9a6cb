"""CheckpointIndex: the checkpoints that a callback keeps in a folder, with the values used to rank them.

The index is a separate file, because a list inside a checkpoint would be out of date after the next save.
"""

import json
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

INDEX = "index.json"


class Entry(NamedTuple):
    """A checkpoint in an index."""

    step: int
    score: float | None = None
    """Value of the monitored metric; None if there is none."""
    elapsed: float = 0.0
    """Training time of the run in seconds when the checkpoint was saved."""


def is_name(name: object) -> bool:
    """Return whether `name` is a valid checkpoint name, that is, not hidden and without "/"."""
    return isinstance(name, str) and name.isprintable() and name[:1] not in ("", ".") and "/" not in name


@dataclass
class CheckpointIndex:
    """A run's checkpoints in a folder, oldest first, with the values used to rank them."""

    run: str = ""
    """Id of the run."""
    monitor: str | None = None
    """Name of the metric that ranks the checkpoints. If None, newer checkpoints rank higher."""
    mode: str = "min"
    checkpoints: dict[str, Entry] = field(default_factory=dict)

    def best(self, save_top_k: int | None = None) -> list[str]:
        """Return the names of the `save_top_k` best checkpoints, best first. Ties favor the earlier one.

        If `save_top_k` is -1, return all checkpoints. If it is None, return all checkpoints that have a value.
        """
        ranked = list(reversed(self.checkpoints))
        if self.monitor is not None:
            sign = 1 if self.mode == "min" else -1
            scores = {name: sign * entry.score for name, entry in self.checkpoints.items() if entry.score is not None}
            # sorted() is stable, so if scores are equal, the earlier checkpoint remains first
            ranked = sorted(scores, key=scores.__getitem__)
        # -1 includes checkpoints without a value, which cannot be ranked and are otherwise never among the best
        if save_top_k == -1:
            return ranked + [name for name in self.checkpoints if name not in ranked]
        return ranked[:save_top_k]

    def kept(self, save_top_k: int, save_last: bool) -> set[str]:
        """Return the names of checkpoints to keep: the `save_top_k` best (-1: all) and, if `save_last`, the newest."""
        return {*self.best(save_top_k), *(list(self.checkpoints)[-1:] if save_last else ())}

    def dump(self) -> bytes:
        """Return the contents of the index file."""
        entries = {name: entry._asdict() for name, entry in self.checkpoints.items()}
        content = {"run": self.run, "monitor": self.monitor, "mode": self.mode, "checkpoints": entries}
        # JSON has no NaN, so `parse_index` would reject a file with a NaN score
        return json.dumps(content, indent=1, allow_nan=False).encode("ascii")


def parse_index(content: Any) -> CheckpointIndex | None:
    """Return the index in a file's parsed JSON; None if it is not a Legato index."""
    # the file may be untrusted: no name may lead to another folder
    try:
        entries = {name: _entry(**entry) for name, entry in content["checkpoints"].items() if is_name(name)}
        index = CheckpointIndex(content["run"], content["monitor"], content["mode"], entries)
    except (TypeError, KeyError, AttributeError, ValueError):
        return None
    is_valid = isinstance(index.run, str) and isinstance(index.monitor, str | None) and index.mode in ("min", "max")
    return index if is_valid else None


def _entry(step: object, score: object, elapsed: object) -> Entry:
    numbers = [step, elapsed] if score is None else [step, elapsed, score]
    # not isinstance(), which accepts JSON's true as an int
    if type(step) is not int or not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):  # type: ignore[arg-type]
        raise ValueError("not a valid entry of an index")
    return Entry(step, score, elapsed)  # type: ignore[arg-type]
