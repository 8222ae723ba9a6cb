"""Many cases in the same processes, which start once: each is reported by itself, those after a failure too."""

import faulthandler
import hashlib
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch.distributed as dist

from legato.base.place import find_place
from legato.trainer.processes.launch import run_workers

SECONDS = 120
"""After which a case counts as hanging: its processes write down where they are, and end."""
Case = Callable[[], Any]


class Results(dict[Any, Any]):
    """What each case returned, by name; to look at a case that failed raises what it raised."""

    def __getitem__(self, name: Any) -> Any:
        result = super().__getitem__(name)
        if isinstance(result, BaseException):
            raise result
        return result


def run_cases(
    cases: Mapping[Any, Case], processes: int, folder: Path, seconds: float = SECONDS, **options: Any
) -> Results:
    """Call each of `cases` in all of so many processes, one after the other; return what rank 0's returned.

    Where one fails or hangs, its processes end, and the rest goes on in new ones. `folder` is for results on the way,
    `options` are those of `run_workers`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results, left = Results(), dict(cases)
    while left:
        error: BaseException | None = None
        try:
            run_workers(partial(_work, left, folder, seconds), processes, **options)
        except Exception as raised:
            error = raised
        for name in [name for name in left if _file(folder, name).exists()]:
            results[name] = pickle.loads(_file(folder, name).read_bytes())
            del left[name]
        if error is not None and not left:  # they failed on the way out
            raise error
        if error is not None:  # cases are called in order, so it is the first that has no result
            name = next(iter(left))
            results[name] = error
            del left[name]
    return results


def _work(cases: Mapping[Any, Case], folder: Path, seconds: float) -> None:
    place = find_place()
    assert place is not None
    for name, case in cases.items():
        faulthandler.dump_traceback_later(seconds, exit=True)
        value = case()
        if dist.is_initialized():
            dist.barrier()  # a case is done when it is on all ranks
        if place.rank == 0:
            temporary = _file(folder, name).with_suffix(".part")
            temporary.write_bytes(cloudpickle.dumps(value))
            temporary.replace(_file(folder, name))
    faulthandler.cancel_dump_traceback_later()


def _file(folder: Path, name: Any) -> Path:
    return folder / f"{hashlib.sha256(repr(name).encode()).hexdigest()}.case"
