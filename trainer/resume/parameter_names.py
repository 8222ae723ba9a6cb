"""Optimizers' states by the names of parameters in a checkpoint, and by their numbers for torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...base.errors import CheckpointError

Names = Sequence[Sequence[str]]
"""Names of parameters, for each group of an optimizer."""


def named(state: dict[str, Any], names: Names | None) -> dict[str, Any]:
    """Return an optimizer's state dict by names; as it is where there are none, or where it is of a kind of its own.

    By numbers a state would go to other parameters wherever their order has changed.
    """
    if names is None or not {"state", "param_groups"} <= state.keys():
        return state
    order = [name for group in names for name in group]
    # an optimizer may keep something under another key than a parameter
    states = {order[key] if isinstance(key, int) else key: values for key, values in state["state"].items()}
    groups = [{**group, "params": list(own)} for group, own in zip(state["param_groups"], names, strict=True)]
    return {**state, "state": states, "param_groups": groups}


def numbered(kind: str, state: Mapping[str, Any], names: Names | None) -> tuple[dict[str, Any], list[int]]:
    """Return what `named` returned by the current numbers of parameters, and the saved group of each current group.

    Groups are told by the names in them, so that their order, and that of their parameters, may have changed; `names`:
    None keeps the saved order. Raises CheckpointError, with names, if a parameter is new, gone or in another group.
    """
    before = [group["params"] for group in state.get("param_groups", ())]
    if not before or not all(isinstance(name, str) for group in before for name in group):
        return dict(state), []  # of another kind, or by numbers, as ddp_rpc has them
    names = before if names is None else names
    groups = _match_groups(kind, before, names)
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    # an optimizer may keep something under another key than a parameter
    states = {numbers.get(key, key): values for key, values in state["state"].items()}
    settings = [
        {**state["param_groups"][group], "params": [numbers[name] for name in own]}
        for group, own in zip(groups, names, strict=True)
    ]
    return {**state, "state": states, "param_groups": settings}, groups


def _match_groups(kind: str, before: Names, names: Names) -> list[int]:
    if before == names:
        return list(range(len(before)))
    places = {frozenset(group): index for index, group in enumerate(before)}
    was = {name: index for group, index in places.items() for name in group}
    own = {name for group in names for name in group}
    if was.keys() != own:
        problem = differences(sorted(own - was.keys()), sorted(was.keys() - own))
        raise CheckpointError(f"The checkpoint's {kind} is of other parameters: {problem}.")
    for group in names:
        if frozenset(group) not in places:
            raise CheckpointError(
                f"The checkpoint's {kind} has other parameter groups: {_few('of', list(group[:5]))} one group is made, "
                f"in which were groups {sorted({was[name] for name in group})}. Return the groups from before in "
                f"configure_optimizers."
            )
    return [places[frozenset(group)] for group in names]


def differences(missing: list[str], unexpected: list[str], shapes: Sequence[str] = ()) -> str:
    """Describe how the names of a checkpoint differ from those of a run."""
    parts = (("it lacks", missing), ("it has unknown", unexpected), ("other shapes:", sorted(shapes)))
    return "; ".join(_few(words, names) for words, names in parts if names)


def _few(words: str, names: list[str]) -> str:
    return f"{words} {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")
