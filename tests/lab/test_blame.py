"""`legato samples --blame`: a bad sample of a step comes first, whatever batches the run had."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from replayed_folder import TWO, legato, make_folder, trained, tree
from tiny import Tiny, Two, assert_same_bits, make_data
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from legato.base.errors import DataError
from legato.lab.blame import BLAME, Blame, shown_blame

BAD = 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (),
        (*TWO, "trainer.reproducible=bitwise"),
        ("trainer.accumulate_grad_batches=2", "trainer.replicas=3"),
        (*TWO, "trainer.sync_batchnorm=true", "task.length=24"),  # whose replay has two processes, too
    ],
)
def test_the_bad_sample_of_a_step_comes_first_and_nothing_of_it_is_left(options, tmp_path, monkeypatch):
    """The step that follows has the bits of the run's. A step of the third epoch, replayed from a checkpoint."""
    make_folder(tmp_path, monkeypatch)
    run = trained(f"task.bad=[{BAD}]", *options)
    before = tree(run)
    output = legato("samples", str(run), f"index={BAD}").stdout
    step = re.findall(r"(?m)^step (\d+)", output)[2]
    lines = legato("samples", str(run), f"step={step}", "--blame").stdout.splitlines()
    assert lines[1].split()[:2] == ["sample", str(BAD)]
    samples = legato("samples", str(run), f"step={step}").stdout.splitlines()[1:]
    samples = " ".join(line.partition(": ")[2] for line in samples).split()
    assert sorted(line.split()[1] for line in lines if line.startswith("  sample")) == sorted(samples)
    assert "Batch norm layers used their running averages" in lines[-2]
    assert "bitwise identical" in lines[-1]
    assert tree(run) == before
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]


@pytest.mark.slow
def test_the_sample_whose_nan_has_ended_the_run_is_told(tmp_path, monkeypatch):
    points = make_folder(tmp_path, monkeypatch) / "points.py"
    points.write_text(points.read_text().replace("= 1e4", "= float('nan')"))
    legato("fit", "points.yaml", f"task.bad=[{BAD}]", fails=True)
    output = legato("samples", "runs/default/version_0", f"index={BAD}", "until=5").stdout
    step = re.findall(r"(?m)^step (\d+)", output)[0]
    lines = legato("samples", "runs/default/version_0", f"step={step}", "--blame").stdout.splitlines()
    assert lines[1].split()[:6] == ["sample", str(BAD), "loss", "nan", "gradient", "norm"]
    assert "nan" not in lines[2]


def rows_of(tmp_path, trainer, task, loader, step=2, **options):
    """What Blame writes in a run of 16 samples."""
    made = trainer(callbacks=[Blame(step)], **options)
    made.assigned_dir = tmp_path / "run"
    made.fit(task, loader)
    return [json.loads(line) for line in (tmp_path / "run" / BLAME).read_text().splitlines()]


def bad_data(value=1e4):
    data = make_data(16)
    data.tensors[1][BAD] = value
    return data


def first(rows):
    return (
        next(line for number, line in enumerate(shown_blame(Path("run"), 2, rows)) if number == 1)
        .split("loss")[0]
        .strip()
    )


def test_losses_and_gradients_are_those_by_hand_and_the_run_goes_on_as_without(trainer, tmp_path):
    task, same, alone = Tiny(), Tiny(), []
    rows = rows_of(tmp_path, trainer, task, DataLoader(bad_data(), 4))
    trainer(limit_train_batches=1).fit(same, DataLoader(bad_data(), 4))
    for inputs, target in list(bad_data())[4:8]:
        same.zero_grad()
        loss = same.loss((inputs[None], target[None]))
        loss.backward()
        alone.append((loss.item(), nn.utils.get_total_norm([parameter.grad for parameter in same.parameters()]).item()))
    assert [row["sample"] for row in rows] == ["sample 4", "sample 5", "sample 6", "sample 7"]
    assert [(row["loss"], row["gradient_norm"]) for row in rows] == [pytest.approx(pair, rel=1e-5) for pair in alone]
    assert first(rows) == "sample 5"
    plain = Tiny()
    trainer().fit(plain, DataLoader(bad_data(), 4))
    assert_same_bits(task, plain)


