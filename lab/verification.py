"""Verification: segments of a run between its checkpoints, computed again, and a certificate of what was compared."""

import json
import os
import platform
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..base.errors import CheckpointError, ConfigError
from ..base.location import location_of
from ..base.quantities import counted, format_bytes, time_taken
from ..base.run_names import REPLAY
from ..loggers.json_lines import POINTS_FILE
from ..trainer import switches
from ..trainer.checkpoints.find import load_manifest, verify
from ..trainer.checkpoints.reading import read_checkpoint
from ..trainer.resume.fingerprint import CONTENT
from ..trainer.runs.lock import is_held
from ..trainer.runs.record import code_of
from ..trainer.runs.run_file import identity_of
from .bits import leaves
from .history import CheckpointRecord, StudiedRun
from .origin import differences, listed
from .replay_steps import Make, Replayed, read_lines, replay_steps
from .watchers import SaveAs

VERIFIED = ".verified-"
"""Separator between the name of a run directory and the number of a verification."""
NOT_COMPARED = ("config", "versions", "run_id", "fingerprint", *(f"state.{name}" for name in SaveAs.CLOCKS))
"""Contents of a checkpoint that tell where and when it was written, by the beginning of their names."""
OF_CALLBACKS = ("callbacks.", "callback_metrics.", "metrics.")
"""Contents of which a replay, which has no callbacks that only watch, lacks some."""
RECORDED = ("time", "step", "arguments", "host", "versions", "git", "strategy", "processes", "replicas", "reproducible")
"""What a certificate tells of each start of the run."""
LEFT = (
    "Recorded code, versions and settings are the same, and a second computation gave the same values: what is left is "
    "the data. `legato samples RUN step=N --show` shows that of the first step that differs."
)
NOT_DETERMINISTIC = "These steps do not repeat their own bits here: an operation is not deterministic."


