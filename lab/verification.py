"""Verification: recomputes random segments of a run, compares them bitwise, and writes a certificate."""

import json
import os
import platform
import random
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
from .replay_steps import Make, Replayed, processes_of, read_lines, replay_steps
from .watchers import SaveAs

VERIFIED = ".verified-"
"""Separator between the name of a run directory and a verification's number."""
NOT_COMPARED = ("config", "versions", "run_id", "fingerprint", *(f"state.{name}" for name in SaveAs.CLOCKS))
"""Prefixes of checkpoint entries that record where and when the checkpoint was written."""
OF_CALLBACKS = ("callbacks.", "callback_metrics.", "metrics.")
"""Prefixes of entries that a replay may lack, because it omits callbacks that do not affect results."""
CHANGED_DATA = (
    "Code, versions and settings match the record, and recomputing the steps twice gave the same values, so the data "
    "has changed. Print the data of the first step that differs: legato samples RUN step=N --show"
)
OTHER_PROCESSES = (
    "The number of processes differs from the run's. With tensor or pipeline, for example, this changes the dropout "
    "masks. Verify with as many processes as the run had (devices=N)."
)
NOT_DETERMINISTIC = "Recomputing these steps twice gave different results, so an operation is not deterministic."


@dataclass
class Segment:
    """The steps between two checkpoints, or before the first checkpoint, and the result of recomputing them."""

    source: CheckpointRecord | None
    target: CheckpointRecord
    make: Make
    processes: int
    """Number of processes that recompute the segment."""
    result: str = ""
    differences: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    """Changes since the run, including changes that did not affect the result."""
    not_compared: list[str] = field(default_factory=list)
    """Names of values that only the run logged: speeds, and values logged after the last checkpoint."""

    @property
    def steps(self) -> tuple[int, int]:
        """The first and last steps."""
        return (self.source.step if self.source else 0) + 1, self.target.step

    def __str__(self) -> str:
        first, last = self.steps
        result = f"DIFFER: {'; '.join(self.differences)}" if self.differences else self.result
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        lines = [f"Steps {first:,} to {last:,} on {processes}: {result}", *self.causes]
        lines += [f"Not logged by the replay: {', '.join(self.not_compared)}"] if self.not_compared else []
        return "\n  ".join(lines)


