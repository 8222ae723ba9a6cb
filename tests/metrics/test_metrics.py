"""Logged values are named, weighted and reduced as requested, and read from the device only at logging points."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Says, Tiny, logs, make_data, make_loader

import legato as lg
from legato.base.errors import TaskError

SIZES = [4, 4, 4, 4, 2]
MEAN = sum(size * index for index, size in enumerate(SIZES)) / 18


class StopsAt(lg.Callback):
    """Asks the run to stop after a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        trainer.should_stop |= trainer.global_step >= self.step


# --- names ------------------------------------------------------------------------------------------------------------
def test_in_training_the_default_is_by_step(play):
    made = play(Says(logs()), max_epochs=2)
    assert made.memory.of("x") == [(step + 1, float(step % 5)) for step in range(10)]
    assert made.callback_metrics["x"] == 4.0
    assert not {"x_step", "x_epoch"} & set(made.callback_metrics)


def test_by_epoch(play):
    made = play(Says(logs(on_step=False, on_epoch=True)), max_epochs=2)
    assert made.memory.of("x") == [(5, pytest.approx(MEAN)), (10, pytest.approx(MEAN))]


def test_by_step_and_epoch(play):
    made = play(Says(logs(on_step=True, on_epoch=True)))
    assert made.memory.of("x_step") == [(step + 1, float(step)) for step in range(5)]
    assert made.memory.of("x_epoch") == [(5, pytest.approx(MEAN))]
    assert made.memory.of("x") == []
    assert {name for name in made.callback_metrics if name[0] == "x"} == {"x", "x_step", "x_epoch"}
    assert made.callback_metrics["x"] == made.callback_metrics["x_epoch"] == pytest.approx(MEAN)


def test_neither_by_step_nor_by_epoch_is_refused(play):
    with pytest.raises(TaskError, match="is not useful: it discards a value"):
        play(Says(logs(on_step=False, on_epoch=False)))


@pytest.mark.parametrize("options", [{}, {"on_step": True, "on_epoch": False}, {"on_step": False}])
def test_in_validation_it_is_by_epoch(play, options):
    made = play(Says(lambda *arguments: None, logs(**options)))
    assert made.memory.of("x") == [(5, pytest.approx(MEAN))]


def test_points_are_written_every_n_steps_with_the_values_of_that_step(play):
    made = play(Says(logs()), max_epochs=2, log_every_n_steps=3)
    assert made.memory.of("x") == [(3, 2.0), (6, 0.0), (9, 3.0), (10, 4.0)]
    assert [metrics["epoch"] for _, metrics in made.memory.points if "x" in metrics] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({"max_epochs": 3}, 15),
        ({"max_steps": 7, "max_epochs": None}, 7),
        ({"max_epochs": 3, "callbacks": [StopsAt(8)]}, 8),
        ({"max_epochs": 3, "min_steps": 11, "callbacks": [StopsAt(8)]}, 11),
    ],
)
@pytest.mark.parametrize("saves", [False, True])
def test_the_last_step_is_a_point(play, options, last, saves):
    if saves:
        saving = lg.callbacks.Checkpoint(every_n_train_steps=1)
        options = {**options, "callbacks": [*options.get("callbacks", ()), saving], "enable_checkpointing": True}
    made = play(Says(logs()), log_every_n_steps=50, **options)
    assert made.memory.of("x") == [(last, float((last - 1) % 5))]


def test_a_run_shorter_than_the_interval_says_so(play, caplog):
    with caplog.at_level("INFO", logger="legato"):
        play(Says(logs()), log_every_n_steps=50, max_epochs=3)
        play(Says(logs()), log_every_n_steps=5, max_epochs=3)
        play(Says(logs()), log_every_n_steps=50, max_epochs=-1, max_steps=50)
    messages = [record.message for record in caplog.records if "log_every_n_steps" in record.message]
    assert len(messages) == 1
    assert messages[0].startswith(
        "The run has 15 steps, fewer than log_every_n_steps=50, so only its last step is logged"
    )


def test_a_value_that_is_not_of_the_newest_step_is_not_its_point(play):
    def first_only(task, batch, batch_idx):
        if batch_idx == 0:
            task.log("x", 1.0)

    assert play(Says(first_only)).memory.of("x") == [(1, 1.0)]


def test_who_gets_it(play):
    def say(task, batch, batch_idx):
        task.log("bar", 1.0, prog_bar=True, logger=False)
        task.log("both", 2.0, prog_bar=True, on_epoch=True)
        task.log("none", 3.0, logger=False)

    made = play(Says(say))
    assert made.memory.of("bar") == made.memory.of("none") == []
    assert len(made.memory.of("both_step")) == 5
    assert made.progress_bar_metrics == {"bar": 1.0, "both_step": 2.0, "both_epoch": 2.0}
    assert set(made.logged_metrics) == {"both_step", "both_epoch"}
    assert {"bar", "both", "none"} <= set(made.callback_metrics)


