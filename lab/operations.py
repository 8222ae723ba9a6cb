"""Records a step's operations with source lines and hashes, to find the first one that differs between two runs."""

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..base.torch_private import DispatchMode, node_numbers
from ..callbacks.callback import MonitoringCallback
from ..trainer.data.shares import hashes_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..tasks.task import Task
    from ..trainer.trainer import Trainer

OPERATIONS = "operations.{}.jsonl"
"""File in a replay's directory with one line per operation of a rank."""
PACKAGE = Path(__file__).parents[1]
NOT_THE_USERS = (str(Path(torch.__file__).parent), str(PACKAGE / "lab"), str(PACKAGE / "base"))
KEEPS_GRADIENT = 2**64 - 1
"""Sequence number of every autograd node that accumulates a gradient into a parameter."""
COMPARED = ("phase", "operation", "inputs", "input_hash", "outputs", "output_hash")
"""Fields to compare. Source lines and module names may differ."""
SHOWN = 6


class Operations(MonitoringCallback):
    """Writes the module, source line, shapes and hashes of each operation in a step, one line per operation per rank.

    If the task is compiled, the recorded step runs eagerly, since a compiled graph does not dispatch torch operations.
    """

    def __init__(self, step: int) -> None:
        self.step, self.replica, self.batch, self.phase = step, 0, 0, ""
        self._open, self._records = ExitStack(), list[dict[str, Any]]()

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Start recording at the first batch of the step."""
        if trainer.global_step + 1 != self.step:
            return
        self.replica, self.batch = trainer.metrics.replica, batch_idx
        if not self.phase:
            if trainer.compile:
                self._open.enter_context(torch.compiler.set_stance("force_eager"))
            self._open.enter_context(_Recorder(self, task, self._records))
        self.phase = "forward"

    def on_before_optimizer_step(self, trainer: "Trainer", task: "Task", optimizer: "Optimizer") -> None:
        """Label subsequent operations as part of the update."""
        self.phase = self.phase and "update"

    def on_step_end(self, trainer: "Trainer", task: "Task") -> None:
        """Write the records of the step."""
        self._open.close()
        if self._records and trainer.run_dir is not None:
            lines = (json.dumps({"rank": trainer.global_rank, **record}) + "\n" for record in self._records)
            (trainer.run_dir / OPERATIONS.format(trainer.global_rank)).write_text("".join(lines), encoding="utf-8")
        self.phase, self._records = "", []

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Stop recording, even after an error."""
        self._open.close()


class _Recorder(DispatchMode):
    """Records each operation in forward and backward passes, at the level below autograd."""

    def __init__(self, step: Operations, task: "Task", records: list[dict[str, Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step, self.records, self.folder = step, records, f"{Path.cwd()}/"
        self.names = {id(module): name or "the task" for name, module in task.named_modules()}
        # module and source line of a forward operation, by the sequence number of its autograd node
        self.forwards: dict[int, tuple[str, str]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(operation)
        newest, running = node_numbers()
        # Not recorded: collectives finish later, in another thread, and reference counts determine whether tensors are
        # detached and whether gradients are moved or copied.
        if "c10d" in name or name == "aten.detach.default" or running == KEEPS_GRADIENT:
            return operation(*args, **kwargs)
        module, line = self._place()
        if running is None:
            self.forwards.setdefault(newest, (module, line))
        elif not line:
            module, line = self.forwards.get(running, (module, line))
        inputs, before = shapes_of([args, kwargs]), hash_of([args, kwargs])
        result = operation(*args, **kwargs)
        if "empty" in name:
            result.zero_()  # the contents of uninitialized memory differ between runs
        self.records.append(
            {"number": len(self.records), "replica": self.step.replica, "batch": self.step.batch}
            | {"phase": self.step.phase if running is None else "backward"}
            | {"module": module, "operation": name, "line": line, "inputs": inputs, "input_hash": before}
            # hash arguments as outputs too, since the operation may modify them in place
            | {"outputs": shapes_of(result), "output_hash": hash_of([result, args, kwargs])}
        )
        return result

    def _place(self) -> tuple[str, str]:
        """Return the innermost running module and line of user code, or empty strings outside user code."""
        module, line, frame = "", "", inspect.currentframe()
        while frame is not None and not (module and line):
            path = frame.f_code.co_filename
            if path.startswith(str(PACKAGE / "trainer")):
                break
            module = module or self.names.get(id(frame.f_locals.get("self")), "")
            line = line or (
                "" if path.startswith(NOT_THE_USERS) else f"{path.removeprefix(self.folder)}:{frame.f_lineno}"
            )
            frame = frame.f_back
        return module, line


def shapes_of(values: Any) -> list[str]:
    """Return the dtype and shape of each tensor in nested values. Numbers are returned unchanged."""
    if isinstance(values, torch.Tensor):
        return [f"{str(values.dtype).removeprefix('torch.')}{list(values.shape)}"]
    if isinstance(values, (bool, int, float)):
        return [repr(values)]
    items = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else ()
    return [text for item in items for text in shapes_of(item)]


def hash_of(values: Any) -> str:
    """Return a hash of all tensors and numbers in nested values."""
    return blake2b(repr(hashes_of(values)).encode(), digest_size=8).hexdigest()


def read_operations(folder: Path) -> str:
    """Return the records of all ranks in a replay's directory, one per line."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob(OPERATIONS.format("*"))))


def different_operation(texts: Sequence[str]) -> Iterator[str]:
    """Yield lines that describe the first operation that differs between two recordings of a step."""
    sides, differing = [_by_replica(text) for text in texts], list[list[Any]]()
    for group in sides[0] | sides[1]:
        pairs = zip_longest(*(side.get(group, ()) for side in sides))
        differing += [
            [*pair] for pair in pairs if len({repr([*map((side or {}).get, COMPARED)]) for side in pair}) > 1
        ][:1]
    if not differing:
        yield "No operation in this step differs."
        return
    first, second = min(differing, key=lambda pair: min(side["number"] for side in pair if side))
    at = first or second
    where = "" if at["phase"] == "update" else f" of replica {at['replica']}, batch {at['batch']:,}"
    yield f"The first operation that differs is in the {at['phase']}{where}, on rank {at['rank']}:"
    if first is None or second is None or first["operation"] != second["operation"]:
        yield "  From here on, the two runs perform different operations."
    elif first["input_hash"] == second["input_hash"]:
        yield "  Its inputs are equal but its output differs: this operation causes the difference."
    else:
        yield "  Its inputs differ, but all earlier operations match: a batch, a weight or another value differs."
    for key in ("module", "operation", "line", "inputs", "input_hash", "outputs", "output_hash"):
        values = ["nothing" if side is None else _shown(side[key]) for side in (first, second)]
        yield f"  {key.replace('_', ' '):<12}{' | '.join(dict.fromkeys(values))}"


def _by_replica(text: str) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Group the records of all ranks by replica, and the update records by rank."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in map(json.loads, text.splitlines()):
        key = ("update", record["rank"]) if record["phase"] == "update" else ("replica", record["replica"])
        groups.setdefault(key, []).append(record)
    return groups


def _shown(value: Any) -> str:
    if not isinstance(value, list):
        return str(value) or "outside of the task"
    return ", ".join(value[:SHOWN]) + (f" and {len(value) - SHOWN} more" if len(value) > SHOWN else "")
