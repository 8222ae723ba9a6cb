"""Collectives that the script itself calls on the default process group, which all ranks must call equally often.

Legato's own are in a group of their own (`own_group.legatos_group`), so that one that a rank calls once too often pairs
with nothing of Legato's. Where the ranks meet anyway they compare how many there were.
"""

import time
from collections.abc import Callable, Sequence
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any

from ...base.errors import DisagreementError
from ...base.torch_private import collectives_called, count_collectives
from .collectives import SINGLE, Collectives

WATCHED_BATCHES = 4
"""Batches of a process whose training_step must call no collective, where it cannot be right."""
PATIENCE = 2.0
"""Seconds for which counts may differ: a thread of the script may be about to call its own."""


class ScriptCollectives:
    """Counts this process's collectives on the default process group, from the beginning of a run."""

    def __init__(self) -> None:
        self.collectives: Collectives = SINGLE
        self.group: Any = None
        """The group that is watched; None: nothing is counted."""
        self.before = 0

    def start(self, collectives: Collectives) -> None:
        """Count from now on; `collectives` are Legato's own, by which the ranks compare their counts."""
        from torch import distributed

        self.collectives, self.group = collectives, distributed.group.WORLD
        if self.group is not None:
            count_collectives()
            self.before = collectives_called([self.group])

    @property
    def count(self) -> int:
        """Number of collectives that this process has called; 0 where they are not counted."""
        return 0 if self.group is None else collectives_called([self.group]) - self.before

    def require_same(self) -> None:
        """Raise DisagreementError where ranks have called different numbers; all call it once some differ."""
        began = time.monotonic()
        while True:
            told = self.collectives.gather_objects((self.count, time.monotonic() - began > PATIENCE))
            counts = [count for count, _ in told]
            if len(set(counts)) == 1:
                return
            if any(late for _, late in told):
                raise DisagreementError(
                    f"{describe_counts(counts)} Each rank must call the same collectives in the same order: look for a "
                    f"call of torch.distributed (or self.all_gather) that not all ranks make. Results of such calls so "
                    f"far may be wrong, since each pairs with the next one of the other ranks."
                )
            time.sleep(0.1)


class TrainingCollectives:
    """Refuses collectives that training_step calls itself, where processes run several replicas in turn.

    Looked at in the first batches, by hooks that then remove themselves.
    """

    def __init__(
        self, script: ScriptCollectives, hooks: dict[str, tuple[Callable[..., Any], ...]], refuse: Callable[[str], None]
    ) -> None:
        """`refuse` raises an error for a call that it is given the name of."""
        self.script, self.hooks, self.refuse = script, hooks, refuse
        self.before, self.batches_left = 0, WATCHED_BATCHES
        self.watching: dict[str, Callable[..., Any]] = {
            "on_train_batch_start": self._begin,
            "on_before_backward": self._end,
        }

    def start(self) -> None:
        """Look from now on."""
        for name, hook in self.watching.items():
            self.hooks[name] += (hook,)

    def _begin(self, batch: Any, batch_idx: int) -> None:
        self.before = self.script.count

    def _end(self, loss: Any) -> None:
        if self.script.count > self.before:
            self.refuse("a collective of torch.distributed")
        self.batches_left -= 1
        if not self.batches_left:
            for name, hook in self.watching.items():
                self.hooks[name] = tuple(one for one in self.hooks[name] if one != hook)


class StepCollectives:
    """Tells whether the steps of an evaluation call collectives, for which every rank must run equally many.

    Looked at where all ranks have run as many steps, so that it is the same on each.
    """

    def __init__(self, script: ScriptCollectives) -> None:
        self.script = script
        self.seen = False
        """Whether a step has called one."""
        self.before = 0

    def begin(self) -> None:
        """Look from now on, when an evaluation begins."""
        self.before = self.script.count

    def look(self) -> bool:
        """Return whether a step has called one by now."""
        self.seen |= self.script.count > self.before
        return self.seen


GATHERING = frozenset(("all_gather", "all_gather_into_tensor", "gather_all_tensors"))
"""Functions that take as much from each rank."""


def gathers(owner: object, hooks: Sequence[str]) -> bool:
    """Return whether hooks of one's own, or methods of one's own that they call, name a function that gathers."""
    package = __name__.partition(".")[0]
    waiting, looked_at = list(hooks), set[str]()
    while waiting:
        name = waiting.pop()
        function = unwrap(getattr(type(owner), name, None))  # type: ignore[arg-type]
        own = isinstance(function, FunctionType) and function.__module__.partition(".")[0] != package
        if not own or name in looked_at:
            continue
        looked_at.add(name)
        names = _names_in_code(function.__code__)
        if names & GATHERING:
            return True
        waiting += names
    return False


def _names_in_code(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in_code, inner))


def describe_counts(counts: list[int]) -> str:
    """Say which rank has called how many collectives, those with the most first."""
    ranks: dict[int, list[int]] = {}
    for rank, count in enumerate(counts):
        ranks.setdefault(count, []).append(rank)
    said = [
        f"rank{'s' if len(some) > 1 else ''} {', '.join(map(str, some))}: {count}"
        for count, some in sorted(ranks.items(), reverse=True)
    ]
    return f"The ranks called different numbers of collectives on the default process group: {'; '.join(said)}."