@dataclass
class Segment:
    """Steps from one checkpoint, or the start of the run, to the next one, and what computing them again has shown."""

    source: CheckpointRecord | None
    target: CheckpointRecord
    processes: int
    """Processes that compute it again."""
    result: str = ""
    differences: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    """What is not as it was in the run, also where that has changed no bit."""
    not_logged: set[str] = field(default_factory=set)
    """What the run has logged in a step, and the replay has not: speed, or what follows the last checkpoint."""
    seconds: float = 0.0

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step."""
        return (self.source.step if self.source else 0) + 1, self.target.step

    def __str__(self) -> str:
        where = "1 process" if self.processes == 1 else f"{self.processes} processes"
        first, last = self.steps
        told = f"DIFFER: {'; '.join(self.differences)}" if self.differences else self.result
        return "\n  ".join([f"Steps {first:,} to {last:,} on {where}: {told}", *self.causes])


class Verification:
    """Segments of a run, drawn at random, to be computed again; nothing is written into the run."""

    def __init__(
        self,
        history: StudiedRun,
        count: int | None = 5,
        seed: int | None = None,
        processes: int | None = None,
    ) -> None:
        """Draw the segments.

        count: segments to draw; None: all. processes: None: others than the run had, where these have the same bits.

        Raises ConfigError for a run that cannot be verified.
        """
        self.history, self.left_out = history, list[str]()
        self.made = list[tuple[Segment, Make]]()
        self.seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
        place, records = location_of(history.directory), history.checkpoints
        if is_held(history.directory):
            raise ConfigError(f"{place} is being written to: its checkpoints may go. Verify it when the run has ended.")
        if not records:
            raise ConfigError(
                f"{place} has no complete checkpoint from which it could resume, and so nothing to compare with. Let "
                f"the next run keep some: Checkpoint(every_n_train_steps=1000, save_top_k=-1)."
            )
        for source, target in zip([None, *records], records, strict=False):
            start = history.start_of(target.step)[1]
            segment = Segment(source, target, processes or processes_for(start))
            first, last = segment.steps
            try:
                if start.get("reproducible") == "off":
                    raise ConfigError("reproducible: off draws random numbers that nobody can draw again.")
                self.made.append((segment, history.make(first, last, segment.processes)))
            except ConfigError as error:
                self.left_out.append(f"Steps {first:,} to {last:,} cannot be verified. {error}")
        self.total = len(self.made)
        if not self.made:
            raise ConfigError("\n".join(self.left_out))
        if count is not None and count < self.total:
            self.made = [self.made[n] for n in sorted(random.Random(self.seed).sample(range(self.total), count))]

    def cost(self) -> str:
        """Return the segments that were drawn, their steps, the time by the run's record of its steps, and the disk."""
        points = sorted((step, point["time"]) for step, point in self.history.points.items() if "time" in point)
        per_step = median(
            [(after - before) / (last - first) for (first, before), (last, after) in pairwise(points)] or [0]
        )
        steps, seconds, sizes = 0, 0.0, []
        for segment, _ in self.made:
            first, last = segment.steps
            before = self.history.start_of(last)[1].get("processes") or 1
            steps, seconds = (
                steps + last - first + 1,
                seconds + per_step * max(1.0, before / segment.processes) * (last - first + 1),
            )
            sizes.append(sum(file.size for file in load_manifest(segment.target.path).files.values()))
        drawn = f"{counted(len(self.made), 'segment')} of {self.total} between checkpoints, seed {self.seed}"
        time = f"about {time_taken(seconds)} and {counted(len(self.made), 'start')}"
        return f"{drawn}: {counted(steps, 'step')}, {time}, {format_bytes(max(sizes))} of disk"

    def compute(self, directory: Path) -> Iterator[Segment]:
        """Compute the segments again, one after the other; temporary files go below `directory`."""
        for segment, make in self.made:
            began = time.monotonic()
            # with the mark of replays, so that nobody takes it for a run
            with TemporaryDirectory(prefix=REPLAY, dir=directory) as folder:
                self._compute(segment, make, Path(folder))
            segment.seconds = round(time.monotonic() - began, 2)
            yield segment

    def _compute(self, segment: Segment, make: Make, folder: Path) -> None:
        again = folder / f"2{REPLAY}"
        try:
            for record in filter(None, (segment.source, segment.target)):
                verify(record.path)
            replayed, contents = self._replay(segment, make, folder / f"1{REPLAY}")
            self._compare_points(segment, replayed)
            in_log = len(segment.differences)
            self._compare_checkpoints(segment, replayed, contents)
            segment.causes = self._changes(segment, contents)
            if segment.differences and replayed.to_the_bit and in_log == len(segment.differences):
                segment.causes = ["metrics.jsonl was changed: the checkpoint, computed again, is the same."]
            elif segment.differences and not in_log:
                segment.causes += ["All that was logged is the same: the checkpoint itself may have been replaced."]
            elif segment.differences and not segment.causes:
                same = points_in(replayed.directory) == points_in(self._replay(segment, make, again)[0].directory)
                segment.causes = [LEFT if same else NOT_DETERMINISTIC]
        # whatever it is, these steps cannot be repeated, and the certificate says why
        except Exception as error:
            damaged = isinstance(error, CheckpointError)
            segment.differences = [
                str(error) if damaged else f"they cannot be computed. {type(error).__name__}: {error}"
            ]
            segment.causes = self._changes(segment)

    def _changes(self, segment: Segment, contents: Mapping[str, Any] | None = None) -> list[str]:
        """Return what is not as it was in the run; `contents`: those of the checkpoint that was computed."""
        was, now = segment.target.fingerprint, contents["fingerprint"] if contents else {}
        names = [name for name in was if name in now and name != CONTENT and was[name] != now[name]]
        settings = listed([f"{name} {was[name]} -> {now[name]}" for name in names])
        lines = [f"Other settings than the run had: {settings}."] if names else []
        return [*differences(self.history, segment.steps[0]), *lines]

    def _replay(self, segment: Segment, make: Make, folder: Path) -> tuple[Replayed, dict[str, Any]]:
        folder.mkdir()
        made, saved = make(), folder / "checkpoint"
        segment.processes = made[0].strategy.local_processes(made[0].device_list) * made[0].num_nodes
        watchers = [SaveAs(segment.target.state, saved)]
        replayed = replay_steps(self.history, made, segment.steps, folder, watchers, every_step=False)
        return replayed, read_checkpoint(saved)

    def _compare_points(self, segment: Segment, replayed: Replayed) -> None:
        (first, last), points, logged = segment.steps, self.history.points, points_in(replayed.directory)
        segment.differences += [] if replayed.holds else [replayed.describe()]
        # what is logged after the last step may come after its checkpoint
        lost = [step for step in logged if first <= step < last and step not in points]
        segment.differences += [f"metrics.jsonl has no line of step {lost[0]:,}"] if lost else []
        steps = (step for step in points if first <= step <= last)
        names = {name for step in steps for name in points[step].keys() - logged.get(step, {}).keys()}
        segment.not_logged = names - {"time"}

    def _compare_checkpoints(self, segment: Segment, replayed: Replayed, contents: Mapping[str, Any]) -> None:
        stored = read_checkpoint(segment.target.path)
        was, now = (
            {name: value for name, value in leaves(each).items() if not name.startswith(NOT_COMPARED)}
            for each in (stored, contents)
        )
        names = [name for name in was | now if was.get(name) != now.get(name)]
        names = [name for name in names if (name in was and name in now) or not name.startswith(OF_CALLBACKS)]
        values = counted(replayed.values, "logged value")
        segment.result = f"{values} and all {len(was):,} of the checkpoint are equal to the bit"
        if not replayed.to_the_bit:
            # those of optimizers, and single weights, may be nothing but rounding: a bias before a batch norm
            apart = distance(stored["state_dict"], contents["state_dict"])
            segment.result = f"{values} are equal but for rounding, weights to {apart:.1e}; {replayed.why}"
        elif names:
            pair = was.get(names[0]), now.get(names[0])
            shown = "" if tuple in map(type, pair) else f" ({pair[0]} in the run, {pair[1]} now)"
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            segment.differences.append(f"the checkpoint of step {segment.steps[1]:,} in {names[0]}{shown}{more}")

    @property
    def is_proven(self) -> bool:
        """Whether all that was compared is what the run did."""
        return not self.history.damaged and not any(segment.differences for segment, _ in self.made)

    def write_certificate(self, directory: Path) -> str:
        """Write certificate.json and certificate.txt: what was compared, where, and the result; return the text."""
        history, code = self.history, code_of(Path.cwd())
        segments = [segment for segment, _ in self.made]
        records = {record.path.name: record for each in segments for record in (each.source, each.target) if record}
        hashes = {
            name: {file: entry.sha256 for file, entry in load_manifest(record.path).files.items()}
            for name, record in records.items()
        }
        certificate: dict[str, Any] = {
            "result": "proven" if self.is_proven else "differs",
            "run": {"place": str(location_of(history.directory)), "id": identity_of(history.directory)},
            "seed": self.seed,
            "segments": [
                {"from": str(each.source and each.source.path.name), "to": each.target.path.name}
                | {name: value for name, value in vars(each).items() if name not in ("source", "target")}
                for each in segments
            ],
            "not_verified": [*self.left_out, *history.damaged],
            "checkpoints": hashes,
            "data": {name: record.content for name, record in records.items()},
            "starts": [{name: start.get(name) for name in RECORDED} for _, start in history.starts],
            "verified": {
                "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "host": {"name": platform.node(), "system": platform.platform(), **switches.processor()},
                "versions": switches.versions(),
                "git": code and {name: code[name] for name in ("commit", "changed")},
            },
        }
        versions = ", ".join(f"{name} {version}" for name, version in switches.versions().items() if version)
        host = certificate["verified"]["host"]
        lines = [
            f"Result     {certificate['result'].upper()}",
            f"Run        {certificate['run']['place']}, id {certificate['run']['id']}",
            f"Verified   {certificate['verified']['time']} on {host['name']}, {host['cpu_features']}",
            f"With       {versions}{', commit ' + code['commit'][:12] if code else ''}",
            f"Drawn      {len(segments)} of {self.total} segments between checkpoints, seed {self.seed}",
            *map(str, segments),
            *certificate["not_verified"],
            *(f"SHA-256    {files['model.safetensors']} {name}/model.safetensors" for name, files in hashes.items()),
        ]
        unlogged = sorted(set().union(*(each.not_logged for each in segments)))
        lines += [f"Not logged again at each step, and not compared there: {', '.join(unlogged)}"] if unlogged else []
        (directory / "certificate.json").write_text(json.dumps(certificate, indent=1, default=sorted) + "\n")
        (directory / "certificate.txt").write_text("\n".join([*lines, ""]))
        return "\n".join(lines)


def processes_for(start: Mapping[str, Any]) -> int:
    """Return on how many processes to compute steps of a start again: another number, where that has the same bits."""
    before, replicas = int(start.get("processes") or 1), int(start.get("replicas") or 1)
    here = torch.accelerator.device_count() if torch.accelerator.is_available() else os.cpu_count() or 1
    if start.get("reproducible") == "bitwise":
        return 1 if before > 1 else min(2, replicas, here)
    return before if before <= here and start.get("nodes", 1) == 1 else 1


def points_in(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the points that a replay has logged, by step, without their times."""
    points = read_lines(directory / POINTS_FILE)
    return {point["step"]: {name: value for name, value in point.items() if name != "time"} for point in points}


def distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the distance of the weights of two models by the norm of the first."""
    pairs = [(value.double(), other[name].double()) for name, value in one.items() if torch.is_tensor(value)]
    far, near = (sum(float((a - sign * b).square().sum()) for a, b in pairs) for sign in (1, 0))
    return float((far / (near or 1.0)) ** 0.5)