def test_arguments_of_lightning_that_are_not_needed_are_taken(play):
    made = play(
        Says(logs(enable_graph=True, sync_dist=True, sync_dist_group=None, metric_attribute="x", rank_zero_only=True))
    )
    assert len(made.memory.of("x")) == 5


def test_log_dict(play):
    def say(task, batch, batch_idx):
        task.log_dict({"a": 1.0, "b": torch.tensor(2.0)}, on_epoch=True, on_step=False)

    made = play(Says(say))
    assert made.memory.of("a") == [(5, 1.0)]
    assert made.memory.of("b") == [(5, 2.0)]


def test_log_dict_of_a_task_with_a_log_of_its_own_calls_it(play):
    class Prefixed(Tiny):
        def log(self, name, value, *arguments, **options):
            super().log(f"own/{name}", value, *arguments, **options)

        def training_step(self, batch, batch_idx):
            self.log_dict({"a": 1.0, "b": 2.0}, batch_size=3, on_step=True)
            return self.loss(batch)

    made = play(Prefixed())
    assert made.memory.of("own/a")[0] == (1, 1.0)
    assert made.memory.of("a") == []


# --- reduction --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("reduce_fx", "value"),
    [
        ("mean", MEAN),
        (torch.mean, MEAN),
        ("avg", MEAN),
        ("sum", 10.0),
        (sum, 10.0),
        (torch.sum, 10.0),
        ("min", 0.0),
        (min, 0.0),
        (torch.amin, 0.0),
        ("max", 4.0),
        (torch.max, 4.0),
    ],
)
def test_reductions(play, reduce_fx, value):
    made = play(Says(logs(on_step=False, on_epoch=True, reduce_fx=reduce_fx)))
    assert made.memory.of("x") == [(5, pytest.approx(value))]


