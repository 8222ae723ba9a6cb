"""Replays of a range of steps: cut at checkpoints into pieces that run side by side, and put together again."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import sleep
from typing import Any

from ..base.errors import LegatoError
from ..base.messages import STDOUT
from ..base.run_names import EVENT_FILES
from ..loggers.json_lines import POINTS_FILE
from .history import RunHistory
from .replay import (
    Replayed,
    conclude,
    differs_after,
    make_directory,
    new_directory,
    replay_config,
    replay_steps,
    sameness,
)
from .watchers import STEPS_FILE, StepReport, StopAfterStep

POLL_SECONDS = 0.05


def replay_pieces(
    history: RunHistory,
    first: int,
    last: int,
    into: Path | None,
    jobs: int | None,
    devices: Sequence[int],
    overrides: Sequence[str],
) -> None:
    """Replay the steps `first` to `last` and write all points to one directory, with its own name in TensorBoard.

    into: that directory; then nothing is printed or compared, as this is a piece itself. jobs: pieces at a time; by
    default one for each of the `devices`, or one.

    Raises LegatoError where a piece failed, or where the replay is not what the run did.
    """
    directory = new_directory(history.directory) if into is None else make_directory(into)
    jobs = jobs or max(1, len(devices))
    pieces = cut_at_checkpoints(history, first, last, jobs)
    if len(pieces) == 1:
        watchers = [StepReport(first, last), StopAfterStep(last)]
        replayed = replay_steps(history, first, last, directory, watchers, overrides)
        if into:
            return  # a piece of a replay, which compares all of them
    else:
        parts = [directory / f"piece-{number}" for number in range(len(pieces))]
        run_side_by_side(history, pieces, parts, jobs, devices, overrides)
        join_parts(directory, parts)
        source, config = history.before(first), replay_config(history, first, overrides, False)
        begun = source.step + 1 if source else 1
        replayed = Replayed(history, source, begun, last, directory, *sameness(history, (first, last), config))
    what = f"{len(pieces)} pieces, {min(jobs, len(pieces))} at a time" if len(pieces) > 1 else "one piece"
    print(f"Replayed steps {replayed.first:,} to {replayed.last:,} of {history.directory} in {what}", file=STDOUT)
    print(f"Replay      {directory}", file=STDOUT)
    print(f"Look at it  tensorboard --logdir {history.directory.parent}", file=STDOUT)
    conclude(replayed.comparison())


def cut_at_checkpoints(history: RunHistory, first: int, last: int, jobs: int) -> list[tuple[int, int]]:
    """Return the pieces (first and last step): about equally long ones, one for each job, cut at checkpoints.

    There are more where the run was resumed with another config.
    """
    inside = [one for one in history.checkpoints if first <= one.step < last]
    source = history.before(first)
    begin = source.step if source else 0
    forced = {one.step for one in inside if differs_after(history, one.step)}
    wanted = [begin + (last - begin) * number / jobs for number in range(1, jobs)]
    nearest = {min(inside, key=lambda one: abs(one.step - place)).step for place in wanted} if inside else set[int]()
    ends = [*sorted(forced | nearest), last]
    begins = [first, *(end + 1 for end in ends[:-1])]
    return list(zip(begins, ends, strict=True))


def run_side_by_side(
    history: RunHistory,
    pieces: Sequence[tuple[int, int]],
    parts: Sequence[Path],
    jobs: int,
    devices: Sequence[int],
    overrides: Sequence[str],
) -> None:
    """Replay each piece in a process of its own, `jobs` at a time; raise LegatoError with the first one's message."""
    waiting = list(zip(pieces, parts, strict=True))
    running: dict[int, tuple[subprocess.Popen[str], Path]] = {}
    try:
        while waiting or running:
            for place in range(jobs):
                if place not in running and waiting:
                    piece, part = waiting.pop(0)
                    device = [f"trainer.devices=[{devices[place % len(devices)]}]"] if devices else []
                    running[place] = start_piece(history, piece, part, [*overrides, *device]), part
            for place, (process, part) in list(running.items()):
                if process.poll() is not None:
                    del running[place]
                    require_done(process, part)
            sleep(POLL_SECONDS)
    finally:
        for process, _ in running.values():
            process.kill()
            process.wait()


def start_piece(
    history: RunHistory, piece: tuple[int, int], part: Path, overrides: Sequence[str]
) -> "subprocess.Popen[str]":
    """Start the replay of a piece."""
    part.mkdir()
    command = [sys.executable, "-m", "legato", "replay", str(history.directory), f"steps={piece[0]}..{piece[1]}"]
    with part.with_suffix(".txt").open("w") as output:
        return subprocess.Popen([*command, f"into={part}", *overrides], stdout=output, stderr=output, text=True)


def require_done(process: "subprocess.Popen[str]", part: Path) -> None:
    """Raise LegatoError if a piece has failed."""
    if process.returncode:
        said = part.with_suffix(".txt").read_text().strip().splitlines()
        raise LegatoError(f"The piece in {part} ended with {process.returncode}: {' '.join(said[-3:])}")


def join_parts(directory: Path, parts: Sequence[Path]) -> None:
    """Put the points of all pieces, in their order, into the directory of the replay; of a step those of one piece."""
    for name in (POINTS_FILE, STEPS_FILE):
        lines = dict(line for part in parts for line in numbered(part / name))
        (directory / name).write_text("".join(f"{json.dumps(lines[step])}\n" for step in sorted(lines)))
    for number, part in enumerate(parts):
        for path in sorted(part.glob(f"{EVENT_FILES}*")):
            rest = path.name.removeprefix(EVENT_FILES).partition(".")[2]
            # TensorBoard reads files in the order of their names, which begin with a time in seconds
            os.replace(path, directory / f"{EVENT_FILES}{number:010d}.{rest}")


def numbered(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (step, record) of the lines of a file, if it is there."""
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        yield record["step"], record
