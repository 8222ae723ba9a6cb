"""Draws docs/one-run.svg: the loss of a run on 1, 2 and 4 processes, and of a run killed and resized three times.

Run: python -m benchmarks.one_run_picture [--out docs/one-run.svg]

The task is Digits with `reproducible: bitwise` and eight replicas. The program fails unless all runs have bitwise
identical logged values and final weights. The lower panel shows how far the same training run drifts from the run on
one process under `reproducible: order`, where only the order of additions differs.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import legato as lg
from legato.base.errors import WorkerError
from legato.loggers import JSONLinesLogger
from legato.tasks.digits import Digits, DigitsData

REPLICAS, EPOCHS, SAVE_EVERY = 8, 10, 7
BREAKS = [(4, 20), (2, 38), (3, 54), (1, None)]
"""Number of processes in each part of the interrupted run, and the step at which one of them is killed."""


class Killer(lg.Callback):
    """Kills the process of the last replica in the middle of a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Outcome(NamedTuple):
    losses: list[float]
    """Loss of each step."""
    weights: str
    """Hash of the final weights."""


def run(root: Path, processes: int, reproducible: str, kill_at: int | None = None) -> Outcome:
    """Train, or resume from the newest checkpoint below `root`."""
    lg.seed_everything(0, verbose=False)
    task = Digits(channels=16)
    trainer = lg.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        strategy="ddp",
        devices=processes,
        replicas=REPLICAS,
        reproducible=reproducible,
        threads=1,
        callbacks=[Killer(kill_at), lg.callbacks.Checkpoint(every_n_train_steps=SAVE_EVERY)],
        logger=JSONLinesLogger(),
        log_every_n_steps=1,
        default_root_dir=root,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, DigitsData(batch_size=16), resume="auto")
    points = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in task.state_dict().values()))
    return Outcome([point["train/loss"] for point in points if "train/loss" in point], digest.hexdigest())


def run_broken(root: Path) -> Outcome:
    """Train on 4, 2, 3 and finally 1 process, with a kill before each change."""
    for processes, kill_at in BREAKS:
        try:
            return run(root, processes, "bitwise", kill_at)
        except WorkerError as error:
            print(f"  {error}")
    raise AssertionError("the last part ends by itself")


# --- the picture ----------------------------------------------------------------------------------------------------
WIDTH, HEIGHT, LEFT, RIGHT = 860, 520, 74, 840
TOP, MIDDLE, LOW, BOTTOM = 46, 320, 362, 480
"""Top and bottom of each panel."""
INK, GRID, BROKEN = "#222", "#ddd", "#e6550d"
STYLES = [("#9ecae1", 9.0, ""), ("#4292c6", 5.5, ""), ("#08519c", 2.5, ""), (BROKEN, 1.6, "5 4")]
"""Color, width and dashes for 1, 2 and 4 processes and the interrupted run. Wider lines below stay visible."""
NAMES = ["1 process", "2 processes", "4 processes", "4, killed, 2, killed, 3, killed, 1"]
DRIFTS = [("#74a876", "2 processes"), ("#9e6fb5", "4 processes")]
SMALLEST, LARGEST = 1e-9, 1.0
"""Ends of the lower panel's scale."""

Points = list[tuple[float, float]]


