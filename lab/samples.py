"""Which samples made up a step of a run, and in which steps a sample was seen; nothing is run."""

import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ..base.errors import ConfigError, DataError
from ..base.quantities import counted
from ..callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from ..trainer.data.combined import combined
from ..trainer.data.dealing import DealtData, training_data
from ..trainer.data.loaders import MapLoader, close_loaders, opened_loaders
from ..trainer.data.sampling import Layout
from ..trainer.data.steps import Dealing, ReplicaBatch, StepInput
from ..trainer.data.streams import StreamData
from ..trainer.hooks import counter_of
from .history import RunHistory

if TYPE_CHECKING:
    from ..tasks.data_module import DataModule
    from ..tasks.task import Task

COLUMNS = 118
SEARCHED_AT_ONCE = 1 << 20
"""Positions that a search evaluates in one call."""


class Unstarted(Protocol):
    """A run that was built and not started."""

    processes: int
    seed: int

    @property
    def task(self) -> "Task":
        """The task, attached to a trainer with the arguments of the run."""

    @property
    def data(self) -> "DataModule | None":
        """The data module, attached to a trainer, too."""

    def load_loader(self) -> Any:
        """Return the training loader."""


@dataclass(frozen=True)
class StepPlace:
    """Position of a step in its run: its epoch, and its number in that, from 0."""

    step: int
    epoch: int
    number: int
    steps_of_epoch: int | None


class SampleLookup:
    """The samples of each step of a run, from its history and its training loader.

    build: builds the run as it was configured in a step, and the same object where nothing has changed.
    """

    def __init__(self, history: RunHistory, build: Callable[[int], Unstarted]) -> None:
        self.history, self.build = history, build
        self._data: dict[tuple[int, int, int], DealtData | StreamData] = {}

    def place(self, step: int) -> StepPlace:
        """Return where a step is; of one that the run has not reached, where its newest settings put it."""
        epoch, begun, steps = self.history.epoch_of(step)
        if steps is None:  # of the last epoch to begin, which may have been cut short
            steps = self.steps_in(step, epoch)
            while steps is not None and step > begun + steps:
                epoch, begun = epoch + 1, begun + steps
                steps = self.steps_in(step, epoch)
                if steps == 0:
                    raise DataError(f"Epoch {epoch} has no step under the settings of step {step}.")
        return StepPlace(step, epoch, step - begun - 1, steps)

    def steps_in(self, step: int, epoch: int) -> int | None:
        """Return the number of steps of an epoch under the settings of a step; None for a stream without a length."""
        data = self.data(step, epoch)
        if isinstance(data, DealtData):
            return data.order_and_deal(epoch)[1].steps
        return None if data.rounds is None else -(-data.rounds // data.dealing.accumulate)

    def data(self, step: int, epoch: int) -> DealtData | StreamData:
        """Return the training data in a step, dealt out to all replicas in this process."""
        run = self.build(step)
        trainer = run.task.trainer
        if not trainer.use_distributed_sampler and self.history.start_of(step).get("processes", 1) > 1:
            raise DataError(
                "Each process of the run read its own share of the data, so only those processes know which samples "
                "they had."
            )
        every, accumulate = trainer.reload_dataloaders_every_n_epochs, trainer.accumulate_grad_batches
        loaded = epoch - epoch % every if every else 0
        for callback in trainer.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):
                accumulate = callback.scheduling[max(first for first in callback.scheduling if first <= epoch)]
        key = id(run), loaded, accumulate
        if key not in self._data:
            trainer.state.epoch = loaded
            if run.data is not None and run.data.trainer is not None:
                run.data.trainer.state.epoch = loaded
            self._data[key] = self._dealt(run, step, accumulate)
        return self._data[key]

    def _dealt(self, run: Unstarted, step: int, accumulate: int) -> DealtData | StreamData:
        trainer, record = run.task.trainer, self.history.near(step)
        dealing = Dealing(
            Layout(self.history.replicas_in(step), 1),
            0,
            accumulate,
            record.state.seed if record else run.seed,  # a resume keeps the seed of the run, whatever its config says
            not run.task.automatic_optimization or trainer.sync_batchnorm,
            trainer.reproducible != "off",
            left_out=frozenset(trainer.leave_out_samples or ()),
        )
        overfit = trainer.overfit_batches
        limit = overfit or trainer.limit_train_batches
        count = counter_of(run.task)
        return training_data(combined(run.load_loader()), dealing, limit, bool(overfit), count=count)

    def at(self, step: int) -> StepInput:
        """Return a step without its data: which samples each replica has; of a stream, the numbers of its batches.

        Raises DataError where a sampler gives another order each time, so that the run's is not known.
        """
        place = self.place(step)
        data = self.data(step, place.epoch)
        if isinstance(data, StreamData):
            accumulate, replicas = data.dealing.accumulate, range(data.dealing.layout.replicas)
            rounds = range(place.number * accumulate, (place.number + 1) * accumulate)
            items = [ReplicaBatch(replica, round, None, 0) for replica in replicas for round in rounds]
            return StepInput(items, 0, accumulate)
        first, again = (step_at(data, place.epoch, place.number) for _ in range(2))
        if [item.indices_by_loader for item in first.batches] != [item.indices_by_loader for item in again.batches]:
            sampler = data.source.sampler if isinstance(data.source, MapLoader) else None
            raise DataError(
                f"{type(sampler).__name__} draws another order each time it is asked for the same epoch, so which one "
                f"the run had is not known. Let it depend on set_epoch(epoch) and the random numbers of torch, "
                f"NumPy or Python alone, which are keyed."
            )
        return first

    def loaded(self, step: int) -> StepInput:
        """Return a step with its batches, as the run has loaded them."""
        place, opened = self.place(step), opened_loaders()
        try:
            return next(iter(self.data(step, place.epoch).epoch(place.epoch, place.number)))
        finally:
            close_loaders(opened)

    def steps_with(self, index: Any, until: int) -> Iterator[StepPlace]:
        """Yield the steps up to `until` in which a sample was seen. Raises DataError for a stream."""
        step = 1
        while step <= until:
            place = self.place(step)
            data = self.data(step, place.epoch)
            if isinstance(data, StreamData):
                raise DataError(
                    f"The training loader ({type(data.loader).__name__}) is a stream: its samples have no indices. "
                    f"step=N tells which of its batches a step had."
                )
            end = step + (place.steps_of_epoch or 1)
            for number in steps_with(data, place.epoch, index):
                if step + number < min(end, until + 1):
                    yield StepPlace(step + number, place.epoch, number, place.steps_of_epoch)
            step = end


