"""How many arguments the user's step takes."""

import inspect
from collections.abc import Callable
from typing import Any

from .errors import TaskError

MOST = {"training_step": 2, "validation_step": 3, "test_step": 3, "predict_step": 3}
NAMES = ("batch", "batch_idx", "dataloader_idx")


def count_arguments(task: Any, step: str, several_loaders: bool = True) -> int:
    """Return how many of (batch, batch_idx, dataloader_idx) the step takes.

    One with `*args` is given the last with `several_loaders` only, as in Lightning.

    Raises TaskError where it takes none of them, or needs others.
    """
    parameters = list(inspect.signature(getattr(task, step)).parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return MOST[step] if several_loaders else min(2, MOST[step])
    if "dataloader_iter" in (parameter.name for parameter in parameters):
        raise TaskError(
            f"{type(task).__name__}.{step}(dataloader_iter, ...) is given a batch here, not the loader's iterator: "
            f"take `batch`, and leave the reading to the trainer."
        )
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    wrong = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    wrong += [p.name for p in positional[MOST[step] :] if p.default is p.empty]
    if wrong or not positional:
        accepted = ", ".join(NAMES[: MOST[step]])
        named = ", ".join(parameter.name for parameter in parameters)
        raise TaskError(
            f"{type(task).__name__}.{step}({named}) cannot be called: it is given ({accepted}), or the first of them; "
            f"{'unknown: ' + ', '.join(wrong) if wrong else 'it takes no batch'}."
        )
    return min(len(positional), MOST[step])


def fitted(hook: Callable[..., Any], given: int) -> Callable[..., Any]:
    """Return `hook` as a function of `given` arguments; the last of them is left out where it takes one less."""
    try:
        inspect.signature(hook).bind(*range(given))
    except TypeError:
        return lambda *arguments: hook(*arguments[: given - 1])
    return hook
