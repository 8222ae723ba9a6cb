"""Looks up which samples a step used and which steps used a sample, without running the steps."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from pprint import pformat
from typing import Any

from ..base.errors import ConfigError, DataError
from ..base.location import location_of
from ..base.quantities import counted
from ..callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from ..trainer.data.combined import combined
from ..trainer.data.dealing import DealtData, TrainingData
from ..trainer.data.loaders import MapLoader, close_loaders, opened_loaders
from ..trainer.data.sampling import Layout
from ..trainer.data.steps import Dealing, ReplicaBatch, StepInput
from ..trainer.data.streams import StreamData
from ..trainer.setup.data import distribute
from .history import RunHistory

COLUMNS = 118


@dataclass(frozen=True)
class StepPlace:
    """Position of a step in its run: its epoch, and its number within the epoch, counted from 0."""

    step: int
    epoch: int
    number: int
    steps_of_epoch: int | None


class SampleLookup:
    """Finds the samples used in each step of a run, based on its history and training loader.

    Args:
        build: Function that returns the unstarted run as configured at a step (`cli.unstarted`). Must return the same
            object for the same config.
    """

    def __init__(self, history: RunHistory, build: Callable[[int], Any]) -> None:
        self.history, self.build = history, build
        self._data: dict[tuple[int, int, int], TrainingData] = {}

    def place(self, step: int) -> StepPlace:
        """Return the position of a step. If the run has not reached the step, use the latest settings."""
        epoch, begun, steps = self.history.epoch_of(step)
        # once a later epoch has started, the epoch's number of steps is recorded
        if steps is None:  # it is the last recorded epoch, which may have been cut short
            steps = self.steps_in(step, epoch)
            while steps is not None and step > begun + steps:
                epoch, begun = epoch + 1, begun + steps
                steps = self.steps_in(step, epoch)
                if steps == 0:
                    raise DataError(f"With the settings used at step {step}, epoch {epoch} has no steps.")
        return StepPlace(step, epoch, step - begun - 1, steps)

    def steps_in(self, step: int, epoch: int) -> int | None:
        """Return the number of steps in an epoch with a step's settings, or None for a stream without a length."""
        return steps_of(self.data(step, epoch), epoch)

    def data(self, step: int, epoch: int) -> TrainingData:
        """Return the training data at a step, sharded for all replicas in this process."""
        run, start = self.build(step), self.history.start_of(step)[1]
        trainer = run.task.trainer
        # the ranks' shares are not recorded, and here the loader would return rank 0's share
        if not trainer.use_distributed_sampler and start.get("processes", 1) > 1:
            raise DataError(
                "Each process in the run read its own share of the data, so each step's samples are not recorded."
            )
        every, accumulate = trainer.reload_dataloaders_every_n_epochs, trainer.accumulate_grad_batches
        # a GradientAccumulationScheduler changes the trainer when an epoch starts, and no epoch starts here
        for callback in trainer.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):
                accumulate = callback.scheduling[max(first for first in callback.scheduling if first <= epoch)]
        # a reloaded loader may depend on `current_epoch` at the time of the reload
        loaded = epoch - epoch % every if every else 0
        if (key := (id(run), loaded, accumulate)) not in self._data:
            record = self.history.near(step)
            # a resumed run keeps its original seed, not the seed in its config
            seed = record.state.seed if record else run.seed
            # all replicas in this process, since samples depend on replicas only
            layout, keyed = Layout(int(start["replicas"]), 1), trainer.reproducible != "off"
            dealing = Dealing(layout, 0, accumulate, seed, keyed=keyed)
            self._data[key] = distribute(combined(run.load_loader(loaded)), dealing, trainer, run.task)
        return self._data[key]

    def at(self, step: int) -> StepInput:
        """Return the sample indices of each replica in a step or, for a stream, the batch numbers. No data is loaded.

        Raises DataError if a sampler returns a different order each time. The run's order is then unknown.
        """
        place = self.place(step)
        data = self.data(step, place.epoch)
        if isinstance(data, StreamData):
            accumulate, replicas = data.dealing.accumulate, range(data.dealing.layout.replicas)
            # without reading a stream, only its batch numbers are known
            rounds = range(place.number * accumulate, (place.number + 1) * accumulate)
            items = [ReplicaBatch(replica, round, None, 0) for replica in replicas for round in rounds]
            return StepInput(items, 0, accumulate)
        # twice, to detect a sampler that keeps its own state
        first, again = (step_at(data, place.epoch, place.number) for _ in range(2))
        if [item.indices_by_loader for item in first.batches] != [item.indices_by_loader for item in again.batches]:
            sampler = data.source.sampler if isinstance(data.source, MapLoader) else None
            raise DataError(
                f"{type(sampler).__name__} draws a different order each time for the same epoch, so the run's order is "
                f"unknown. Make the order depend only on set_epoch(epoch) and on the global generators of torch, NumPy "
                f"or Python, which Legato seeds."
            )
        return first

    def loaded(self, step: int) -> StepInput:
        """Return a step with its batches, loaded as in the run."""
        # the workers of a loader run until it is closed
        place, opened = self.place(step), opened_loaders()
        try:
            return next(iter(self.data(step, place.epoch).epoch(place.epoch, place.number)))
        finally:
            close_loaders(opened)


