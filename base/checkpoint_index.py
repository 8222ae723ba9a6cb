"""CheckpointIndex: which checkpoints a callback keeps in a folder, with the values by which the best are chosen.

It lies beside the checkpoints, and not in them: what a checkpoint says of others is of the moment when it was written.
"""

import json
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

INDEX = "index.json"


class Entry(NamedTuple):
    """Checkpoint in an index."""

    step: int
    score: float | None = None
    """The monitored value; None: it has none."""
    elapsed: float = 0.0
    """Seconds that the run had taken."""


def is_name(name: object) -> bool:
    """Return whether this may be the name of a checkpoint: as a path it leads to one folder's own entry."""
    return isinstance(name, str) and name.isprintable() and name[:1] not in ("", ".") and "/" not in name


@dataclass
class CheckpointIndex:
    """Checkpoints of one run in a folder, oldest first, and how they are compared."""

    run: str = ""
    """Id of the run."""
    monitor: str | None = None
    """Name of the metric; None: newer ones are better."""
    mode: str = "min"
    checkpoints: dict[str, Entry] = field(default_factory=dict)

    def best(self, save_top_k: int | None = None) -> list[str]:
        """Return the names of the best, best first; of equals the earlier one is better. None: all with a value."""
        ranked = list(reversed(self.checkpoints))
        if self.monitor is not None:
            sign = 1 if self.mode == "min" else -1
            scores = {name: sign * one.score for name, one in self.checkpoints.items() if one.score is not None}
            # sorted() is stable, so of equal scores the earlier checkpoint stays first
            ranked = sorted(scores, key=scores.__getitem__)
        # all are those without a value too, which cannot be compared, and so are never among the best few
        if save_top_k == -1:
            return ranked + [name for name in self.checkpoints if name not in ranked]
        return ranked[:save_top_k]

    def kept(self, save_top_k: int, save_last: bool) -> set[str]:
        """Return the names of those to keep: the best `save_top_k` (-1: all), and the newest."""
        return {*self.best(save_top_k), *(list(self.checkpoints)[-1:] if save_last else ())}

    def dump(self) -> bytes:
        """Return the text of the file."""
        entries = {name: entry._asdict() for name, entry in self.checkpoints.items()}
        content = {"run": self.run, "monitor": self.monitor, "mode": self.mode, "checkpoints": entries}
        # NaN is no JSON, and one such score would have `parse_index` refuse the whole file
        return json.dumps(content, indent=1, allow_nan=False).encode("ascii")


def parse_index(content: Any) -> CheckpointIndex | None:
    """Return the index in the contents of a file; None for one that Legato has not written."""
    # anybody may have put it there: names lead nowhere else, and nothing is deleted that the run has not written
    try:
        entries = {name: _entry(**entry) for name, entry in content["checkpoints"].items() if is_name(name)}
        index = CheckpointIndex(content["run"], content["monitor"], content["mode"], entries)
    except (TypeError, KeyError, AttributeError, ValueError):
        return None
    named = isinstance(index.run, str) and isinstance(index.monitor, str | None) and index.mode in ("min", "max")
    return index if named else None


def _entry(step: object, score: object, elapsed: object) -> Entry:
    numbers = [step, elapsed] if score is None else [step, elapsed, score]
    # type() and not isinstance(): JSON's true is an int for the latter
    if type(step) is not int or not all(type(one) in (int, float) and math.isfinite(one) for one in numbers):  # type: ignore[arg-type]
        raise ValueError("no entry of an index")
    return Entry(step, score, elapsed)  # type: ignore[arg-type]
