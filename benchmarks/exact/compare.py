"""Runs a row and its reference, and compares their results."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from legato.base.errors import ConfigError, DataError, TaskError, WorkerError
from legato.trainer.checkpoints import reading
from legato.trainer.processes.launch import run_workers

from .cases import Case, fit
from .rows import ELSEWHERE, LAYOUTS, TENSOR_SHARDS, Layout, Row, has_shards, is_declared, next_strategy

UNITS = {"32": (torch.float32, 512), "64": (torch.float64, 512), "16-mixed": (torch.float16, 16)}
UNITS |= dict.fromkeys(("bf16-mixed", "bf16-true"), (torch.bfloat16, 16))
BOUNDS = {precision: units * torch.finfo(kind).eps for precision, (kind, units) in UNITS.items()}
"""Largest relative difference that counts as rounding, after growing for six steps, in units in the last place of the
dtype of matrix products. 16-bit dtypes have lower bounds, since 512 units would be as large as the values."""


@dataclass(frozen=True)
class Result:
    """Verdict on a row: "exact", "close" or "refused", or "wrong", "undeclared" or "failed", which fail the table."""

    verdict: str
    text: str = ""
    difference: float = 0.0
    seconds: float = 0.0


REASONS = {
    "data_parallel": "partial sums over parts of a batch",
    "tensor": "partial sums over shards of a layer",
    "pipeline": "partial sums over micro-batches",
    "ddp_rpc": "sums on a server",
}
"""Reasons why low-order bits under `order` may differ from those of one process, by strategy."""


def judge(row: Row) -> Result:
    """Run a row and compare it with its reference."""
    folder = Path(tempfile.mkdtemp(prefix="legato-exact-"))
    try:
        tested = run_tested(row, folder / "tested")
        differences = list(compare(contents_of(tested), contents_of(run_reference(row, folder / "reference"))))
    except (ConfigError, TaskError, DataError) as error:
        return Result("refused" if is_declared(row) else "undeclared", shorten(str(error)))
    except Exception as error:
        return Result("failed", f"{type(error).__name__}: {shorten(str(error), 300)}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if is_declared(row):
        return Result("undeclared", "REFUSED in rows.py has this row, but it runs")
    largest, name = max(differences, default=(0.0, ""))
    if not differences:
        return Result("exact")
    reason = reason_of(row)
    if reason is None or largest > BOUNDS[row.precision]:
        return Result("wrong", f"{name} differs by {largest:.1e}", largest)
    return Result("close", reason, largest)


def reason_of(row: Row) -> str | None:
    """Return the reason why a row's low-order bits may differ from those of its reference; None if they must not."""
    if row.reproducible == "bitwise":
        return None
    if is_joined(row):
        return "the reference joins the batches of all replicas"
    names = {row.strategy}
    if row.disturbance == "killed, resumed under another strategy":
        names.add(next_strategy(row) or "")
    reasons = [REASONS[name] for name in REASONS if name in names]
    return reasons[0] if reasons else None if names == {"single"} else "sums across ranks"


def is_joined(row: Row) -> bool:
    """Return True if one process cannot run the row's replicas in turn, so the reference must join their batches."""
    is_weighted = row.kind == "padded batches"  # manual optimization has no weights
    manual = row.option == "manual" and row.reproducible == "order" and not is_weighted
    return row.option == "sync_batchnorm" or manual


def replicas_of(row: Row) -> int:
    """Return the number of replicas of a row: one per process if each needs a process, otherwise 4."""
    if row.option == "closure":
        return 1
    return LAYOUTS[row.strategy].ranks if row.option in ("sync_batchnorm", "manual") else 4


def case_of(row: Row) -> Case:
    """Return the model, data and option for both runs of a row."""
    strategies = {row.strategy, next_strategy(row) if row.disturbance.endswith("another strategy") else ""}
    # dropout masks depend on the layout here, see docs/one-run.md
    is_plain = row.option in ("sync_batchnorm", "manual") or bool(strategies & {"tensor", "pipeline", "data_parallel"})
    return Case(row.kind, row.option, is_plain, row.strategy == "ddp_rpc")