def step_at(data: DealtData, epoch: int, step: int) -> StepInput:
    """Return a step of an epoch without loading its data: each `batch` is None."""
    order, deal = data.order_and_deal(epoch)
    items = [
        ReplicaBatch(replica, round, None, order.samples(start, stop), place=(order, start, stop))
        for replica, round, start, stop in deal.spans(step, data.dealing.replicas)
    ]
    return StepInput(items, order.samples(*deal.step_positions(step)), len(deal.rounds_of(step)))


def steps_with(data: DealtData, epoch: int, index: Any) -> list[int]:
    """Return the steps of an epoch in which a replica has the sample of an index, in O(length) time and O(1) memory."""
    order, deal = data.order_and_deal(epoch)
    in_step, steps = deal.accumulate * deal.replicas * deal.batch_size, set[int]()
    for own in order.by_loader().values():
        for start in range(0, min(own.length, deal.samples), SEARCHED_AT_ONCE) if index not in own.left_out else ():
            entries = own.order(np.arange(start, min(start + SEARCHED_AT_ONCE, own.length), dtype=np.int64))
            if isinstance(entries, np.ndarray):
                positions = (np.flatnonzero(entries == index) + start).tolist()
            else:
                batches = own.size_of is not None
                positions = [
                    start + number
                    for number, entry in enumerate(entries)
                    if (index in (entry or ()) if batches else entry == index)
                ]
            for position in positions:  # those from the length on repeat the first ones
                steps.update(repeated // in_step for repeated in range(position, deal.samples, order.length))
    return sorted(steps)


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
    until, count = min(until or sys.maxsize, lookup.history.last_step), 0
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
    if isinstance(batch, torch.Tensor):
        spread = f", {batch.min().item():.6g} to {batch.max().item():.6g}" if batch.numel() else ""
        return f"{name}: {str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}{spread}"
    if isinstance(batch, Mapping):
        return "\n".join(described_shapes(value, f"{name}[{key!r}]") for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        return "\n".join(described_shapes(value, f"{name}[{index}]") for index, value in enumerate(batch))
    return f"{name}: {batch!r:.100}"
