"""Converts optimizer states between parameter names (in checkpoints) and parameter numbers (in torch)."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...base.errors import CheckpointError

Names = Sequence[Sequence[str]]
"""Names of the parameters in each group of an optimizer."""


def named(state: dict[str, Any], names: Names | None) -> dict[str, Any]:
    """Return an optimizer's state dict with its states keyed by parameter names instead of numbers.

    If the states were keyed by number, they would be loaded into the wrong parameters whenever the order of the
    parameters changed. If there are no names, or if the state dict lacks torch's keys, return it unchanged.
    """
    if names is None or not {"state", "param_groups"} <= state.keys():
        return state
    order = [name for group in names for name in group]
    # an optimizer may store values under keys that are not parameters
    states = {order[key] if isinstance(key, int) else key: values for key, values in state["state"].items()}
    groups = [{**group, "params": list(params)} for group, params in zip(state["param_groups"], names, strict=True)]
    return {**state, "state": states, "param_groups": groups}


def numbered(kind: str, state: Mapping[str, Any], names: Names | None) -> tuple[dict[str, Any], list[int]]:
    """Return a state dict from `named` with the current parameter numbers as keys, and the saved index of each group.

    Groups are matched by their parameters' names, so the order of groups and parameters may change. If `names` is None,
    the saved order is kept. Raises CheckpointError if a parameter is new or missing, or has moved to another group.
    """
    saved = [group["params"] for group in state.get("param_groups", ())]
    if not saved or not all(isinstance(name, str) for group in saved for name in group):
        return dict(state), []  # the state lacks torch's keys, or is keyed by number as under ddp_rpc
    names = saved if names is None else names
    groups = _match_groups(kind, saved, names)
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    # an optimizer may store values under keys that are not parameters
    states = {numbers.get(key, key): values for key, values in state["state"].items()}
    settings = [
        {**state["param_groups"][group], "params": [numbers[name] for name in params]}
        for group, params in zip(groups, names, strict=True)
    ]
    return {**state, "state": states, "param_groups": settings}, groups


def _match_groups(kind: str, saved: Names, names: Names) -> list[int]:
    if saved == names:
        return list(range(len(saved)))
    places = {frozenset(group): index for index, group in enumerate(saved)}
    saved_index = {name: index for group, index in places.items() for name in group}
    current = {name for group in names for name in group}
    if saved_index.keys() != current:
        problem = differences(sorted(current - saved_index.keys()), sorted(saved_index.keys() - current))
        raise CheckpointError(f"The parameters of the checkpoint's {kind} do not match those of the task: {problem}.")
    for group in names:
        if frozenset(group) not in places:
            raise CheckpointError(
                f"The checkpoint's {kind} has different parameter groups. The task now returns a group "
                f"{_few('of', list(group[:5]))}, whose parameters are in the checkpoint's groups "
                f"{sorted({saved_index[name] for name in group})}. Return the same groups from configure_optimizers."
            )
    return [places[frozenset(group)] for group in names]


def differences(missing: list[str], unexpected: list[str], shapes: Sequence[str] = ()) -> str:
    """Describe how the parameter names in a checkpoint differ from those in a run."""
    clauses = (("it lacks", missing), ("it has unknown", unexpected), ("other shapes:", sorted(shapes)))
    return "; ".join(_few(words, names) for words, names in clauses if names)


def _few(words: str, names: list[str]) -> str:
    return f"{words} {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")