class Verification:
    """Recomputes random segments of a run and compares the results, without writing to the run directory."""

    def __init__(
        self,
        history: StudiedRun,
        count: int | None = 5,
        seed: int | None = None,
        processes: int | None = None,
    ) -> None:
        """Choose the segments at random.

        Args:
            count: Number of segments to choose. None: all.
            processes: Number of processes that recompute the segments. Default: the result of `processes_for`.

        Raises ConfigError if the run cannot be verified.
        """
        self.history, self.left_out = history, list[str]()
        self.segments = list[Segment]()
        self.seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
        place, records = location_of(history.directory), history.checkpoints
        if is_held(history.directory):
            raise ConfigError(
                f"The run {place} is still in progress and may delete its checkpoints. Verify the run after it ends."
            )
        if not records:
            raise ConfigError(
                f"{place} has no complete checkpoint to compare with and resume from. Keep checkpoints in the next "
                f"run: Checkpoint(every_n_train_steps=1000, save_top_k=-1)."
            )
        for source, target in zip([None, *records], records, strict=False):
            first, start = (source.step if source else 0) + 1, history.start_of(target.step)[1]
            try:
                several, before = processes or processes_for(start), start.get("processes")
                if start.get("reproducible") == "off":
                    raise ConfigError("Random numbers drawn with reproducible=off cannot be reproduced.")
                if start.get("strategy") == "mesh" and several not in (1, before):
                    raise ConfigError(f"The run's mesh has {before} processes. Set devices={before} or devices=1.")
                make = history.make(first, target.step, several)
                self.segments.append(Segment(source, target, make, several))
            except ConfigError as error:
                self.left_out.append(f"Steps {first:,} to {target.step:,} cannot be verified. {error}")
        self.total = len(self.segments)
        if not self.segments:
            raise ConfigError("\n".join(self.left_out))
        if count is not None and count < self.total:
            drawn = sorted(random.Random(self.seed).sample(range(self.total), count))
            self.segments = [self.segments[number] for number in drawn]

    def cost(self) -> str:
        """Return the number of segments and steps, the time needed at the run's speed, and the required disk space."""
        points = sorted((step, point["time"]) for step, point in self.history.points.items() if "time" in point)
        # the median step includes no validation or pause
        rates = [(after - before) / (last - first) for (first, before), (last, after) in pairwise(points)]
        steps = sum(segment.target.step - segment.steps[0] + 1 for segment in self.segments)
        sizes = [sum(file.size for file in load_manifest(each.target.path).files.values()) for each in self.segments]
        drawn = f"{counted(len(self.segments), 'segment')} of {self.total} between checkpoints, seed {self.seed}"
        seconds = f"{time_taken(steps * median(rates or [0]))} at the speed of the run"
        return f"{drawn}: {counted(steps, 'step')}, {seconds}, {format_bytes(max(sizes))} of disk"

    def compute(self, directory: Path) -> Iterator[Segment]:
        """Recompute and yield each segment. Temporary files are written to a subfolder of `directory`."""
        for segment in self.segments:
            # other commands do not mistake a folder with the replay suffix for a run
            with TemporaryDirectory(prefix=REPLAY, dir=directory) as folder:
                self._compute(segment, Path(folder))
            yield segment

    def _compute(self, segment: Segment, folder: Path) -> None:
        try:
            for record in filter(None, (segment.source, segment.target)):
                verify(record.path)
            replayed, contents = self._replay(segment, folder / f"1{REPLAY}")
            in_log, in_checkpoint = self._compare_points(segment, replayed), compare(segment, replayed, contents)
            segment.differences = in_log + in_checkpoint
            segment.causes = self._changes(segment, contents)
            if in_checkpoint and not in_log:
                segment.causes.append("All logged values are equal, so the checkpoint itself may have been replaced.")
            elif in_log and not in_checkpoint and replayed.to_the_bit:
                segment.causes = ["The recomputed checkpoint is identical, so metrics.jsonl was changed."]
            elif segment.differences and not replayed.to_the_bit:
                segment.causes.append(OTHER_PROCESSES)
            elif segment.differences and not segment.causes:
                repeated = self._replay(segment, folder / f"2{REPLAY}")[0]
                is_same = points_in(replayed.directory) == points_in(repeated.directory)
                segment.causes = [CHANGED_DATA if is_same else NOT_DETERMINISTIC]
        # any error means that the segment cannot be recomputed; the certificate says so
        except Exception as error:
            message = f"they cannot be computed. {type(error).__name__}: {error}"
            segment.differences = [str(error) if isinstance(error, CheckpointError) else message]
            segment.causes = self._changes(segment, {})

    def _changes(self, segment: Segment, contents: Mapping[str, Any]) -> list[str]:
        """Return what has changed since the run, including settings that differ in the recomputed `contents`."""
        was, now = segment.target.fingerprint, contents.get("fingerprint", {})
        names = [name for name in was if name in now and name != CONTENT and was[name] != now[name]]
        settings = listed([f"{name} {was[name]} -> {now[name]}" for name in names])
        return [*differences(self.history, segment.steps[0]), *([f"Changed settings: {settings}."] if names else [])]

    def _replay(self, segment: Segment, folder: Path) -> tuple[Replayed, dict[str, Any]]:
        """Return a replay of a segment, and the contents of the replay's checkpoint."""
        folder.mkdir()
        made, checkpoint = segment.make(), folder / "checkpoint"
        segment.processes = processes_of(made[0])
        watchers = [SaveAs(segment.target.state, checkpoint)]
        replayed = replay_steps(self.history, made, segment.steps, folder, watchers, every_step=False)
        return replayed, read_checkpoint(checkpoint)

    def _compare_points(self, segment: Segment, replayed: Replayed) -> list[str]:
        """Return the differences between the values that the run and the replay logged in a segment."""
        (first, last), points, logged = segment.steps, self.history.points, points_in(replayed.directory)
        steps = [step for step in points if first <= step <= last]
        names = {name for step in steps for name in points[step].keys() - logged.get(step, {}).keys()}
        segment.not_compared = sorted(names - {"time"})
        # values of the last step may be logged after its checkpoint
        lost = [f"metrics.jsonl has no line for step {step:,}" for step in logged if step < last and step not in points]
        return [*([] if replayed.holds else [replayed.describe()]), *lost[:1]]

    @property
    def is_proven(self) -> bool:
        """True if everything that was compared matches the run."""
        return not self.history.damaged and not any(segment.differences for segment in self.segments)

    def write_certificate(self, directory: Path) -> str:
        """Write certificate.json and certificate.txt, and return the text."""
        history, code = self.history, code_of(Path.cwd())
        ends = [record for each in self.segments for record in (each.source, each.target) if record]
        records = {record.path.name: record for record in ends}
        files = {name: load_manifest(record.path).files for name, record in records.items()}
        versions, processor = switches.versions(), switches.processor()
        commit = [("commit", code["commit"][:12])] if code else []
        certificate: dict[str, Any] = {
            "result": "proven" if self.is_proven else "differs",
            "run": {"place": str(location_of(history.directory)), "id": identity_of(history.directory)},
            "seed": self.seed,
            "segments": [
                {"from": each.source.path.name if each.source else None, "to": each.target.path.name}
                | {name: value for name, value in vars(each).items() if name not in ("source", "target", "make")}
                for each in self.segments
            ],
            "not_verified": [*self.left_out, *history.damaged],
            "checkpoints": {name: {file: entry.sha256 for file, entry in each.items()} for name, each in files.items()},
            "data": {name: record.content for name, record in records.items()},
            "starts": [start for _, start in history.starts],
            "verified": {
                "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "host": {"name": platform.node(), "system": platform.platform(), **processor},
                "versions": versions,
                "git": code and {name: code[name] for name in ("commit", "changed")},
            },
        }
        (directory / "certificate.json").write_text(json.dumps(certificate, indent=1) + "\n")
        lines = [
            f"Result     {certificate['result'].upper()}",
            "Run        {place}, id {id}".format(**certificate["run"]),
            f"Verified   {certificate['verified']['time']} on {platform.node()}, {processor['cpu_features']}",
            f"With       {', '.join(f'{name} {version}' for name, version in [*versions.items(), *commit] if version)}",
            f"Chosen     {len(self.segments)} of {self.total} segments between checkpoints, seed {self.seed}",
            *map(str, self.segments),
            *certificate["not_verified"],
            *(
                f"SHA-256    {each['model.safetensors'].sha256} {name}/model.safetensors"
                for name, each in files.items()
            ),
        ]
        (directory / "certificate.txt").write_text("\n".join([*lines, ""]))
        return "\n".join(lines)


