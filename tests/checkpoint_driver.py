"""Forks processes that save checkpoints and die, or fail, at the k-th call into the file system, for every k.

Run by test_checkpoint_faults.py as a program of its own, without threads that would not survive its forks. Each line
of its input is a JSON list, MODE SCENARIO FOLDER, and answered by a JSON line: the calls that an undisturbed run makes,
or what was found wrong after each fault; null where the answer is a traceback.
"""

import errno
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from several_ranks import ThreadRank, on_ranks

from legato.base.errors import CheckpointError
from legato.trainer.checkpoints import background, commit, find, reading, storage
from legato.trainer.checkpoints.shards import ShardBlock

CALLS = ("write", "fsync", "rename", "unlink", "mkdir", "rmdir", "open")


def example(step: int, flavour: int = 0) -> dict[str, Any]:
    return {
        "state_dict": {name: torch.full((5, step + 1), float(flavour)) for name in ("a", "b")},
        "moments": [torch.full((7,), float(step)), torch.arange(3)],
        "at": [step, flavour],
    }


def step(number: int) -> str:
    return find.directory_name(number)


def save(path: Path, flavour: int = 0) -> None:
    commit.write(path, example(int(path.name[5:]), flavour))


def save_at_next_start(path: Path, flavour: int = 0) -> None:
    """Save as a run does that has locked its folder, and cleaned it up."""
    storage.folder_at(path.parent).sweep()
    save(path, flavour)


def save_behind(path: Path, flavour: int = 0) -> None:
    writer = background.Writer()
    writer.save(path, example(int(path.name[5:]), flavour))
    writer.wait()


def save_in_parts(path: Path, flavour: int = 0, behind: bool = False) -> None:
    """Save with two ranks, each of which has one half of a tensor."""
    contents = example(int(path.name[5:]), flavour)
    tensor = contents["state_dict"]["a"]

    def work(rank: ThreadRank) -> None:
        half = ShardBlock(tensor[2 * rank.rank : 2 + 3 * rank.rank], tuple(tensor.shape), (2 * rank.rank, 0))
        mine = {**contents, "state_dict": {"a": half, "b": contents["state_dict"]["b"]}}
        if not behind:
            commit.write(path, mine, ranks=rank)
            return
        writer = background.Writer()
        writer.save(path, mine, ranks=rank)
        writer.wait()

    on_ranks(2, work)


def previous(root: Path) -> None:
    save(root / step(1))
    save(root / step(2))


def interrupted(root: Path) -> None:
    """Leave what a process leaves that dies between the two renames of a replacement, and during a removal."""
    previous(root)
    (root / step(2)).rename(root / f".{step(2)}.replaced")
    shutil.copytree(root / step(1), root / f".{step(2)}.partial")
    shutil.copytree(root / step(1), root / f".{step(3)}.partial")


# name: (what stands there before, what is done, the step that it touches)
SCENARIOS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], int]] = {
    "first": (lambda root: None, lambda root: save(root / step(1)), 1),
    "next": (previous, lambda root: save(root / step(3)), 3),
    "overwrite": (previous, lambda root: save(root / step(2), flavour=1), 2),
    "remove newest": (previous, lambda root: storage.remove(root / step(2)), 2),
    "remove oldest": (previous, lambda root: storage.remove(root / step(1)), 1),
    "first, background": (lambda root: None, lambda root: save_behind(root / step(1)), 1),
    "next, background": (previous, lambda root: save_behind(root / step(3)), 3),
    "overwrite, background": (previous, lambda root: save_behind(root / step(2), flavour=1), 2),
    "next, in parts": (previous, lambda root: save_in_parts(root / step(3)), 3),
    "overwrite, in parts": (previous, lambda root: save_in_parts(root / step(2), flavour=1), 2),
    "next, in parts, background": (previous, lambda root: save_in_parts(root / step(3), behind=True), 3),
    "sweep": (interrupted, lambda root: storage.folder_at(root).sweep(), 2),
    "save after a death": (interrupted, lambda root: save_at_next_start(root / step(4)), 4),
    "overwrite after a death": (interrupted, lambda root: save(root / step(2), flavour=1), 2),
}


