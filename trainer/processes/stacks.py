"""Summarizes a stack as the user's line of code, or as the collective where its thread is waiting for other ranks."""

import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import sysconfig
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO

DUMP = signal.SIGUSR2
"""Signal that makes a process dump its stacks."""

_PACKAGE_FOLDER = Path(__file__).parents[2]
_OURS = tuple(f"{_PACKAGE_FOLDER / room}{os.sep}" for room in ("trainer", "callbacks", "tasks"))
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LINE = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_SECONDS_FOR_A_DUMP = 0.2
_dump_file: IO[str] | None = None


@dataclass(frozen=True)
class Frame:
    """A line in a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        path = Path(self.file)
        name = path.relative_to(_PACKAGE_FOLDER) if self.file.startswith(_OURS) else path.name
        return f"{name}:{self.line} ({self.function})"

    @property
    def is_users(self) -> bool:
        """True if the frame belongs neither to Legato nor to a library."""
        return not self.file.startswith((*_OURS, *_LIBRARIES, "<"))

    def is_in(self, path: str) -> bool:
        """Return whether the path of the frame's file contains the given path."""
        return path in self.file.replace(os.sep, "/")

    @property
    def is_backward(self) -> bool:
        """True if the frame runs torch's autograd engine, whether torch.autograd or the strategy called it."""
        in_strategy = self.function == "backward" and self.is_in("/trainer/strategies/strategy")
        return in_strategy or self.is_in("torch/autograd/")

    @property
    def is_compiler(self) -> bool:
        """True if the frame runs torch's compiler, rather than a compiled function."""
        in_inductor = self.is_in("torch/_inductor/compile_fx") and "compile" in self.function
        return in_inductor or self.is_in("torch/_dynamo/convert_frame")


def stack_of(thread: int) -> list[Frame]:
    """Return the stack of a thread in this process, innermost frame first."""
    stack, frame = [], sys._current_frames().get(thread)  # noqa: SLF001 (documented)
    while frame is not None:
        stack.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return stack


def stack_of_error(error: BaseException) -> list[Frame]:
    """Return the stack at the point where an error was raised, innermost frame first."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return [Frame(code.co_filename, line, code.co_name) for code, line in reversed(frames)]


def describe_stack(stack: list[Frame], alone: bool) -> tuple[str, bool]:
    """Return a description of what a stack's thread is doing, and whether the thread is waiting for other ranks.

    `alone` is true if there are no other ranks.
    """
    compiler = [index for index, frame in enumerate(stack) if frame.is_compiler]
    if compiler:  # start at its outermost frame, because generated code looks like the user's
        users = next((frame for frame in stack[compiler[-1] :] if frame.is_users), None)
        return f"is compiling for torch.compile{'' if users is None else f', called in {users}'}", False
    users = next((frame for frame in stack if frame.is_users), None)
    called = f", called in {users}" if users is not None else ""
    collective = collective_of(stack)
    if collective is not None:
        return f"is waiting in {collective}{called}", True
    # skip files such as <frozen importlib>
    innermost = next((frame for frame in stack if not frame.file.startswith("<")), None)
    if innermost is None:
        return "has no stack", False
    if innermost.is_in("/trainer/processes/rendezvous"):
        return f"is waiting for the other processes to join it ({innermost})", True
    if any(frame.function == "_wait_for_all" and frame.is_in("/trainer/processes/hang") for frame in stack[:3]):
        return "is waiting for the other ranks to leave the epoch", True
    if innermost.is_backward:
        return ("is in backward" if alone else "is waiting in backward for the other ranks' gradients"), not alone
    if not alone and innermost.is_in("/trainer/strategies/"):
        return f"is waiting in {innermost} for the other ranks", True
    if any(frame.is_in("torch/utils/data/dataloader") for frame in stack) and not _is_outside_loader(stack):
        return "is waiting for a loader's worker", False
    return f"is in {users if users is not None else innermost}", False


def collective_of(stack: list[Frame]) -> str | None:
    """Return the collective that a stack's thread is waiting in, or None if it is not waiting in one."""
    name = None
    for frame in stack:
        if frame.is_in("torch/distributed/distributed_c10d"):
            name = frame.function  # the outermost such frame is the call; the others are torch's helpers
        elif not frame.is_in("torch/distributed/"):
            break
    return name


def _is_outside_loader(stack: list[Frame]) -> bool:
    """Return whether the loader on the stack has called the user's code."""
    for frame in stack:
        if frame.is_in("torch/utils/data/dataloader"):
            return False
        if frame.is_users:
            return True
    return False


def dump_stacks_to(file: IO[str] | None) -> None:
    """Make loader workers forked from now on write their stacks to `file` when they receive DUMP."""
    global _dump_file
    _dump_file = file


def answer_dumps() -> None:
    """Write this loader worker's stacks to the dump file when it receives DUMP."""
    if _dump_file is not None:
        faulthandler.register(DUMP, _dump_file)


def worker_stacks(dump: IO[str]) -> list[str]:
    """Return the stacks of this process's loader workers, which write them to `dump` on request."""
    stacks = []
    for child in multiprocessing.active_children():
        # the signal would kill the user's own children, which have no handler
        if child.pid is not None and _answers(child.pid):
            # all forked workers inherit the same open file, and share its offset
            os.ftruncate(dump.fileno(), 0)
            os.lseek(dump.fileno(), 0, os.SEEK_SET)
            os.kill(child.pid, DUMP)
            time.sleep(_SECONDS_FOR_A_DUMP)  # a dump takes milliseconds, unless the worker is stopped
            stacks.append(f"Loader worker {child.pid}\n{os.pread(dump.fileno(), 1 << 20, 0).decode(errors='replace')}")
    return stacks


def _answers(process: int) -> bool:
    """Return whether a process has a handler for the DUMP signal, which would otherwise kill it."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (DUMP - 1) & 1)


def users_frame(dumps: list[str]) -> Frame | None:
    """Return the innermost frame of the user's code in the stacks of loader workers."""
    for section in "\n\n".join(dumps).split("\n\n"):
        frames = [Frame(file, int(line), function) for file, line, function in _LINE.findall(section)]
        users = [frame for frame in frames if frame.is_users]
        if users and any(frame.is_in("torch/utils/data/_utils/worker") for frame in frames):
            return users[0]
    return None