def run_tested(row: Row, root: Path) -> Path:
    """Train a row, including its break, and return the run directory."""
    layout, case, replicas = LAYOUTS[row.strategy], case_of(row), replicas_of(row)
    options = {"reproducible": row.reproducible, "precision": row.precision, "replicas": replicas}
    workers = 2 if row.option == "workers" else 0
    start = partial(fit, case, root, workers=workers)
    if row.disturbance == "none":
        return start(options | _place(row, layout))
    if row.disturbance == "elastic":
        named = layout.strategy if isinstance(layout.strategy, dict) else {"name": layout.strategy}
        place = _place(row, layout) | {"strategy": {**named, "elastic": True}}
        run_dir = start(options | place | {"max_restarts": 1}, kill=True)
        assert (root / "killed").exists(), "no process was killed"
        return run_dir
    place = _place(row, layout)
    try:
        if layout.devices == 1 or layout.strategy == "data_parallel":  # in a worker, since the process is killed
            run_workers(partial(start, options | place, kill=True), 1, threads=1)
        else:
            start(options | place, kill=True)
    except WorkerError:
        pass
    else:
        raise AssertionError("no process was killed")
    after = ELSEWHERE[row.strategy]
    if row.disturbance == "killed, resumed under another strategy":
        after = LAYOUTS[next_strategy(row) or ""]
    return start(options | _place(row, after), resume=True)


def _place(row: Row, layout: Layout) -> dict[str, Any]:
    """Return the Trainer arguments for a row on a layout."""
    shards = {**layout.strategy, "tensor_shards": TENSOR_SHARDS} if has_shards(row) else layout.strategy
    return {"strategy": shards, "devices": layout.devices}


def run_reference(row: Row, root: Path) -> Path:
    """Train the same case on one process without a break, and return the run directory."""
    alone = Layout({"name": "mesh"}, 1, 1) if has_shards(row) else LAYOUTS["single"]
    replicas, size, place = replicas_of(row), 2, _place(row, alone)
    if is_joined(row):
        replicas, size = 1, 2 * replicas
    elif row.option == "manual":  # each replica needs a process
        place = _place(row, LAYOUTS[row.strategy])
    options = {"reproducible": row.reproducible, "precision": row.precision, "replicas": replicas}
    return fit(case_of(row), root, options | place, batch_size=size)


Contents = dict[str, torch.Tensor]


def contents_of(run_dir: Path) -> Contents:
    """Return the weights, optimizer states, averages and logged values of a finished run, keyed by name."""
    last = max((run_dir / "checkpoints").glob("step-*"))
    saved = reading.read_checkpoint(last)
    kept = {key: saved[key] for key in ("state_dict", "optimizer_states", "callbacks") if key in saved}
    for state in kept["optimizer_states"]:
        # keyed by position, since some strategies name parameters and others number them
        names = [name for group in state["param_groups"] for name in group["params"]]
        state["state"] = {names.index(name): value for name, value in state["state"].items()}
    contents = dict(_tensors(kept, ()))
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        point = json.loads(line)
        contents |= {
            f"logged {name} of step {point['step']}": torch.tensor(value, dtype=torch.float64)
            for name, value in point.items()
            if name.split("/")[0] not in ("time", "throughput", "step") and isinstance(value, (int, float))
        }
    return contents


def _tensors(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield ".".join(path), value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(item, (*path, str(key)))


def compare(ours: Contents, theirs: Contents) -> Iterator[tuple[float, str]]:
    """Yield the relative difference and the name of each tensor whose bits differ."""
    for name in sorted(ours.keys() ^ theirs.keys()):
        yield float("inf"), f"{name} ({'only in the reference' if name in theirs else 'not in the reference'})"
    shared = sorted(ours.keys() & theirs.keys())
    # values that are pure rounding error are compared with the size of the others
    scales = dict[str, float]()
    for name in shared:
        if theirs[name].numel():
            kind = _kind(name)
            scales[kind] = max(scales.get(kind, 0.0), float(theirs[name].double().abs().nan_to_num().max()))
    for name in shared:
        result, reference = ours[name], theirs[name]
        layouts = [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (result, reference)]
        if layouts[0] != layouts[1]:
            yield float("inf"), f"{name} ({', '.join(layouts)})"
        elif not torch.equal(_bytes(result), _bytes(reference)):
            size = max(float(reference.double().abs().max()), 1e-2 * scales[_kind(name)], 1e-300)
            difference = float((result.double() - reference.double()).abs().max()) / size
            yield (float("inf") if difference != difference else difference), name


def _kind(name: str) -> str:
    return name.split(" of step ")[0] if name.startswith("logged") else f"{name.split('.')[0]}.{name.split('.')[-1]}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def shorten(text: str, length: int = 160) -> str:
    """Return the first sentences of a message, up to `length` characters."""
    text = re.sub(r"\s+", " ", text.replace("|", "\\|")).strip()
    if len(text) <= length:
        return text
    cut = text[:length]
    end = cut.rfind(". ")
    return cut[: end + 1] if end > 40 else cut.rsplit(" ", 1)[0] + " ..."
