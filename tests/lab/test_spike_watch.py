"""SpikeWatch: which steps are spikes, and the update that is left out; beside runs without the bad samples."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from resumed_run import SAMPLES, Augmented, Net, everything, lines, loaders, make_trainer
from shared_processes import run_cases
from tiny import Tiny, assert_same_bits, make_loader
from torch import nn

import legato as lg
from legato.base.errors import ConfigError
from legato.lab import Microscope, SpikeWatch
from legato.trainer.data.sampling import epoch_key, permutation

BAD = int(permutation(np.array([SAMPLES - 1]), SAMPLES, epoch_key(11, 0))[0])
"""The sample that is the last of the first epoch, and so in step 5."""


class Spiky(Net):
    """Its loss is ten thousand times as large where the bad sample is."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 1e4 if batch.abs().max() > 100 else loss


def data():
    dataset = Augmented()
    dataset.inputs[BAD] = 500.0
    return dataset


def steps_of_bad_sample():
    """In which steps of two epochs it is: 12 samples make up a step, 5 steps an epoch."""
    orders = [permutation(np.arange(SAMPLES), SAMPLES, epoch_key(11, epoch)).tolist() for epoch in range(2)]
    return [5 * epoch + order.index(BAD) // 12 + 1 for epoch, order in enumerate(orders)]


def fit(folder, *callbacks, resume=None, **arguments):
    made, task = make_trainer(folder, callbacks, **arguments), Spiky()
    made.fit(task, *loaders(dataset=data()), resume=resume)
    return made, task


def watch(then="warn", **options):
    return SpikeWatch(factor=100, window=3, then=then, **options)


def spikes_of(trainer):
    return next(callback for callback in trainer.callbacks if isinstance(callback, SpikeWatch))


def records(trainer):
    return [json.loads(line) for line in (trainer.run_dir / "spikes.jsonl").read_text().splitlines()]


LAYOUTS = {
    "one": {},
    "two": {"devices": 2, "strategy": "ddp"},
    "fsdp": {"devices": 2, "strategy": {"name": "fsdp", "shard_blocks": 8}},
    "mesh": {"devices": 2, "strategy": {"name": "mesh", "data": 2}, "reproducible": "order"},
}


def outcome(folder, layout, then):
    """Return what a run comes to: plain, or with a watch that warns or skips."""
    watches = [] if then == "plain" else [watch(then)]
    trainer, task = fit(folder, *watches, checkpoint=False, max_epochs=2, **LAYOUTS[layout])
    return {
        "task": task,
        "everything": everything(trainer, task) if layout == "one" else None,
        "spikes": None if then == "plain" else spikes_of(trainer).spikes,
        "records": None if then == "plain" else records(trainer),
        "skipped": trainer.state.skipped_steps,
        "lines": lines(trainer.run_dir),
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return what each run comes to, by its layout and what the watch does; those of two processes from one start."""
    folder = tmp_path_factory.mktemp("outcomes")
    cases = {
        (layout, then): partial(outcome, folder / f"{layout} {then}", layout, then)
        for layout in LAYOUTS
        for then in ("plain", "warn", "skip")
    }
    results = run_cases({name: case for name, case in cases.items() if name[0] != "one"}, 2, folder / "cases")
    results.update({name: case() for name, case in cases.items() if name[0] == "one"})
    return results


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_warning_changes_no_bit_and_comes_from_the_whole_step(outcomes, layout):
    warned, plain = outcomes[layout, "warn"], outcomes[layout, "plain"]
    assert_same_bits(warned["task"], plain["task"])
    if layout == "one":
        assert torch.equal(warned["everything"], plain["everything"])
    assert warned["spikes"] == [record["step"] for record in warned["records"]] == steps_of_bad_sample()
    assert warned["records"][0]["loss"] > 1e3 > warned["records"][0]["limits"]["loss"]
    assert "skipped_steps" not in str(warned["lines"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_update_of_a_spike_is_left_out_alike_on_all_processes(outcomes, layout):
    skipped, alone = outcomes[layout, "skip"], outcomes["one", "skip"]
    assert skipped["spikes"] == steps_of_bad_sample()
    assert skipped["skipped"] == 2
    for ours, theirs in zip(skipped["task"].parameters(), alone["task"].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    if layout == "two":
        assert skipped["records"] == alone["records"]


@pytest.mark.slow
def test_a_resume_goes_on_with_the_range(tmp_path):
    uninterrupted, expected = fit(tmp_path / "whole", watch("skip"))
    fit(tmp_path / "parts", watch("skip"), max_steps=7)
    resumed, task = fit(tmp_path / "parts", watch("skip"), resume="auto")
    assert_same_bits(expected, task)
    assert records(resumed) == records(uninterrupted)
    assert spikes_of(resumed).state_dict() == spikes_of(uninterrupted).state_dict()


class Scaled(Tiny):
    """Multiplies the loss of some steps, counted from 1, and that of all others by `usual`."""

    def __init__(self, factors, lr=1e-12, usual=1.0):
        super().__init__(lr)
        self.factors, self.usual, self.after = factors, usual, {}

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.factors.get(self.global_step + 1, self.usual)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.after[self.global_step] = torch.cat([parameter.detach().flatten() for parameter in self.parameters()])

    def steps_that_moved(self):
        return [step for step in range(2, 21) if not torch.equal(self.after[step], self.after[step - 1])]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16-mixed"},
        {"precision": "16-mixed"},
        {"nan": "skip"},
        {"gradient_clip_val": 1e-3},
        {"accumulate_grad_batches": 2},
        {"replicas": 2},
        {"nan": "skip", "gradient_clip_val": 1e-3, "accumulate_grad_batches": 2, "replicas": 2},
    ],
    ids=str,
)
def test_one_step_is_left_out_and_no_other(trainer, options):
    """Not even momentum moves a weight in it."""
    batches = options.get("accumulate_grad_batches", 1) * options.get("replicas", 1)
    task = Scaled({14: 0.1}, lr=10.0, usual=1e-4)
    made = trainer(callbacks=[SpikeWatch(then="skip")], max_epochs=4, **options)
    made.fit(task, make_loader(20 * batches))
    assert spikes_of(made).spikes == [14]
    assert task.steps_that_moved() == [step for step in range(2, 21) if step != 14]
    assert made.state.skipped_steps == 1


def test_overflows_that_the_loss_scale_handles_are_no_spikes(trainer):
    """The first scales of 16-mixed overflow; each such step is skipped by the scaler, and judged by nobody."""
    seen = []

    class Overflows(Scaled):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(float(self.trainer.strategy.precision.scaler.get_scale()))

    factors = dict.fromkeys((12, 15, 16, 17, 18), 1e5)
    for then in ("warn", "skip"):
        seen.clear()
        made = trainer(callbacks=[SpikeWatch(then=then)], max_epochs=4, precision="16-mixed")
        made.fit(Overflows(factors), make_loader(20))
        assert min(seen) < seen[0]
        assert spikes_of(made).spikes == []


def test_steps_that_nan_skips_are_not_judged_and_leave_no_loss_behind(trainer):
    factors = dict.fromkeys((12, 13, 14), math.nan)
    for then in ("warn", "skip"):
        made = trainer(callbacks=[SpikeWatch(then=then)], max_epochs=4, nan="skip")
        made.fit(Scaled(factors), make_loader(20))
        assert (made.state.skipped_steps, spikes_of(made).spikes) == (3, [])


def test_a_gradient_whose_norm_overflows_lives_as_without_the_watch(trainer):
    """In float32 the norm of gradients above 1e19 is infinite; clipping multiplies them by zero."""
    tasks = []
    for callbacks in ([], [SpikeWatch()]):
        task = Scaled({13: 1e25})
        made = trainer(callbacks=callbacks, max_epochs=4, gradient_clip_val=1.0, nan="ignore")
        made.fit(task, make_loader(20))
        assert all(parameter.isfinite().all() for parameter in task.parameters())
        tasks.append(task)
    assert_same_bits(*tasks)
    assert spikes_of(made).spikes == [13]


def test_a_step_is_judged_by_the_mean_over_its_samples(trainer):
    """The last batch of the last step has two samples, the others four."""

    losses = []

    class Remembers(Tiny):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            losses.append((loss.item(), len(batch[0])))
            return loss

    made = trainer(callbacks=[SpikeWatch()], accumulate_grad_batches=2)
    made.fit(Remembers(lr=0.1), make_loader(14))
    steps = [losses[:2], losses[2:]]
    expected = [sum(loss * samples for loss, samples in step) / sum(samples for _, samples in step) for step in steps]
    assert [loss for _, loss, _ in spikes_of(made).state_dict()["range"]] == pytest.approx(expected)


def test_steps_are_judged_from_the_tenth_on(trainer):
    made = trainer(callbacks=[SpikeWatch()], max_epochs=4)
    made.fit(Scaled({5: 1e6, 11: 1e6}), make_loader(20))
    assert spikes_of(made).spikes == [11]


def test_a_new_level_is_only_warned_of_but_never_one_that_is_not_finite(trainer):
    for factor, skipped in ((1000.0, 2), (math.nan, 14)):
        made = trainer(callbacks=[SpikeWatch(20, 4, "skip", most_in_a_row=2)], max_epochs=4, nan="ignore")
        made.fit(Scaled(dict.fromkeys(range(7, 21), factor)), make_loader(20))
        assert made.state.skipped_steps == skipped
        assert spikes_of(made).spikes[:3] == [7, 8, 9]


def test_two_optimizers_are_judged_by_the_norm_of_all_gradients(trainer):
    class Two(Scaled):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss, loss * self.factors.get(self.global_step + 1, 1.0)

        def configure_optimizers(self):
            first, second = self.model[0], self.model[2]
            return [torch.optim.SGD(layer.parameters(), lr=1e-5) for layer in (first, second)]

    made = trainer(callbacks=[SpikeWatch()], max_epochs=4)
    made.fit(Two({15: 100.0}), make_loader(20))
    assert spikes_of(made).spikes == [15]
    with pytest.raises(ConfigError, match="needs 1 optimizer with 1 update per step, got several"):
        trainer(callbacks=[SpikeWatch(then="skip")]).fit(Two({}), make_loader(20))


def test_sparse_gradients_are_measured(trainer):
    class Sparse(lg.Task):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 2, sparse=True)

        def training_step(self, batch, batch_idx):
            return self.table(torch.arange(3)).sum() * (100.0 if self.global_step == 14 else 1.0)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-5)

    made = trainer(callbacks=[SpikeWatch()], max_epochs=4)
    made.fit(Sparse(), make_loader(20))
    assert spikes_of(made).spikes == [15]


@pytest.mark.slow
def test_what_cannot_be_judged_is_refused(trainer):
    class Manual(Tiny):
        automatic_optimization = False

    class Closures(Tiny):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigError, match="SpikeWatch checks each step"):
        trainer(callbacks=[SpikeWatch()]).fit(Manual(), make_loader(20))
    with pytest.raises(ConfigError, match="got LBFGS, which evaluates the loss itself"):
        trainer(callbacks=[SpikeWatch()]).fit(Closures(), make_loader(20))
    pipeline = {"strategy": {"name": "mesh", "pipeline": 2}, "devices": 2}
    for callback in (SpikeWatch(), Microscope()):
        with pytest.raises(ConfigError, match=f"{type(callback).__name__} needs all modules"):
            trainer(callbacks=[callback], **pipeline).fit(Tiny(), make_loader(20))
    for options, message in (
        ({"then": "rewind"}, "then must be 'warn' or 'skip'"),
        ({"then": "skpi"}, "Did you mean 'skip'"),
        ({"window": 1}, "window"),
        ({"factor": 0}, "factor"),
    ):
        with pytest.raises(ConfigError, match=message):
            SpikeWatch(**options)
