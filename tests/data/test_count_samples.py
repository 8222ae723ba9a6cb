"""Batches of streams whose tensors differ in their first dimension: the task says how many samples they have."""

import pytest
import torch
from torch import nn

import legato as lg
from legato.base.errors import DataError

SIZES = (8, 2, 6, 4)


class Stream:
    """Batches of several sizes, each with two numbers about it in front."""

    def __init__(self):
        values = torch.arange(float(sum(SIZES)), dtype=torch.float64)
        self.batches = [{"meta": torch.zeros(2), "scale": torch.tensor(1.0), "x": part} for part in values.split(SIZES)]

    def __iter__(self):
        return iter(self.batches)


class Undecided(lg.Task):
    """A weight whose gradient is the mean of the samples."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.gradients = []

    def training_step(self, batch):
        return (self.weight * batch["x"]).mean()

    def validation_step(self, batch):
        self.log("mean", batch["x"].mean())

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(self.weight.grad.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counting(Undecided):
    def count_samples(self, batch):
        return len(batch["x"])


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"replicas": 2}], ids=str)
def test_the_task_counts_the_samples_of_a_batch(trainer, options):
    task, made = Counting(), trainer(**options)
    made.fit(task, Stream(), Stream())
    samples = list(range(sum(SIZES)))
    steps = samples[: SIZES[0] + SIZES[1]], samples[SIZES[0] + SIZES[1] :]
    assert task.gradients == pytest.approx([sum(step) / len(step) for step in steps], rel=1e-12)
    assert made.state.samples_seen == len(samples)
    assert made.callback_metrics["mean"].item() == pytest.approx(sum(samples) / len(samples), rel=1e-6)


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_without_a_count_it_is_refused_before_the_first_step(trainer, stage):
    task = Undecided()
    with pytest.raises(DataError, match=r"differ in their first dimension \(2, 8\).* a method count_samples\(batch\)"):
        getattr(trainer(), stage)(task, Stream())
    assert task.gradients == []


def test_tensors_without_dimensions_do_not_count(trainer):
    batches = [{"scale": torch.tensor(2.0), "x": torch.ones(size, dtype=torch.float64)} for size in SIZES]
    made = trainer()
    made.fit(Undecided(), batches)
    assert made.state.samples_seen == sum(SIZES)