class Noisy(torch.utils.data.Dataset):
    """Samples with noise that is drawn in the order of the batch."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.randn(3), torch.randn(1)


def test_a_sample_is_augmented_as_in_its_batch(trainer, tmp_path):
    class Notes(Tiny):
        def training_step(self, batch, batch_idx):
            if self.global_step == 1:
                seen.append(batch[0])
            return self.loss(batch)

    for workers in (0, 1):
        seen = []
        rows_of(tmp_path, trainer, Notes(), DataLoader(Noisy(), 4, shuffle=True, num_workers=workers))
        assert torch.equal(torch.cat(seen[:4]), seen[4])


class Tokens(Tiny):
    """A mean over tokens, of which -1 is padding; the weight is their number."""

    def training_step(self, batch, batch_idx):
        losses = (self(batch["inputs"]) - batch["targets"]).square() * batch["mask"]
        tokens = batch["mask"].sum()
        return {"loss": losses.sum() / tokens, "weight": tokens}


def padded(samples):
    length = max(len(inputs) for inputs, _ in samples)
    pad = nn.functional.pad
    return {
        "inputs": torch.stack([pad(inputs, (0, 0, 0, length - len(inputs))) for inputs, _ in samples]),
        "targets": torch.stack([pad(targets, (0, 0, 0, length - len(targets))) for _, targets in samples]),
        "mask": torch.stack([(torch.arange(length) < len(inputs)).float()[:, None] for inputs, _ in samples]),
    }


def test_of_batches_with_token_weights_the_first_sample_is_that_with_the_largest_part_in_the_step(trainer, tmp_path):
    """Sample 4 has one token and a steeper loss than 5, which has 40 of them."""
    lengths = [1, 40, 2, 3] * 4
    data = [(torch.ones(length, 3), torch.zeros(length, 1)) for length in lengths]
    data[4], data[5] = (data[4][0], data[4][1] + 30), (data[5][0], data[5][1] + 20)
    rows = rows_of(tmp_path, trainer, Tokens(), DataLoader(data, 4, collate_fn=padded))
    assert [row["weight"] for row in rows] == [1.0, 40.0, 2.0, 3.0]
    assert max(rows, key=lambda row: row["gradient_norm"])["sample"] == "sample 4"
    assert first(rows) == "sample 5"


class Stream(IterableDataset):
    def __iter__(self):
        return iter(bad_data())


@pytest.mark.parametrize("kind", ["stream", "batches", "none"])
def test_streams_batch_samplers_and_samples_without_a_loss(kind, trainer, tmp_path):
    class Some(Tiny):
        def training_step(self, batch, batch_idx):
            return None if kind == "none" and len(batch[1]) == 1 and batch[1] < 1e3 else self.loss(batch)

    sampler = BatchSampler(SequentialSampler(range(16)), 4, False)
    batches = type("Own", (BatchSampler,), {})(sampler.sampler, 4, False)
    options = {"stream": {"batch_size": 4}, "batches": {"batch_sampler": batches}, "none": {"batch_size": 4}}[kind]
    loader = DataLoader(Stream() if kind == "stream" else bad_data(), **options)
    rows = rows_of(tmp_path, trainer, Some(), loader)
    assert len(rows) == 4
    assert first(rows) == ("position 1" if kind == "stream" else "sample 5")
    assert sum(row["loss"] is None for row in rows) == (3 if kind == "none" else 0)


def test_several_optimizers_and_accumulation_of_several_replicas(trainer, tmp_path):
    rows = rows_of(tmp_path, trainer, Two(), DataLoader(bad_data(), 2), replicas=2, accumulate_grad_batches=2, step=1)
    assert [row["replica"] for row in rows] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert first(rows) == "sample 5"


def test_a_step_whose_samples_cannot_be_alone_is_refused_with_the_reason(trainer, tmp_path):
    class Contrasts(Tiny):
        def training_step(self, batch, batch_idx):
            return (self(batch[0]).std(0)).square().sum() if len(batch[0]) > 1 else batch[0].new_zeros(())

    class Manual(Tiny):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers().step()

    class Whole(Stream):
        def __iter__(self):
            return iter([{"graph": (torch.ones(1, 3), torch.ones(1, 1)), "other": torch.ones(5)}] * 4)

    class Read(Tiny):
        def training_step(self, batch, batch_idx):
            return self.loss(batch["graph"])

        def count_samples(self, batch):
            return 3

    several = {"one": DataLoader(make_data(16), 4), "two": DataLoader(make_data(16), 4)}
    combined = type("Combined", (Tiny,), {"training_step": lambda self, batch, batch_idx: self.loss(batch["one"])})
    for task, loader, message in (
        (Contrasts(), DataLoader(make_data(16), 4), "training_step fails on a single sample: sample 4 of replica 0"),
        (Manual(), DataLoader(make_data(16), 4), "--blame needs automatic optimization"),
        (combined(), several, "A batch from several loaders cannot"),
        (Read(), DataLoader(Whole(), batch_size=None), "has no tensor whose first dimension has size 3"),
    ):
        with pytest.raises(DataError, match=message):
            rows_of(tmp_path, trainer, task, loader)


def test_the_lines_put_what_is_not_finite_first_and_tell_the_medians_of_a_large_step():
    rows = [
        {"sample": f"sample {number}", "replica": 0, "batch": 3, "loss": 1.0 * number, "gradient_norm": 2.0 * number}
        | {"weight": 1.0, "batch_norm": False}
        for number in range(64)
    ]
    rows[7] |= {"loss": math.inf, "gradient_norm": math.nan}
    lines = list(shown_blame(Path("runs/one"), 1234, rows))
    assert lines[0].startswith("Step 1,234 of runs/one: each of its 64 samples separately, with the weights from")
    assert [line.split()[1] for line in lines[1:3]] == ["7", "63"]
    assert lines[-1].startswith("  and 44 more; medians over all samples: loss 32.5")