def picture(losses: Sequence[float], drifts: Sequence[Sequence[float]]) -> str:
    """Return the SVG for the shared losses and for the drift of runs under `order`."""

    def across(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / len(losses)

    parts = [text(LEFT, 26, "One loss curve, four runs: the same to the last bit", "start", size=17, weight="bold")]
    parts += upper(losses, across) + breaks(across) + lower(drifts, across)
    parts += [text(across(step), BOTTOM + 18, str(step), "middle") for step in range(0, len(losses) + 1, 20)]
    parts.append(text(RIGHT, HEIGHT - 6, "optimizer step", "end"))
    frame = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13"'
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>', background, *parts, "</svg>", ""])


def upper(losses: Sequence[float], across: Callable[[float], float]) -> list[str]:
    """Return the panel of losses, with one line per run."""
    highest = math.ceil(max(losses) * 2) / 2
    parts = []
    for half in range(int(highest * 2) + 1):
        y = MIDDLE - (MIDDLE - TOP) * half / 2 / highest
        parts += [line(y), text(LEFT - 8, y + 4, f"{half / 2:g}", "end")]
    points = [(across(step), MIDDLE - (MIDDLE - TOP) * loss / highest) for step, loss in enumerate(losses, 1)]
    for index, (style, name) in enumerate(zip(STYLES, NAMES, strict=True)):
        y = TOP + 22.0 + 20 * index
        parts += [curve(points, *style), curve([(560, y - 4), (596, y - 4)], *style), text(604, y, name, "start")]
    return parts


def breaks(across: Callable[[float], float]) -> list[str]:
    """Return marks where the interrupted run was killed. Repeated steps are shaded."""
    parts = []
    for (processes, kill_at), (after, _) in itertools.pairwise(BREAKS):
        assert kill_at is not None
        x, resumed = across(kill_at), across(kill_at // SAVE_EVERY * SAVE_EVERY)
        where = f'x="{resumed:.1f}" y="{TOP}" width="{x - resumed:.1f}" height="{MIDDLE - TOP}"'
        parts.append(f'<rect {where} fill="{BROKEN}" fill-opacity="0.15"/>')
        parts.append(text(x + 4, MIDDLE - 8, f"{processes} → {after}", "start", BROKEN))
    return parts


def lower(drifts: Sequence[Sequence[float]], across: Callable[[float], float]) -> list[str]:
    """Return the panel of distances from the run on one process."""

    def up(drift: float) -> float:
        share = math.log(max(drift, SMALLEST) / SMALLEST) / math.log(LARGEST / SMALLEST)
        return BOTTOM - (BOTTOM - LOW) * min(share, 1.0)

    parts = [text(LEFT, LOW - 12, "Distance from the loss of one process; order:", "start")]
    for exponent in (-9, -6, -3, 0):
        y = up(10.0**exponent)
        parts += [line(y), text(LEFT - 8, y + 4, "0" if exponent == -9 else f"1e{exponent}", "end")]
    for index, ((colour, name), drift) in enumerate(zip(DRIFTS, drifts, strict=True)):
        parts.append(curve([(across(step), up(value)) for step, value in enumerate(drift, 1)], colour, 1.5))
        parts.append(text(400 + 104 * index, LOW - 12, name, "start", colour, weight="bold"))
    parts.append(text(614, LOW - 12, "bitwise:", "start"))
    parts.append(text(674, LOW - 12, "0, in all four runs", "start", BROKEN, weight="bold"))
    return [*parts, curve([(across(0), BOTTOM), (RIGHT, BOTTOM)], BROKEN, 2.5)]


def line(y: float) -> str:
    return f'<line x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}" stroke="{GRID}"/>'


def curve(points: Points, colour: str, width: float, dashes: str = "") -> str:
    along = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{along}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>'


def text(x: float, y: float, words: str, anchor: str, colour: str = INK, size: int = 13, weight: str = "normal") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{words}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "one-run.svg")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        runs = {f"{count} processes": run(root / f"b{count}", count, "bitwise") for count in (1, 2, 4)}
        runs["killed and resized"] = run_broken(root / "broken")
        ordered = [run(root / f"o{count}", count, "order") for count in (1, 2, 4)]
    expected = runs["1 processes"]
    for name, outcome in runs.items():
        same = "the same bits" if outcome == expected else "OTHER BITS"
        print(f"{name:20} {len(outcome.losses)} points, weights {outcome.weights[:16]}: {same}")
        if outcome != expected:
            raise SystemExit(f"{name}: not the run of one process")
    drifts = [
        [abs(ours - theirs) for ours, theirs in zip(outcome.losses, ordered[0].losses, strict=True)]
        for outcome in ordered[1:]
    ]
    for count, drift in zip((2, 4), drifts, strict=True):
        print(f"order, {count} processes: the last loss differs by {drift[-1]:.2g}, the maximum is {max(drift):.2g}")
    options.out.write_text(picture(expected.losses, drifts), encoding="utf-8")
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