def processes_for(start: Mapping[str, Any]) -> int:
    """Return the number of processes that recompute the steps of a launch.

    If the results must be bitwise identical, the number differs from the run's if possible.
    """
    before, replicas = int(start.get("processes") or 1), int(start.get("replicas") or 1)
    here = torch.accelerator.device_count() if torch.accelerator.is_available() else os.cpu_count() or 1
    if start.get("reproducible") == "bitwise":
        return 1 if before > 1 or start.get("strategy") == "mesh" else min(2, replicas, here)
    return before if before <= here and start.get("nodes", 1) == 1 else 1


def compare(segment: Segment, replayed: Replayed, contents: Mapping[str, Any]) -> list[str]:
    """Set a segment's result, and return the differences between the stored checkpoint and the recomputed contents."""
    stored = read_checkpoint(segment.target.path)
    was, now = (
        {name: value for name, value in leaves(each).items() if not name.startswith(NOT_COMPARED)}
        for each in (stored, contents)
    )
    names = [name for name in was | now if was.get(name) != now.get(name)]
    names = [name for name in names if (name in was and name in now) or not name.startswith(OF_CALLBACKS)]
    values = counted(replayed.values, "logged value")
    segment.result = f"{values} and all {len(was):,} entries in the checkpoint are bitwise identical"
    if not replayed.to_the_bit:
        # some weights and optimizer states are pure rounding error, such as those of a bias before a batch norm
        apart = distance(stored["state_dict"], contents["state_dict"])
        segment.result = f"{values} are equal up to rounding, weights to {apart:.1e}; {replayed.why}"
    elif names:
        pair = was.get(names[0]), now.get(names[0])
        shown = "" if tuple in map(type, pair) else f" ({pair[0]} in the run, {pair[1]} now)"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return [f"the checkpoint of step {segment.target.step:,} in {names[0]}{shown}{more}"]
    return []


def points_in(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the points that a replay logged, keyed by step and without timestamps."""
    points = read_lines(directory / POINTS_FILE)
    return {point["step"]: {name: value for name, value in point.items() if name != "time"} for point in points}


def distance(weights: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """Return the norm of the difference between two models' weights, relative to the norm of the first model's."""
    pairs = [(value.double(), reference[name].double()) for name, value in weights.items() if torch.is_tensor(value)]
    apart, size = (sum(float((a - sign * b).square().sum()) for a, b in pairs) for sign in (1, 0))
    return float((apart / (size or 1.0)) ** 0.5)
