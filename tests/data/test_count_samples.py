"""Streams with batches whose tensors differ in their first dimension: the task counts the samples."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import legato as lg
from legato.base.errors import DataError
from legato.base.tensors import require_samples

SIZES = (8, 2, 6, 4)


class Stream:
    """Batches of several sizes, each with two numbers about it in front."""

    def __init__(self):
        values = torch.arange(float(sum(SIZES)), dtype=torch.float64)
        self.batches = [{"meta": torch.zeros(2), "scale": torch.tensor(1.0), "x": rows} for rows in values.split(SIZES)]

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
    with pytest.raises(DataError, match=r"along the first dimension differ \(2, 8\).* count_samples\(self, batch\)"):
        getattr(trainer(), stage)(task, Stream())
    assert task.gradients == []


def test_tensors_without_dimensions_do_not_count(trainer):
    batches = [{"scale": torch.tensor(2.0), "x": torch.ones(size, dtype=torch.float64)} for size in SIZES]
    made = trainer()
    made.fit(Undecided(), batches)
    assert made.state.samples_seen == sum(SIZES)


# --- how many samples a batch has -------------------------------------------------------------------------------------
class Graphs:
    """The attributes of PyG's Batch."""

    num_graphs = 4


packed = pack_sequence([torch.ones(4), torch.ones(3), torch.ones(2)])
images = [torch.ones(3, 8, 9), torch.ones(3, 7, 8)]
boxes = [{"boxes": torch.ones(5, 4)}, {"boxes": torch.ones(2, 4)}]
flattened = {"input_ids": torch.ones(1, 9), "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])}
CASES = [
    (packed, None, 3),
    ((packed, torch.ones(3)), None, 3),
    (Graphs(), None, 4),
    ([Graphs(), torch.ones(4)], None, 4),
    (torch.nested.nested_tensor([torch.ones(4, 2), torch.ones(3, 2)], layout=torch.jagged), None, 2),
    ({"scale": torch.tensor(1.0), "x": torch.ones(4, 3)}, None, 4),
    ({"scale": torch.ones(1), "x": torch.ones(4, 3)}, 4, 4),
    (images, 2, 2),
    ([torch.ones(3, 8, 8)] * 2, 2, 2),
    ((images, boxes), 2, 2),
    ([torch.ones(32, 7, 5), torch.ones(32, 3, 5)], 32, 32),  # fields, and no images
    ([torch.ones(3, 7, 5), torch.ones(3, 3, 5)], 3, 3),  # their last batch
    ((torch.ones(32, 3), torch.ones(32)), 1, 32),  # a batch that the dataset made, as a single item
    (flattened, 3, 3),
    (flattened, 1, 1),  # a row that the dataset packed
    ({"input_ids": torch.ones(1, 9), "cu_seqlens": torch.tensor([0, 4, 6, 9])}, 3, 3),
]


@pytest.mark.parametrize(("batch", "items", "samples"), CASES)
def test_a_batch_says_how_many_samples_it_has(batch, items, samples):
    assert require_samples(batch, items) == samples


@pytest.mark.parametrize("batch", [images, (images, boxes), flattened, {"scale": torch.ones(1), "x": torch.ones(4)}])
def test_what_it_does_not_say_is_asked_of_the_task(batch):
    with pytest.raises(DataError, match=r"Define count_samples\(self, batch\)"):
        require_samples(batch)
