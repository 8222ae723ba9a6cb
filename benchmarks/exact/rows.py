"""Rows of the table, chosen with a fixed seed: a few rows that contain each pair of values from two columns."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from typing import Any

from .cases import KINDS, OPTIONS

SEED = 7


@dataclass(frozen=True)
class Row:
    """One row of the table. The defaults are those of rows that show a refusal."""

    strategy: str = "ddp 2"
    reproducible: str = "order"
    precision: str = "32"
    kind: str = "MLP"
    option: str = "-"
    disturbance: str = "none"

    def values(self) -> frozenset[tuple[str, str]]:
        """Return the row's (column, value) pairs."""
        return frozenset(asdict(self).items())

    def __str__(self) -> str:
        return ", ".join(asdict(self).values())


COLUMNS: dict[str, tuple[str, ...]] = {
    "strategy": (
        "single",
        "ddp 2",
        "ddp 3",
        "ddp 4",
        "zero1",
        "fsdp",
        "data x shard",
        "tensor",
        "pipeline",
        "ddp_model_parallel",
        "data_parallel",
        "ddp_rpc",
    ),
    "reproducible": ("order", "bitwise"),
    "precision": ("32", "bf16-mixed", "bf16-true", "16-mixed", "64"),
    "kind": tuple(KINDS),
    "option": tuple(OPTIONS),
    "disturbance": ("none", "killed, resumed elsewhere", "killed, resumed under another strategy", "elastic"),
}


@dataclass(frozen=True)
class Layout:
    """A strategy for the Trainer and its number of processes (for ddp_model_parallel and data_parallel, devices)."""

    strategy: Any
    devices: int
    ranks: int
    """Number of processes that share the batches."""


def _mesh(**axes: int) -> dict[str, Any]:
    return {"name": "mesh", "shard_blocks": 40, **axes}


LAYOUTS = {
    "single": Layout("single", 1, 1),
    "ddp 2": Layout("ddp", 2, 2),
    "ddp 3": Layout("ddp", 3, 3),
    "ddp 4": Layout("ddp", 4, 4),
    "zero1": Layout("zero1", 2, 2),
    "fsdp": Layout({"name": "fsdp", "shard_blocks": 40}, 2, 2),
    "data x shard": Layout(_mesh(data=2, shard=2), 4, 4),
    "tensor": Layout(_mesh(tensor=2), 2, 1),
    "pipeline": Layout(_mesh(pipeline=2), 2, 1),
    "ddp_model_parallel": Layout({"name": "ddp_model_parallel", "devices_per_replica": 2}, 4, 2),
    "data_parallel": Layout("data_parallel", 2, 1),
    "ddp_rpc": Layout({"name": "ddp_rpc", "timeout": 60}, 2, 2),
    "shard x tensor": Layout(_mesh(shard=2, tensor=2), 4, 2),
}
"""Layout of each strategy. No row has the last one: killed runs of `tensor` resume under it."""
TENSOR_SHARDS = 4
"""Shards of each layer in rows with `tensor` under `bitwise`, which requires them."""
ELSEWHERE = {
    "single": LAYOUTS["single"],
    "ddp 2": LAYOUTS["ddp 3"],
    "ddp 3": LAYOUTS["ddp 4"],
    "ddp 4": LAYOUTS["ddp 2"],
    "zero1": Layout("zero1", 3, 3),
    "fsdp": Layout({"name": "fsdp", "shard_blocks": 40}, 3, 3),
    "data x shard": Layout(_mesh(data=2), 2, 2),
    "tensor": Layout(_mesh(tensor=4), 4, 1),
    "pipeline": Layout(_mesh(pipeline=3), 3, 1),
    "ddp_model_parallel": Layout({"name": "ddp_model_parallel", "devices_per_replica": 2}, 2, 1),
    "data_parallel": Layout("data_parallel", 3, 1),
    "ddp_rpc": Layout({"name": "ddp_rpc", "timeout": 60}, 3, 3),
}
"""Layouts on which killed runs resume under the same strategy."""
GOES_ON = ("fsdp", "zero1", "tensor", "ddp_model_parallel", "ddp 3", "pipeline", "data x shard", "single")
"""Strategies under which killed runs resume: the first after the row's own that supports the rest of the row."""

