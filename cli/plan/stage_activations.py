"""Activations of a pipeline: what a process keeps of the pieces of a batch that are on their way through its stages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...trainer.data.transfer import count_samples, map_tensors
from ...trainer.strategies.data_parallel.chunks import split
from ...trainer.strategies.mesh.sizes import Schedule, count_pieces, stages_each
from ...trainer.strategies.model_parallel.parts import PartBlock, cut_task
from .memory import Activations
from .state_size import sum_bytes
from .step_size import SavedBytes, measure_activations

if TYPE_CHECKING:
    from ...tasks.task import Task


@dataclass(frozen=True)
class Pipeline:
    """A task cut into stages, which are dealt out in turn over the places of a pipeline."""

    schedule: Schedule
    places: int
    pieces_wanted: int | None
    stages: Sequence[Sequence[PartBlock]]

    @classmethod
    def of(cls, task: "Task", places: int, options: Mapping[str, Any]) -> "Pipeline":
        """Cut a task as a mesh with these options does; raises ConfigError where it cannot be."""
        schedule: Schedule = options.get("schedule", "1f1b")
        stages = cut_task(task, places * stages_each(schedule), options.get("split", "auto"))
        return cls(schedule, places, options.get("micro_batches"), stages)

    def measure(self, task: "Task", batch: Any, blocks: tuple[str, ...], mixed: bool) -> Activations:
        """Return the activations of a batch at the place that keeps most; arguments and errors of measure_activations.

        What stages receive from each other is not among them: it is a buffer of communication.
        """
        samples = count_samples(batch)
        pieces = count_pieces([samples], self.pieces_wanted or 2 * self.places, self.schedule, self.places)
        piece = split(batch, [samples // pieces] * pieces)[0] if pieces > 1 else batch
        return measure_activations(task, piece, blocks, mixed, partial(self._count, pieces))

    def _count(self, pieces: int, task: "Task", step: Callable[[], Any], piece: list[Tensor]) -> Activations:
        """Return the activations of a batch of so many pieces."""
        saved, kept, given = SavedBytes([*task.parameters(), *task.buffers(), *piece]), list[int](), list[int]()

        def enter(_: Any, inputs: Any) -> None:
            before, found = saved.bytes, list[Tensor]()
            map_tensors(inputs, lambda tensor: found.append(tensor) or saved.pack(tensor))  # type: ignore[func-returns-value]
            # the input of the first stage is joined from that of all pieces, and so a copy
            given.append(sum_bytes(found) if pieces > 1 else saved.bytes - before)
            saved.bytes = 0

        def leave(_: Any, inputs: Any, output: Any) -> None:
            map_tensors(output, saved.pack)  # kept for backward to begin with
            kept.append(saved.bytes)

        saved.run(step, [(stage[0].module, stage[-1].module) for stage in self.stages], enter, leave)
        kept[-1] = saved.bytes  # with what the loss saves
        return self._most(kept, sum_bytes(piece), given[0], pieces)

    def _most(self, kept: Sequence[int], batch: int, given: int, pieces: int) -> Activations:
        """Return the activations of the place that keeps most.

        kept: the bytes that each stage keeps of a piece for its backward. batch, given: those of a piece of the batch,
        and of the first stage's input.
        """
        found = []
        for place in range(self.places):
            most = most_at_once(self.schedule, place, self.places, pieces, kept[place :: self.places])
            # every place has the whole batch, and the first one the input of its stage
            found.append((most + pieces * (batch + (given if place == 0 else 0)), place))
        most, place = max(found)
        waiting = most_at_once(self.schedule, place, self.places, pieces, [1] * (len(kept) // self.places))
        keeps = f"which keeps {waiting} forwards of its {pieces} pieces"
        return Activations(most, where=f"at place {place} of the pipeline, {keeps}")


def most_at_once(schedule: Schedule, place: int, places: int, pieces: int, kept: Sequence[int]) -> int:
    """Return the most that a place of a pipeline keeps at one time, if each of its stages keeps so much of a piece.

    In the order of torch's schedules (Narayanan et al., 2021, https://arxiv.org/abs/2104.04473).
    """
    stages, in_round = len(kept), 1
    forwards = pieces * stages
    if schedule == "interleaved":
        in_round = pieces // max(1, pieces // places)
        ahead = min((stages - 1) * in_round + 2 * (places - 1 - place) + 1, forwards)
    else:  # torch's 1f1b takes no fewer pieces than there are stages; fewer go as in gpipe
        ahead = places - place if schedule == "1f1b" and pieces >= places else pieces
    done = {True: 0, False: 0}
    size = most = 0
    for is_forward in [*[True] * ahead, *[False, True] * (forwards - ahead)]:
        stage = done[is_forward] // in_round % stages
        size += kept[stage] if is_forward else -kept[stages - 1 - stage]
        done[is_forward] += 1
        most = max(most, size)
    return most