@pytest.mark.parametrize("kind", ["min", "max"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("bad", range(5))
def test_the_extreme_of_values_with_a_nan_is_nan(play, kind, replicas, bad):
    first_of_bad = make_data(18).tensors[0][4 * bad]

    def say(task, batch, batch_idx):
        value = math.nan if torch.equal(batch[0][0], first_of_bad) else batch[0].mean().item()
        task.log("x", value, reduce_fx=kind)

    made = play(Says(lambda *arguments: None, say), replicas=replicas)
    assert math.isnan(made.callback_metrics["x"])


def test_a_batch_size_of_ones_own_is_the_weight(play):
    made = play(Says(logs(on_step=False, on_epoch=True, batch_size=7)))
    assert made.memory.of("x") == [(5, pytest.approx(2.0))]


@pytest.mark.parametrize(("replicas", "accumulate"), [(1, 2), (2, 1), (3, 2)])
def test_a_step_of_several_batches_has_one_value_weighted_by_samples(play, replicas, accumulate):
    def say(task, batch, batch_idx):
        task.log("mean", batch[0].mean())

    made = play(Says(say), replicas=replicas, accumulate_grad_batches=accumulate)
    inputs, size = make_data(18).tensors[0], 4 * replicas * accumulate
    for step, (_, value) in enumerate(made.memory.of("mean")):
        assert value == pytest.approx(inputs[step * size :][:size].mean().item(), rel=1e-5)
    assert len(made.memory.of("mean")) == -(-18 // size)


def test_the_epoch_mean_of_the_loss_is_the_mean_over_samples(play):
    class Still(Tiny):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss * 0

    task = Still()
    made = play(task)
    with torch.no_grad():
        mean_loss = task.loss(make_data(18).tensors).item()
    assert made.memory.of("loss") == [(5, pytest.approx(mean_loss, rel=1e-6))]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=30),
    st.sampled_from(["mean", "sum", "min", "max"]),
)
def test_any_values_in_any_order_of_replicas(values, kind):
    from legato.trainer.metrics.log import Metrics

    metrics = Metrics(None, processes=1, task=torch.nn.Linear(1, 1))
    metrics.open("train")
    for value, samples, replica in values:
        metrics.open_batch(replica, samples)
        metrics.log("x", value, None, (False, None, False, True, kind, True, False, False))
    numbers, weights = np.array([value for value, _, _ in values]), [samples for _, samples, _ in values]
    expected = np.average(numbers, weights=weights) if kind == "mean" else getattr(np, kind)(numbers)
    assert metrics.reduce_epoch().all == {"x": pytest.approx(expected, rel=1e-9, abs=1e-6)}


# --- where it may be logged -------------------------------------------------------------------------------------------
def test_hooks_may_log(play):
    class Hooked(Tiny):
        def on_train_start(self):
            self.log("train_start", 9.0)

        def on_train_epoch_start(self):
            self.log("epoch_start", float(self.current_epoch))

        def on_train_batch_start(self, batch, batch_idx):
            self.log("batch_start", float(batch_idx))

        def on_before_optimizer_step(self, optimizer):
            self.log("norm", self.model[0].weight.grad.norm())

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log("batch_end", float(batch_idx), on_epoch=True)

        def on_train_epoch_end(self):
            self.log("epoch_end", 10.0 + self.current_epoch)

        def validation_step(self, batch, batch_idx):
            pass

        def on_validation_epoch_start(self):
            self.log("val_start", 3.0)

        def on_validation_epoch_end(self):
            self.log("val_end", 20.0 + self.current_epoch)

    for options in ({}, {"limit_val_batches": 0}, {"val_check_interval": 2}):
        made = play(Hooked(), max_epochs=2, **options)
        of = made.memory.of
        assert of("train_start") == [(5, 9.0)]
        assert of("epoch_start") == [(5, 0.0), (10, 1.0)]
        assert of("epoch_end") == [(5, 10.0), (10, 11.0)]
        assert [value for _, value in of("batch_start")] == [0.0, 1.0, 2.0, 3.0, 4.0] * 2
        assert [step for step, _ in of("norm")] == list(range(1, 11))
        assert of("batch_end_epoch") == [(5, pytest.approx(MEAN)), (10, pytest.approx(MEAN))]
        steps = {None: [5, 10], 0: [], 2: [2, 4, 7, 9]}[
            options.get("val_check_interval", options.get("limit_val_batches"))
        ]
        assert of("val_end") == [(step, 20.0 + (step > 5)) for step in steps]
        assert of("val_start") == [(step, 3.0) for step in steps]


def test_a_resumed_epoch_has_what_its_hooks_logged_between_steps_once(tmp_path, trainer):
    class Hooked(Tiny):
        def training_step(self, batch, batch_idx):
            self.log("batches", 1.0, on_epoch=True, reduce_fx="sum")
            return self.loss(batch)

        def on_train_epoch_start(self):
            self.log("started", 1.0, reduce_fx="sum")

        def on_train_epoch_end(self):
            self.log("ended", 1.0, reduce_fx="sum")

    cut = trainer(max_steps=3)
    cut.fit(Hooked(), make_loader(18))
    cut.save_checkpoint(tmp_path / "cut")
    resumed = trainer(max_epochs=1)
    resumed.fit(Hooked(), make_loader(18), resume=tmp_path / "cut")
    values = {name: float(value) for name, value in resumed.callback_metrics.items()}
    assert (values["started"], values["ended"], values["batches_epoch"]) == (1.0, 1.0, 5.0)


def test_callbacks_log_through_the_task(play):
    class Logs(lg.Callback):
        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            task.log("mine", outputs["loss"] * 2)

    made = play(Tiny(), callbacks=Logs())
    assert len(made.memory.of("mine")) == 5


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end", "on_validation_end", "on_fit_start"])
def test_where_nothing_would_become_of_it_it_is_refused(play, hook):
    task = Says(lambda *arguments: None)
    setattr(task, hook, lambda: task.log("lost", 1.0))
    with pytest.raises(TaskError, match=r"log\('lost'\) was called outside any step or epoch"):
        play(task)


def test_outside_of_a_run_it_is_refused():
    with pytest.raises(RuntimeError, match="not attached to a Trainer"):
        Tiny().log("x", 1.0)


def test_one_name_for_steps_and_for_the_epochs_own_value_is_two_series(play):
    task = Says(logs())
    task.on_train_epoch_end = lambda: task.log("x", 7.0)
    made = play(task, log_every_n_steps=1)
    *steps, epoch_point = made.memory.of("x")
    assert [value for _, value in steps] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert epoch_point == (5, 7.0)
    assert made.callback_metrics["x"] == 7.0


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        ("high", {}, "got str"),
        (None, {}, "got NoneType"),
        (torch.ones(2), {}, r"a torch\.float32 tensor of shape \(2,\)"),
        ({"a": 1.0}, {}, "got dict"),
        (1.0, {"reduce_fx": "median"}, "expected one of"),
        (1.0, {"reduce_fx": "meen"}, "Did you mean 'mean'"),
        (1.0, {"reduce_fx": lambda values: values[0]}, "For another reduction, log a torchmetrics.Metric"),
    ],
)
def test_wrong_values_are_refused_by_name(play, value, options, message):
    with pytest.raises(TaskError, match=rf"log\('wrong'.*{message}"):
        play(Says(lambda task, batch, batch_idx: task.log("wrong", value, **options)))


@pytest.mark.parametrize(
    "value", [1, True, 1.5, torch.tensor(2), torch.tensor([[2.5]]), torch.tensor(True), np.float64(3)]
)
def test_numbers_of_all_kinds(play, value):
    made = play(Says(lambda task, batch, batch_idx: task.log("x", value)))
    assert made.memory.of("x")[0] == (1, float(value))