def load_loader(owners: Sequence[Any], epoch: int) -> Any:
    """Return the training loader for an epoch from the first data module or task that has one.

    Raises ConfigError if none of them has a training loader.
    """
    for owner in owners:
        owner.trainer.state.epoch = epoch
        owner.prepare_data()
        owner.setup("fit")
        loader = owner.train_dataloader()
        if loader is not None:
            return loader
    raise ConfigError("Neither the data module nor the task has a train_dataloader.")


def steps_of(data: TrainingData, epoch: int) -> int | None:
    """Return the number of steps in an epoch, or None for a stream without a length."""
    if isinstance(data, DealtData):
        return data.order_and_deal(epoch)[1].steps
    # rounded up, since the last step of an epoch may have fewer batches
    return None if data.rounds is None else -(-data.rounds // data.dealing.accumulate)


def step_at(data: DealtData, epoch: int, step: int) -> StepInput:
    """Return a step of an epoch without loading its data. The `batch` of each item is None."""
    return next(data.steps(*data.order_and_deal(epoch), step, repeat(None)))


def chosen_batches(step: StepInput, replica: int | None) -> list[ReplicaBatch]:
    """Return the batches of one replica or of all replicas. Raises ConfigError for a replica without a batch."""
    batches = [item for item in step.batches if replica in (None, item.replica)]
    if not batches:
        replicas = sorted({item.replica for item in step.batches})
        raise ConfigError(
            f"replica={replica} has no batch in this step. Replicas with a batch: {', '.join(map(str, replicas))}."
        )
    return batches


def shown_samples(directory: Path, place: StepPlace, step: StepInput, replica: int | None) -> Iterator[str]:
    """Yield lines that list the samples in a step."""
    of = "" if place.steps_of_epoch is None else f" of {place.steps_of_epoch:,}"
    samples = f": {counted(step.samples, 'sample')}" if step.samples else ""
    run, number = location_of(directory), place.number + 1
    yield f"Step {place.step:,} of {run}: epoch {place.epoch:,}, step {number:,}{of} in the epoch{samples}"
    # replicas take a stream's batches in turn, so replica and round determine the batch number
    replicas = 1 + max(item.replica for item in step.batches)
    for item in chosen_batches(step, replica):
        head = f"  replica {item.replica}, batch {item.batch_idx:,}"
        if item.indices_by_loader is None:
            number = item.batch_idx * replicas + item.replica
            yield f"{head}: batch {number:,} of the stream, whose samples have no indices"
        for name, indices in (item.indices_by_loader or {}).items():
            text = f"{head}{f', loader {name}' if name else ''}: {' '.join(map(shown_sample, indices))}"
            yield textwrap.fill(text, COLUMNS, subsequent_indent="    ")


def shown_sample(index: Any) -> str:
    """Return an index as text without spaces. A user's sampler may return tuples, whose text contains spaces."""
    return str(index).replace(" ", "")


def shown_steps(lookup: SampleLookup, index: Any, until: int | None, replica: int | None) -> Iterator[str]:
    """Yield lines that list the steps that used a sample. Raises DataError for a stream."""
    last, count = lookup.history.last_step, 0
    until = min(until or last, last)
    for step in range(1, until + 1):
        place = lookup.place(step)
        for item in lookup.at(step).batches:
            if item.indices_by_loader is None:
                raise DataError(
                    "The training loader is a stream, so its samples have no indices. To list batches, use step=N."
                )
            names = [name for name, indices in item.indices_by_loader.items() if index in indices]
            if names and replica in (None, item.replica):
                count += 1
                where = f", loader {', '.join(names)}" if names != [""] else ""
                which = f"replica {item.replica}, batch {item.batch_idx:,}{where}"
                yield f"step {step:,}  epoch {place.epoch:,}, step {place.number + 1:,} in the epoch, {which}"
    yield f"Sample {shown_sample(index)} was seen {counted(count, 'time')} in {counted(until, 'step')}."


def shown_batches(task: Any, items: Sequence[ReplicaBatch]) -> Iterator[str]:
    """Yield each batch's description from `describe_batch` or, without one, its repr."""
    for item in items:
        described = task.describe_batch(item.batch)
        yield f"  replica {item.replica}, batch {item.batch_idx:,}:"
        yield textwrap.indent(pformat(item.batch) if described is None else str(described), "    ")
