"""Collectives that the script itself calls on the default process group, which not every step may call.

Legato's are in a group of their own (`ranks.legatos_group`), so that the default group counts the script's alone.
"""

from collections.abc import Callable, Sequence
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any

from ...base.torch_private import collectives_called

WATCHED_BATCHES = 4
"""Batches of a process whose training_step must call no collective, where it cannot be right."""


class TrainingCollectives:
    """Refuses collectives that training_step calls itself, where processes run several replicas in turn.

    Looked at in the first batches, by hooks that then remove themselves.
    """

    def __init__(self, hooks: dict[str, tuple[Callable[..., Any], ...]], refuse: Callable[[str], None]) -> None:
        """`refuse` raises an error for a call that it is given the name of."""
        self.hooks, self.refuse = hooks, refuse
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
        self.before = collectives_called()

    def _end(self, loss: Any) -> None:
        if collectives_called() > self.before:
            self.refuse("a collective of torch.distributed")
        self.batches_left -= 1
        if not self.batches_left:
            for name, hook in self.watching.items():
                self.hooks[name] = tuple(one for one in self.hooks[name] if one != hook)


class StepCollectives:
    """Tells whether the steps of an evaluation call collectives, for which every rank must run equally many.

    Looked at where all ranks have run as many steps, so that it is the same on each.
    """

    def __init__(self, counts: bool) -> None:
        """`counts`: whether the default group is the script's alone."""
        self.counts = counts
        self.seen = False
        """Whether a step has called one."""
        self.before = 0

    def begin(self) -> None:
        """Look from now on, when an evaluation begins."""
        self.before = collectives_called()

    def look(self) -> bool:
        """Return whether a step has called one by now."""
        self.seen |= self.counts and collectives_called() > self.before
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
