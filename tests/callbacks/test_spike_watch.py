"""SpikeWatch, and steps that are left out, beside runs that were told to leave them out from the start."""

import json
import logging

import numpy as np
import pytest
import torch
from resumed_run import SAMPLES, STEPS, Augmented, Net, everything, lines, loaders, make_trainer
from tiny import Tiny, make_loader

from legato.callbacks import Microscope, SpikeWatch
from legato.trainer.checkpoints import store
from legato.trainer.data.sampling import epoch_key, permutation
from legato.trainer.errors import ConfigError

BAD = int(permutation(np.array([SAMPLES - 1]), SAMPLES, epoch_key(11, 0))[0])
"""The sample that is the last of the first epoch, and so in step 5."""


class Spiky(Net):
    """Its loss is ten thousand times as large where the bad sample is."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 1e4 if batch.abs().max() > 100 else loss


def data():
    found = Augmented()
    found.inputs[BAD] = 500.0
    return found


def steps_of_bad_sample():
    """In which steps it is: 12 samples make up a step, 5 steps an epoch."""
    orders = [permutation(np.arange(SAMPLES), SAMPLES, epoch_key(11, epoch)).tolist() for epoch in range(3)]
    return [5 * epoch + order.index(BAD) // 12 + 1 for epoch, order in enumerate(orders)]


def fit(folder, *callbacks, resume=None, **arguments):
    made, task = make_trainer(folder, callbacks, **arguments), Spiky()
    made.fit(task, *loaders(dataset=data()), resume=resume)
    return made, task


def outcome(run_dir):
    """Return what the last checkpoint and the log of a run hold, but for times and what is judged beside it."""
    saved = store.read_checkpoint(run_dir / "checkpoints" / f"step-{STEPS:08d}")
    state = {name: value for name, value in saved["state"].items() if name not in ("elapsed", "skipped_steps")}
    weights = torch.cat([value.flatten().double() for value in saved["state_dict"].values()])
    moments = [
        value.flatten().double()
        for one in saved["optimizer_states"][0]["state"].values()
        for value in map(torch.as_tensor, one.values())
    ]
    points = {
        step: {name: value for name, value in point.items() if name != "skipped_steps"}
        for step, point in lines(run_dir).items()
    }
    return state, weights.tolist(), torch.cat(moments).tolist(), points, saved["callbacks"]["SpikeWatch"]


def watch(then="warn", **options):
    return SpikeWatch(factor=100, window=3, then=then, **options)


TWO = {"devices": 2, "strategy": "ddp"}
FSDP = {"devices": 2, "strategy": {"name": "fsdp", "shard_blocks": 8}}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [{}, TWO, FSDP])
def test_a_rewound_run_is_that_which_was_told_to_leave_the_spikes_out(tmp_path, processes):
    """Dropout, batch norm, AdamW, two schedules, torchmetrics objects; to the bit, also in two processes."""
    spikes = steps_of_bad_sample()
    rewound, _ = fit(tmp_path / "rewound", watch("rewind"), **processes)
    assert rewound.state.left_out == spikes
    told, _ = fit(tmp_path / "told", watch(), leave_out_steps=spikes)
    assert outcome(rewound.run_dir) == outcome(told.run_dir)
    records = [json.loads(line) for line in (rewound.run_dir / "spikes.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == spikes
    assert all(BAD in [i for one in r["samples"] for i in one["indices"][""]] for r in records)
    assert records[0]["loss"] > 1e3 > records[0]["limits"]["loss"]
    seen = {"gradients/net.0", "weights/net.4"} | ({"activations/net.2.kurtosis"} if processes is not FSDP else set())
    assert seen <= records[0]["modules"].keys()
    assert not (told.run_dir / "spikes.jsonl").exists()


@pytest.mark.slow
def test_the_steps_left_out_are_part_of_the_state(tmp_path):
    """A resume without the argument goes on to leave them out; a margin takes the steps beside a spike, too."""
    spikes = steps_of_bad_sample()
    around = []
    for step in spikes:
        around += [] if step in around else [step - 1, step, step + 1]  # a neighbour may be a spike itself
    rewound, _ = fit(tmp_path / "rewound", watch("rewind", margin=1))
    assert rewound.state.left_out == around
    told = {"leave_out_steps": around}
    fit(tmp_path / "told", watch(), max_epochs=1, **told)
    resumed, _ = fit(tmp_path / "told", watch(), resume="auto")
    assert outcome(rewound.run_dir)[1:3] == outcome(resumed.run_dir)[1:3]
    assert resumed.state.left_out == around


MESH = {"devices": 2, "strategy": {"name": "mesh", "data": 2}, "reproducible": "order"}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [{}, FSDP, MESH])
def test_a_skipped_spike_is_a_step_that_was_left_out(tmp_path, processes):
    skipped, one = fit(tmp_path / "skipped", watch("skip"), **processes)
    told, other = fit(tmp_path / "told", watch(), leave_out_steps=steps_of_bad_sample(), **processes)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(one.parameters(), other.parameters(), strict=True))
    if not processes:
        assert torch.equal(everything(skipped, one), everything(told, other))
    assert skipped.state.skipped_steps == 3
    assert skipped.callbacks[2].spikes == steps_of_bad_sample()


@pytest.mark.slow
def test_a_warning_names_the_samples_and_changes_no_bit(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "legato"):
        warned, one = fit(tmp_path / "warned", watch())
    plain, other = fit(tmp_path / "plain")
    assert torch.equal(everything(warned, one), everything(plain, other))
    assert f"Step {steps_of_bad_sample()[0]} is a spike" in caplog.text
    assert f" {BAD}" in caplog.text.split("Its samples:")[1]
    assert "skipped_steps" not in str(lines(warned.run_dir))


def test_steps_left_out_count_and_take_no_other_samples(trainer):
    whole, part = Tiny(), Tiny()
    first, second = trainer(), trainer(leave_out_steps=[2, 4])
    first.fit(whole, make_loader(20))
    second.fit(part, make_loader(20))
    assert (second.global_step, second.state.samples_seen, first.state.samples_seen) == (5, 12, 20)
    assert [torch.equal(one, other) for one, other in zip(part.seen, whole.seen[::2], strict=True)] == [True] * 3
    with pytest.raises(ConfigError, match="leave_out_steps"):
        trainer(leave_out_steps=[0])


def test_a_new_level_is_only_warned_of(trainer):
    class Shifts(Tiny):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (1000.0 if self.global_step >= 6 else 1.0)

    made = trainer(callbacks=[SpikeWatch(20, 4, "skip", most_in_a_row=2)], max_epochs=3)
    made.fit(Shifts(lr=1e-5), make_loader(20))
    assert made.state.skipped_steps == 2
    assert made.callbacks[0].spikes[:3] == [7, 8, 9]
    assert len(made.callbacks[0].spikes) < 6


def test_without_a_checkpoint_the_update_is_dropped(trainer, caplog):
    class Once(Tiny):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (1000.0 if self.global_step == 4 else 1.0)

    with caplog.at_level(logging.WARNING, "legato"):
        made = trainer(callbacks=[SpikeWatch(20, 4, "rewind")])
        made.fit(Once(lr=1e-5), make_loader(20))
    assert "no checkpoint before step 5" in caplog.text
    assert (made.state.skipped_steps, made.state.left_out) == (1, [])


@pytest.mark.slow
def test_what_cannot_be_judged_is_refused(trainer):
    class Manual(Tiny):
        automatic_optimization = False

    with pytest.raises(ConfigError, match="SpikeWatch judges a step"):
        trainer(callbacks=[SpikeWatch()]).fit(Manual(), make_loader(20))
    pipeline = {"strategy": {"name": "mesh", "pipeline": 2}, "devices": 2}
    for callback in (SpikeWatch(), Microscope()):
        with pytest.raises(ConfigError, match=f"{type(callback).__name__} looks at all modules"):
            trainer(callbacks=[callback], **pipeline).fit(Tiny(), make_loader(20))
    elastic = {"strategy": {"name": "ddp", "elastic": True}, "devices": 2}
    with pytest.raises(ConfigError, match="needs processes that stay"):
        trainer(callbacks=[SpikeWatch(then="rewind")], **elastic).fit(Tiny(), make_loader(20))
    for options, said in (
        ({"then": "rewnid"}, "Did you mean 'rewind'"),
        ({"window": 1}, "window"),
        ({"factor": 0}, "positive"),
    ):
        with pytest.raises(ConfigError, match=said):
            SpikeWatch(**options)