Refusal = Mapping[str, tuple[str, ...]]
_PROCESSES = ("ddp 2", "ddp 3", "ddp 4", "zero1", "ddp_model_parallel")
"""Strategies whose processes each have a copy of the weights and their own batches."""
_OTHERS = tuple(name for name in COLUMNS["strategy"] if name != "single")
REFUSED: tuple[Refusal, ...] = (
    {
        "strategy": ("data x shard", "pipeline", "data_parallel", "ddp_rpc"),
        "reproducible": ("bitwise",),
    },
    {
        "strategy": tuple(name for name in COLUMNS["strategy"] if not name.startswith("ddp ")),
        "disturbance": ("elastic",),
    },
    {"strategy": _OTHERS, "option": ("closure",)},
    {"strategy": ("single",), "option": ("closure",), "precision": ("16-mixed",)},
    {"strategy": ("single",), "option": ("closure",), "reproducible": ("bitwise",)},
    {
        "strategy": ("fsdp", "data x shard", "tensor", "pipeline", "data_parallel", "ddp_rpc"),
        "option": ("manual",),
    },
    {"strategy": _PROCESSES, "option": ("manual",), "disturbance": ("killed, resumed elsewhere",)},
    {"option": ("manual", "sync_batchnorm"), "disturbance": ("elastic",)},
    {"strategy": ("tensor", "pipeline", "data_parallel", "ddp_rpc"), "option": ("compile",)},
    {"strategy": ("pipeline", "ddp_rpc"), "option": ("EMA",)},
    {"strategy": ("fsdp", "data x shard", "ddp_rpc"), "option": ("sync_batchnorm",)},
    {"strategy": _PROCESSES, "option": ("sync_batchnorm",), "reproducible": ("bitwise",)},
    {"strategy": _PROCESSES, "option": ("sync_batchnorm",), "disturbance": ("killed, resumed elsewhere",)},
    {"strategy": ("fsdp", "data x shard", "tensor"), "kind": ("sparse embedding",)},
    {"reproducible": ("bitwise",), "kind": ("sparse embedding",)},
    {"option": ("clipping",), "kind": ("sparse embedding",)},
    {"disturbance": ("elastic",), "kind": ("sparse embedding",)},
    {"strategy": ("pipeline",), "option": ("two loaders",)},
    {"strategy": ("pipeline", "ddp_model_parallel"), "kind": ("tied weights",)},
    {"strategy": ("ddp_rpc",), "option": ("clipping", "nan=skip")},
    {"strategy": ("ddp_rpc",), "precision": ("bf16-true", "16-mixed", "64")},
    {"strategy": ("ddp_rpc",), "kind": ("padded batches",)},
)
"""Combinations that Legato refuses. One row for each shows the message; no other row contains them."""
NOT_TRIED: tuple[tuple[Refusal, str], ...] = (
    (
        {"strategy": ("pipeline", "data_parallel"), "kind": ("batch norm CNN",)},
        "batch norm sees only part of a batch at a time, and updates its statistics for each part",
    ),
    (
        {
            "strategy": ("zero1", "fsdp", "data x shard", "tensor", "pipeline", "ddp_rpc"),
            "option": ("noisy optimizer",),
        },
        "each shard of the weights [uses different random numbers](strategies.md#random-numbers-of-the-update)",
    ),
    (
        {"strategy": ("data_parallel",), "option": ("two loaders",)},
        "if the loaders' batches differ in length, each device gets part of the first batch and all of the others",
    ),
    (
        {"strategy": ("ddp_rpc",), "kind": ("tied weights",)},
        "a module on a server cannot share a weight with the task",
    ),
    (
        {"kind": ("LSTM",), "precision": ("16-mixed",)},
        "torch doesn't support float16 LSTMs on most CPUs",
    ),
    (
        {"kind": ("LSTM",), "option": ("compile",), "precision": ("bf16-true",)},
        "torch's compiler fails on the output of a bfloat16 LSTM (torch 2.13)",
    ),
    (
        {"option": ("closure",), "disturbance": ("killed, resumed under another strategy",)},
        "no other strategy supports closures",
    ),
)
"""Combinations that no row contains, and the reasons."""

LEFT_OUT: tuple[tuple[Refusal, str], ...] = (
    (
        {"kind": ("LSTM",), "option": ("compile",), "precision": ("bf16-mixed",)},
        "torch's compiler fails on the output of a bfloat16 LSTM (torch 2.13)",
    ),
    (
        {"option": ("manual", "sync_batchnorm"), "precision": ("16-mixed",)},
        "the reference joins the batches of all replicas, and their gradients overflow at a different loss scale",
    ),
    (
        {"option": ("manual",), "kind": ("batch norm CNN",), "reproducible": ("order",)},
        "the reference joins the batches of all replicas, so batch norm computes different statistics",
    ),
    (
        {
            "strategy": ("tensor",),
            "reproducible": ("bitwise",),
            "option": ("sync_batchnorm",),
            "disturbance": ("killed, resumed under another strategy",),
        },
        "no other strategy combines sharded layers with one process per replica",
    ),
)
"""More such combinations, removed after the rows are chosen, so that the other rows stay the same."""


