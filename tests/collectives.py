"""Counts of torch's collectives, for tests of the communication of an operation."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import distributed


def count_collectives(names: Iterable[str], function: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """Call `function`; return its result, and the number of calls of each of these functions of torch.distributed."""
    counts: Counter[str] = Counter()
    originals = {name: getattr(distributed, name) for name in names if hasattr(distributed, name)}

    def counting(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return originals[name](*arguments, **options)

        return call

    for name in originals:
        setattr(distributed, name, counting(name))
    try:
        return function(), dict(counts)
    finally:
        for name, original in originals.items():
            setattr(distributed, name, original)