def watch(calls: tuple[str, ...], act: Callable[[str, tuple[Any, ...]], None]) -> Callable[[], None]:
    """Have `act(call, arguments)` run before each of these calls into the file system of this process.

    Returns what ends it.
    """
    real = {name: getattr(os, name) for name in calls}

    def watched(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            act(name, arguments)
            return real[name](*arguments, **named)

        return call

    vars(os).update({name: watched(name) for name in calls})
    return lambda: vars(os).update(real)


class Fault:
    """Kills this process, or fails a call, at the k-th call."""

    def __init__(self, mode: str, number: int) -> None:
        self.mode = mode
        self.left = number
        self.write = os.write
        self.lock = threading.Lock()

    def __call__(self, name: str, arguments: tuple[Any, ...]) -> None:
        with self.lock:
            self.left -= 1
            if self.left != 0:
                return
        if self.mode == "fail":
            code = errno.EIO if name == "fsync" else errno.ENOSPC
            raise OSError(code, os.strerror(code))
        if self.mode == "torn":
            self.write(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)


NOT_REACHED, TOLERATED, REFUSED, CRASHED = 0, 4, 3, 70


def suffered(fault: Fault, work: Callable[[], None]) -> int:
    """Do something with a fault; return how it went."""
    restore = watch(("write",) if fault.mode == "torn" else CALLS, fault)
    try:
        work()
    except CheckpointError:
        return REFUSED
    except BaseException:
        traceback.print_exc()
        return CRASHED
    finally:
        restore()
    return NOT_REACHED if fault.left > 0 else TOLERATED


def in_child(fault: Fault, work: Callable[[], None]) -> int:
    """Do something in a forked process with a fault; return its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        os._exit(suffered(fault, work))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def rests(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(".")] if root.is_dir() else []


def contents_of(directory: Path) -> list[int]:
    """Return step and flavour of a checkpoint, after a look at its tensors; the same bytes are read once."""
    key = frozenset(bytes_of(directory).items())
    if key not in READ:
        READ[key] = read(directory)
    return READ[key]


READ: dict[frozenset[tuple[str, bytes]], list[int]] = {}


def read(directory: Path) -> list[int]:
    back = reading.read_checkpoint(directory)
    number, flavour = back["at"]
    wanted = example(number, flavour)
    assert all(torch.equal(back["state_dict"][name], wanted["state_dict"][name]) for name in ("a", "b"))
    assert all(map(torch.equal, back["moments"], wanted["moments"]))
    return [number, flavour]


def newest(root: Path) -> list[int] | None:
    checkpoint = find.newest_complete(root)
    return contents_of(checkpoint) if checkpoint else None


def check(root: Path, scenario: str, before: dict[str, dict[str, bytes]], code: int) -> None:
    """Raise AssertionError where a fault cost more than what was under way."""
    touched = SCENARIOS[scenario][2]
    for name, kept in before.items():
        assert name == step(touched) or bytes_of(root / name) == kept, f"{name} has changed"
    leftovers = [name for name in rests(root) if step(touched) in name]
    assert code != REFUSED or "remove" in scenario or scenario == "sweep" or not leftovers, (
        f"a failed save left {leftovers}"
    )
    standing = newest(root)
    storage.folder_at(root).sweep()
    assert not rests(root), f"sweep left {rests(root)}"
    contents = {path: contents_of(path) for path in find.checkpoints_in(root)}
    path = find.newest_complete(root)
    assert (contents[path] if path else None) == standing, "sweep changed which one is the newest"
    for number in () if "first" in scenario else (1, 2):
        if "remove" not in scenario or number != touched:
            assert contents[root / step(number)][0] == number
    check_next_save(root, standing)


def check_next_save(root: Path, kept: list[int] | None) -> None:
    """Raise AssertionError where the save of the next start fails, or leaves a rest of the fault behind."""
    save_at_next_start(root / step(9))
    assert not rests(root), f"the next save left {rests(root)}"
    assert contents_of(root / step(9)) == [9, 0]
    assert kept is None or contents_of(root / step(kept[0])) == kept


def inject(mode: str, scenario: str, folder: Path) -> dict[str, Any]:
    prepare, work, _ = SCENARIOS[scenario]
    template, root = folder / "template", folder / "run"
    prepare(template)
    before = {path.name: bytes_of(path) for path in find.checkpoints_in(template)}
    wrong: list[str] = []
    for number in range(1, 10_000):
        shutil.rmtree(root, ignore_errors=True)
        if template.exists():
            shutil.copytree(template, root)
        fault = Fault(mode, number)
        code = (suffered if mode == "fail" else in_child)(fault, lambda: work(root))
        if code == NOT_REACHED:
            return {"faults": number - 1, "wrong": wrong}
        try:
            assert code in ((REFUSED, TOLERATED) if mode == "fail" else (-signal.SIGKILL,)), f"exit code {code}"
            check(root, scenario, before, code)
        except (AssertionError, CheckpointError, OSError, KeyError) as error:
            wrong.append(f"{mode}, {scenario}, call {number}: {error!r}")
    raise AssertionError("the scenario has no end")


def record(scenario: str, folder: Path) -> list[list[str]]:
    """Return the calls of one undisturbed run, as [call, path, path or ""] with paths below the folder."""
    prepare, work, _ = SCENARIOS[scenario]
    prepare(folder)
    events: list[list[str]] = []
    paths: dict[int, str] = {}
    really_open = os.open

    def opening(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        descriptor = really_open(path, flags, *arguments, **named)
        paths[descriptor] = os.path.relpath(path, folder)
        if flags & os.O_CREAT:
            events.append(["create", paths[descriptor], ""])
        return descriptor

    def act(name: str, arguments: tuple[Any, ...]) -> None:
        named = [paths[place] if isinstance(place, int) else os.path.relpath(place, folder) for place in arguments[:1]]
        target = os.path.relpath(arguments[1], folder) if name == "rename" else ""
        events.append([name, *named, target])

    watch(tuple(name for name in CALLS if name != "open"), act)
    os.open = opening
    work(folder)
    return events


def answer(mode: str, scenario: str, folder: str) -> None:
    result = record(scenario, Path(folder)) if mode == "record" else inject(mode, scenario, Path(folder))
    print(json.dumps(result), flush=True)


def serve() -> None:
    """Answer each line in a process of its own, which may change what it likes."""
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            try:
                answer(*json.loads(line))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if os.waitpid(child, 0)[1] != 0:
            print("null", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    vars(os)["fsync"] = os.fstat  # who is killed loses nothing that it has written: what counts is when it is called
    serve()
