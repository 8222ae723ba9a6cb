"""Which samples made up a step of a run, and in which steps a sample was seen; nothing is run."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError, DataError
from ..base.quantities import counted
from ..trainer.data.combined import combined
from ..trainer.data.dealing import DealtData, training_data
from ..trainer.data.loaders import MapLoader, close_loaders, opened_loaders
from ..trainer.data.sampling import Layout
from ..trainer.data.steps import Dealing, ReplicaBatch, StepInput
from ..trainer.data.streams import StreamData
from ..trainer.hooks import counter_of
from .history import RunHistory
from .unstarted import UnstartedRun

if TYPE_CHECKING:
    from ..tasks.task import Task

COLUMNS = 118
ACCUMULATION = "GradientAccumulationScheduler"


@dataclass(frozen=True)
class StepPlace:
    """Position of a step in its run: its epoch, and its number in that, from 0."""

    step: int
    epoch: int
    number: int
    steps_of_epoch: int | None


class SampleLookup:
    """The samples of each step of a run, from its history and its training loader."""

    def __init__(self, history: RunHistory, overrides: Sequence[str] = ()) -> None:
        self.history, self.overrides = history, overrides
        self._sources: dict[str, LoaderOfSettings] = {}

    def source(self, step: int) -> "LoaderOfSettings":
        """Return the training loader under the settings of a step."""
        key = self.history.config_text(step) or ""
        if key not in self._sources:
            self._sources[key] = LoaderOfSettings(self.history, step, self.overrides)
        return self._sources[key]

    def place(self, step: int) -> StepPlace:
        """Return where a step is. Raises DataError where the run has left epochs early and that is not known."""
        self.history.require_step(step)
        known = self.history.epochs_begun()
        index = max(number for number, (_, begun) in enumerate(known) if begun < step)
        epoch, begun = known[index]
        following = known[index + 1] if index + 1 < len(known) else None
        while True:
            steps = self.source(step).steps_in(epoch)
            if following is not None and epoch + 1 == following[0]:  # known, also where a hook ended the epoch early
                taken, whole = following[1] - begun, steps
                if whole is not None and (not 0 < taken <= whole or (taken < whole and epoch != known[index][0])):
                    raise DataError(self._unknown(step, known[index], following))
                steps = taken
            if steps is None:
                return StepPlace(step, epoch, step - begun - 1, None)
            if step <= begun + steps:
                self._check(step, epoch)
                return StepPlace(step, epoch, step - begun - 1, steps)
            if steps == 0:
                raise DataError(f"Epoch {epoch} has no step under the settings of step {step}.")
            epoch, begun = epoch + 1, begun + steps
            if following is not None and epoch >= following[0]:
                raise DataError(self._unknown(step, known[index], following))

    def _check(self, step: int, epoch: int) -> None:
        """Compare with the epoch that the run has logged."""
        points = self.history.points
        earlier = max((one for one in points if one < step), default=0)
        later = min((one for one in points if one >= step), default=0)
        for at in (earlier, later):
            was = points.get(at, {}).get("epoch")
            if isinstance(was, (int, float)) and not (
                was <= epoch if at < step else was >= epoch if at > step else was == epoch
            ):
                raise DataError(
                    f"Step {step} is worked out to be in epoch {epoch}, but the run logged epoch {was:g} at step {at}. "
                    f"Some epoch ended early (a hook, resume_at=epoch), or the data has another length by now; the "
                    f"checkpoints that would tell where are gone."
                )

    def _unknown(self, step: int, last: tuple[int, int], following: tuple[int, int]) -> str:
        return (
            f"The place of step {step} is not known: epoch {last[0]} began after step {last[1]} and epoch "
            f"{following[0]} after step {following[1]}, which is not what the settings give. Epochs between ended "
            f"early (a hook, resume_at=epoch), or the data has another length by now."
        )

    def at(self, step: int) -> StepInput:
        """Return a step without its data: which samples each replica has. Raises DataError where that is not known."""
        place = self.place(step)
        return self.source(step).step_at(place)

    def loaded(self, step: int) -> StepInput:
        """Return a step with its batches, as the run has loaded them."""
        place, opened = self.place(step), opened_loaders()
        try:
            return next(iter(self.source(step).data(place.epoch).epoch(place.epoch, place.number)))
        finally:
            close_loaders(opened)

    def steps_with(self, index: Any, until: int) -> Iterator[StepPlace]:
        """Yield the steps up to `until` in which a sample was seen."""
        step = 1
        while step <= until:
            first = self.place(step)
            source, begun = self.source(step), step - 1 - first.number
            data = source.dealt(first.epoch)
            for number in data.steps_with(first.epoch, index):
                if begun < begun + number + 1 <= until and number < (first.steps_of_epoch or 0):
                    yield StepPlace(begun + number + 1, first.epoch, number, first.steps_of_epoch)
            step = begun + (first.steps_of_epoch or 0) + 1


class LoaderOfSettings:
    """The training data under one config of a run, dealt out to all replicas in this process."""

    def __init__(self, history: RunHistory, step: int, overrides: Sequence[str]) -> None:
        self.config = history.config_of(step, overrides)
        self.trainer = trainer = self.config.values["trainer"]
        self.run = UnstartedRun(self.config)
        processes = self.run.parts.batches
        record = history.after(step) or history.before(step)
        self.replicas = record.state.replicas if record else trainer["replicas"] or processes
        self.seed = record.state.seed if record else self.config.values["seed"]
        dealt_out = record.samples.get("use_distributed_sampler", True) if record else True
        self.alone = not dealt_out or (not trainer["use_distributed_sampler"] and processes > 1)
        self._data: dict[tuple[int, int], DealtData | StreamData] = {}

    def accumulation(self, epoch: int) -> int:
        """Return the batches of each replica in a step of an epoch."""
        for one in (self.config.values.get("callbacks") or {}).values():
            if str(one.get("_target_")).rpartition(".")[2] == ACCUMULATION:
                scheduled = {0: 1, **{int(first): count for first, count in one["scheduling"].items()}}
                return int(scheduled[max(first for first in scheduled if first <= epoch)])
        return int(self.trainer["accumulate_grad_batches"])

    def data(self, epoch: int) -> DealtData | StreamData:
        """Return the data of an epoch."""
        every, accumulate = self.trainer["reload_dataloaders_every_n_epochs"], self.accumulation(epoch)
        loaded = epoch - epoch % every if every else 0
        if (loaded, accumulate) not in self._data:
            task = self.run.task
            task.trainer.state.epoch = loaded
            if self.run.data is not None and self.run.data.trainer is not None:
                self.run.data.trainer.state.epoch = loaded
            self._data[loaded, accumulate] = self._make(accumulate, task)
        return self._data[loaded, accumulate]

    def _make(self, accumulate: int, task: "Task") -> DealtData | StreamData:
        trainer = self.trainer
        whole = not task.automatic_optimization or trainer["sync_batchnorm"]
        keyed = trainer["reproducible"] != "off"
        left_out = frozenset(trainer["leave_out_samples"] or ())
        dealing = Dealing(Layout(self.replicas, 1), 0, accumulate, self.seed, whole, keyed, left_out=left_out)
        overfit = trainer["overfit_batches"]
        limit = overfit or trainer["limit_train_batches"]
        if self.alone:
            raise DataError(
                "Each process of the run read its own share of the data, so only those processes know which samples "
                "they had."
            )
        # asked for again, as some epochs have loaders of their own
        return training_data(combined(self.run.load_loader()), dealing, limit, bool(overfit), count=counter_of(task))

    def dealt(self, epoch: int) -> DealtData:
        """Return the data of an epoch. Raises DataError for a stream, whose samples have no indices."""
        data = self.data(epoch)
        if not isinstance(data, DealtData):
            raise DataError(
                f"The training loader ({type(data.loader).__name__}) is a stream: its samples have no indices. "
                f"step=N tells which of its batches a step had."
            )
        return data

    def steps_in(self, epoch: int) -> int | None:
        """Return the number of steps of an epoch; None for a stream without a length."""
        data = self.data(epoch)
        if isinstance(data, DealtData):
            return data.steps_in(epoch)
        return None if data.rounds is None else -(-data.rounds // data.dealing.accumulate)

    def step_at(self, place: StepPlace) -> StepInput:
        """Return a step without its data; of a stream, with the numbers of its batches in the epoch.

        Raises DataError where a sampler gives another order each time, so that the run's is not known.
        """
        data = self.data(place.epoch)
        if isinstance(data, DealtData):
            found, again = (data.step_at(place.epoch, place.number) for _ in range(2))
            own = data.source.sampler if isinstance(data.source, MapLoader) else None
            if [one.indices_by_loader for one in found.batches] != [one.indices_by_loader for one in again.batches]:
                raise DataError(
                    f"{type(own).__name__} draws another order each time it is asked for the same epoch, so which one "
                    f"the run had is not known. Let it depend on set_epoch(epoch) and the random numbers of torch, "
                    f"NumPy or Python alone, which are keyed."
                )
            return found
        accumulate, replicas = data.dealing.accumulate, self.replicas
        rounds = range(place.number * accumulate, (place.number + 1) * accumulate)
        items = [ReplicaBatch(replica, round, None, 0) for replica in range(replicas) for round in rounds]
        return StepInput(items, 0, accumulate)


def chosen_batches(step: StepInput, replica: int | None) -> list[ReplicaBatch]:
    """Return the batches of one replica, or of all. Raises ConfigError for a replica that has none."""
    found = [item for item in step.batches if replica in (None, item.replica)]
    if not found:
        there = sorted({item.replica for item in step.batches})
        raise ConfigError(f"replica={replica}: those with a batch in this step are {', '.join(map(str, there))}.")
    return found


def shown_samples(directory: Path, place: StepPlace, step: StepInput, replica: int | None) -> Iterator[str]:
    """Yield the lines that tell which samples a step had."""
    of = "" if place.steps_of_epoch is None else f" of {place.steps_of_epoch:,}"
    samples = f": {counted(step.samples, 'sample')}" if step.samples else ""
    yield f"Step {place.step:,} of {directory}: epoch {place.epoch:,}, its step {place.number + 1:,}{of}{samples}"
    for item in chosen_batches(step, replica):
        head = f"  replica {item.replica}, batch {item.batch_idx:,}"
        found = item.indices_by_loader
        if found is None:
            number = item.batch_idx * (1 + max(one.replica for one in step.batches)) + item.replica
            yield f"{head}: batch {number:,} of the stream, whose samples have no indices"
            continue
        for name, indices in found.items():
            text = f"{head}{f', loader {name}' if name else ''}: {' '.join(map(shown_sample, indices))}"
            yield textwrap.fill(text, COLUMNS, subsequent_indent="    ")


def shown_sample(index: Any) -> str:
    """Return an index as one word."""
    if isinstance(index, Iterable) and not isinstance(index, str):
        return f"[{','.join(map(str, index))}]"
    return str(index)


def shown_steps(lookup: SampleLookup, index: Any, until: int | None, replica: int | None) -> Iterator[str]:
    """Yield the lines that tell in which steps a sample was seen."""
    until, count = until or lookup.history.last_step, 0
    for place in lookup.steps_with(index, until):
        for item in lookup.at(place.step).batches:
            names = [name for name, found in (item.indices_by_loader or {}).items() if index in found]
            if names and replica in (None, item.replica):
                count += 1
                where = f", loader {', '.join(names)}" if names != [""] else ""
                which = f"replica {item.replica}, batch {item.batch_idx:,}{where}"
                yield f"step {place.step:,}  epoch {place.epoch:,}, its step {place.number + 1:,}, {which}"
    yield f"Sample {shown_sample(index)} was seen {counted(count, 'time')} in {counted(until, 'step')}."


def shown_batches(task: Any, items: Sequence[ReplicaBatch]) -> Iterator[str]:
    """Yield each batch as the task describes it, or by the shapes of its tensors."""
    for item in items:
        told = task.describe_batch(item.batch)
        yield f"  replica {item.replica}, batch {item.batch_idx:,}:"
        yield textwrap.indent(described_shapes(item.batch) if told is None else str(told), "    ")


def described_shapes(batch: Any, name: str = "batch") -> str:
    """Return a batch's tensors: path, shape, dtype and the range of their values."""
    import torch

    if isinstance(batch, torch.Tensor):
        spread = f", {batch.min().item():.6g} to {batch.max().item():.6g}" if batch.numel() else ""
        return f"{name}: {str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}{spread}"
    if isinstance(batch, Mapping):
        return "\n".join(described_shapes(value, f"{name}[{key!r}]") for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        return "\n".join(described_shapes(value, f"{name}[{index}]") for index, value in enumerate(batch))
    return f"{name}: {batch!r:.100}"