def excludes(refusal: Refusal, values: Mapping[str, str]) -> bool:
    """Return True if the values, which may cover only some columns, contain a refused combination."""
    return all(values.get(column) in several for column, several in refusal.items())


def has_shards(row: Row) -> bool:
    """Return True if a row has TENSOR_SHARDS."""
    return row.strategy == "tensor" and row.reproducible == "bitwise"


def is_declared(row: Row) -> bool:
    """Return True if REFUSED contains a row."""
    return any(excludes(refusal, asdict(row)) for refusal in REFUSED)


def is_refused(values: Mapping[str, str]) -> bool:
    """Return True if Legato should refuse a row with these values, or if the table leaves it out."""
    return any(excludes(refusal, values) for refusal in (*REFUSED, *(left_out for left_out, _ in NOT_TRIED)))


def next_strategy(row: Row) -> str | None:
    """Return the strategy under which a row resumes if it changes strategies; None if no other strategy supports it."""
    begin = GOES_ON.index(row.strategy) + 1 if row.strategy in GOES_ON else len(row.strategy)
    candidates = [GOES_ON[(begin + place) % len(GOES_ON)] for place in range(len(GOES_ON))]
    if has_shards(row):
        return "shard x tensor"
    for name in candidates:
        if row.reproducible == "bitwise" and name == "tensor":
            continue  # a run cannot start to use shards when it resumes
        moved = replace(row, strategy=name, disturbance="none")
        if row.option in ("sync_batchnorm", "manual") and LAYOUTS[name].ranks != LAYOUTS[row.strategy].ranks:
            continue  # each replica needs a process
        if name != row.strategy and not is_refused(asdict(moved)):
            return name
    return None


def refused_rows() -> Iterator[Row]:
    """Yield a row for each combination that Legato should refuse."""
    seen = set[Row]()
    for refusal in REFUSED:
        for values in product(*refusal.values()):
            chosen = dict(zip(refusal, values, strict=True))
            row = Row(**chosen)
            if row not in seen:
                seen.add(row)
                yield row


def covering_rows() -> list[Row]:
    """Return rows that contain each pair of values from two columns that is not refused."""
    generator = random.Random(SEED)
    pairs = [
        ((first, this), (second, that))
        for first, second in combinations(COLUMNS, 2)
        for this, that in product(COLUMNS[first], COLUMNS[second])
        if not is_refused({first: this, second: that})
    ]
    generator.shuffle(pairs)
    missing, rows = dict.fromkeys(map(frozenset, pairs)), list[Row]()
    while missing:
        pair = next(iter(missing))
        filled = [row for _ in range(30) if (row := _fill(dict(pair), missing, generator))]
        if not filled:  # a third column excludes the pair from every row
            del missing[pair]
            continue
        best = max(filled, key=lambda row: _gain(row.values(), missing))
        for covered in map(frozenset, combinations(best.values(), 2)):
            missing.pop(covered, None)
        rows.append(best)
    return sorted(rows, key=lambda row: [COLUMNS[column].index(value) for column, value in asdict(row).items()])


def _gain(values: Any, missing: Mapping[frozenset[Any], None]) -> int:
    return sum(pair in missing for pair in map(frozenset, combinations(values, 2)))


def _fill(values: dict[str, str], missing: Mapping[frozenset[Any], None], generator: random.Random) -> Row | None:
    """Return a row with these values and greedily chosen values elsewhere; None if every choice is refused."""
    columns = [column for column in COLUMNS if column not in values]
    generator.shuffle(columns)
    for column in columns:
        allowed = [value for value in COLUMNS[column] if not is_refused(values | {column: value})]
        if not allowed:
            return None
        generator.shuffle(allowed)
        values[column] = max(
            allowed,
            key=lambda value, column=column: sum(
                frozenset([(column, value), held]) in missing for held in values.items()
            ),
        )
    row = Row(**values)
    return None if row.disturbance.endswith("another strategy") and next_strategy(row) is None else row


def table_rows() -> list[Row]:
    """Return all rows. The refused ones come last."""
    rows = covering_rows()
    rows += [row for row in refused_rows() if row not in rows]
    return [row for row in rows if not any(excludes(left_out, asdict(row)) for left_out, _ in LEFT_OUT)]
