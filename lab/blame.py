"""`legato samples --blame`: computes the loss and gradient of each sample in a step, before the step runs."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ..base.errors import DataError
from ..base.location import location_of
from ..base.quantities import counted
from ..base.tensors import BATCH_NORM
from ..callbacks.callback import Callback
from ..trainer.data.dealing import DealtData
from ..trainer.data.loaders import MapLoader
from ..trainer.data.randomness import KeyedDataset, kept_generators, seed_generators
from ..trainer.data.sampling import keyed_batches, mix
from ..trainer.data.shares import read_batches
from ..trainer.data.steps import ReplicaBatch
from ..trainer.masked import discarding_effects
from ..trainer.optimization.batch_weights import weight_of
from ..trainer.optimization.outputs import losses_of
from ..trainer.strategies.pieces import split
from .microscope import total_norm
from .sample_lookup import shown_sample

if TYPE_CHECKING:
    from ..tasks.task import Task
    from ..trainer.trainer import Trainer

BLAME = "blame.jsonl"
"""File in a replay's directory with one line per sample of the step."""
SHOWN = 20


class Blame(Callback):
    """Computes the loss and gradient of each sample in a step before the step runs, without changing the run.

    Each sample is loaded and augmented as in the original batch. training_step then receives it as a batch of one, with
    the same random numbers as the original batch. Batch norms use their running averages, since a single sample has no
    batch statistics.
    """

    def __init__(self, step: int, replica: int | None = None) -> None:
        self.step, self.replica = step, replica
        self._is_done = False

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Compute losses and gradients before the step's first batch.

        Raises DataError if a sample cannot form a batch of one.
        """
        step = trainer.current_run.loop.step
        if self._is_done or trainer.global_step + 1 != self.step or step is None:
            return
        self._is_done = True
        if not task.automatic_optimization:
            raise DataError(
                "--blame needs automatic optimization. With manual optimization, training_step updates the weights, "
                "so each sample would change the weights for the next one."
            )
        batch_norms = [module for module in task.modules() if isinstance(module, BATCH_NORM) and module.training]
        for module in batch_norms:
            module.training = False
        with kept_generators():
            rows = [row for item in step.batches for row in self._rows_of(trainer, task, item)]
        for module in batch_norms:
            module.training = True
        rows = [row for rank in trainer.strategy.data_ranks.gather_objects(rows) for row in rank]
        if trainer.is_global_zero and trainer.run_dir is not None:
            lines = (json.dumps({**row, "batch_norm": bool(batch_norms)}) + "\n" for row in rows)
            (trainer.run_dir / BLAME).write_text("".join(lines), encoding="utf-8")

    def _rows_of(self, trainer: "Trainer", task: "Task", item: ReplicaBatch) -> Iterator[dict[str, Any]]:
        """Yield the loss, gradient norm and weight of each sample in a batch."""
        if self.replica not in (None, item.replica):
            return
        indices = item.indices
        for number, sample in enumerate(batches_of_one(trainer, item)):
            name = f"position {number}" if indices is None else f"sample {shown_sample(indices[number])}"
            place = {"sample": name, "replica": item.replica, "batch": item.batch_idx}
            try:
                yield place | alone(trainer, task, item, sample)
            except Exception as error:
                raise DataError(
                    f"training_step fails on a single sample: {name} of replica {item.replica}, batch "
                    f"{item.batch_idx} ({type(error).__name__}: {error}). --blame requires a loss that can be computed "
                    f"for a single sample."
                ) from error


def batches_of_one(trainer: "Trainer", item: ReplicaBatch) -> list[Any]:
    """Split a batch into one batch per sample. Raises DataError if that is not possible."""
    data = trainer.current_run.training_data
    if not isinstance(data, DealtData) or item.place is None:
        try:
            return split(item.batch, [1] * item.samples)
        except DataError:
            raise DataError(
                f"Legato splits a stream's batch into samples along the first dimension of its tensors, but this "
                f"{type(item.batch).__name__} has no tensor whose first dimension has size {item.samples}."
            ) from None
    if not isinstance(data.source, MapLoader):
        raise DataError("A batch from several loaders cannot be split into single samples.")
    order, start, stop = item.place
    loader, seed = data.source.loader, data.source.seed if data.dealing.keyed else None
    # load the whole batch: each sample's augmentation continues the random stream of the previous sample
    indices = keyed_batches(order, [range(start, stop)], trainer.current_epoch)
    samples = read_batches(KeyedDataset(loader.dataset, seed, data.source.tells_epoch), loader, indices, list)[0]
    if len(samples) != item.samples:
        raise DataError(
            f"The dataset returns {counted(len(samples), 'item')} for {counted(item.samples, 'sample')}: its "
            f"__getitems__ collates the samples, so Legato cannot split them into batches of one."
        )
    return [loader.collate_fn([sample]) for sample in samples]


def alone(trainer: "Trainer", task: "Task", item: ReplicaBatch, sample: Any) -> dict[str, Any]:
    """Return a sample's loss (None if training_step skips it), gradient norm and weight in the step."""
    run, state = trainer.current_run, trainer.state
    with discarding_effects(run, item):
        batch = sample if run.transfer is None else run.transfer(sample, 0)
        seed_generators(mix(state.seed, state.global_step, item.replica, item.batch_idx))
        # False: not a replica's last batch, so no gradient reduction starts
        output = run.strategy.training_step((batch, item.batch_idx)[: run.arity], None, False)
        inputs = run.optimization.loss_inputs
        losses, gradients = losses_of(output, len(inputs)), list[torch.Tensor | None]()
        for index, loss in enumerate(losses):
            reached = None if len(losses) == 1 else inputs[index]
            trained = [weight for weight in reached or task.parameters() if weight.requires_grad]
            # not backward(), which would add to the gradients of the step and run its hooks
            keep = index + 1 < len(losses)
            gradients += torch.autograd.grad(loss, trained, retain_graph=keep, allow_unused=True)
    weight = weight_of(output)
    return {
        "loss": sum(float(loss.detach()) for loss in losses) if losses else None,
        "gradient_norm": float(total_norm([gradient for gradient in gradients if gradient is not None])),
        "weight": 1.0 if weight is None else float(weight),
    }


def shown_blame(directory: Path, step: int, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield lines that describe the samples in a step, ordered by their contribution to the gradient."""

    def share(row: dict[str, Any]) -> float:
        moved = row["gradient_norm"] * row["weight"]
        return moved if math.isfinite(moved) else math.inf

    samples = f"each of its {counted(len(rows), 'sample')} separately, with the weights from before the step"
    yield f"Step {step:,} of {location_of(directory)}: {samples}"
    weighted = len({row["weight"] for row in rows}) > 1
    for row in sorted(rows, key=share, reverse=True)[:SHOWN]:
        loss = "none" if row["loss"] is None else f"{row['loss']:.6g}"
        weight = f", weight {row['weight']:.6g}" if weighted else ""
        place = f"replica {row['replica']}, batch {row['batch']:,}"
        yield f"  {row['sample']:<16}loss {loss:<14}gradient norm {row['gradient_norm']:<14.6g}{place}{weight}"
    if len(rows) > SHOWN:
        losses = [row["loss"] for row in rows if row["loss"] is not None]
        norm = median(row["gradient_norm"] for row in rows)
        loss = f"loss {median(losses):.6g}, " if losses else ""
        yield f"  and {len(rows) - SHOWN:,} more; medians over all samples: {loss}gradient norm {norm:.6g}"
    if any(row["batch_norm"] for row in rows):
        yield "  Batch norm layers used their running averages: a single sample has no batch statistics."
