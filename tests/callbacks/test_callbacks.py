"""Callbacks that watch and stop: real runs, real files."""

import json
import logging
import math
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import STEPS, Scripted, fit

import legato as lg
from legato.base.errors import ConfigError
from legato.base.quantities import parse_duration
from legato.callbacks import Checkpoint, EarlyStopping, LearningRateMonitor, ModelSummary, ThroughputMonitor, Timer
from legato.callbacks.model_summary import summarize
from legato.loggers import JSONLinesLogger


@pytest.mark.slow
def test_exports_are_lazy():
    code = (
        "import sys, legato.callbacks as callbacks\n"
        "for name in callbacks.__all__: getattr(callbacks, name)\n"
        "callbacks.Checkpoint(monitor='x'); callbacks.ProgressBar(); callbacks.Timer('00:00:00:01')\n"
        "assert not {'torch', 'tqdm', 'tensorboard'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="Chekpoint"):
        _ = lg.callbacks.Chekpoint


# --- EarlyStopping ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "values", "epochs"),
    [
        ({"patience": 2}, [1.0, 0.9, 0.95, 0.91, 0.1, 0.1], 4),
        ({"patience": 2}, [1.0, 0.9, 0.95, 0.89, 0.9, 0.9, 0.1], 6),
        ({"patience": 2, "mode": "max"}, [0.1, 0.2, 0.2, 0.2, 0.9], 4),
        ({"patience": 1, "min_delta": 0.1}, [1.0, 0.85, 0.8, 0.5], 3),
        ({"patience": 1, "min_delta": -0.1, "mode": "max"}, [0.1, 0.3, 0.35, 0.9], 3),
        ({"patience": 9, "stopping_threshold": 0.3}, [0.5, 0.4, 0.2, 0.1], 3),
        ({"patience": 9, "divergence_threshold": 2.0}, [0.5, 1.9, 2.1, 0.1], 3),
        ({"patience": 9}, [0.5, math.nan, 0.1], 2),
        ({"patience": 2, "check_finite": False}, [0.5, math.nan, 0.4, 0.3], 4),
        ({"patience": 2}, [0.5, 0.4, 0.3, 0.2], 4),
        ({"patience": 1, "check_on_train_epoch_end": True}, [0.5, 0.6, 0.3, 0.2], 2),
        # 0.9 + 0.1 is 1.0 in float32, as in Lightning: no improvement
        ({"patience": 2, "min_delta": 0.1}, [1.0, 0.9, 0.85, 0.82, 0.81, 0.1], 5),
        ({"patience": 1, "min_delta": 0.1, "mode": "max"}, [0.1, 0.2, 0.9], 2),
    ],
)
def test_it_stops_when_it_should(tmp_path, caplog, options, values, epochs):
    callback = EarlyStopping("val/score", **options)
    with caplog.at_level(logging.INFO, logger="legato"):
        trainer = fit(tmp_path, callback, values=values, enable_checkpointing=False)
    assert trainer.current_epoch == epochs
    messages = [record.message for record in caplog.records if record.message.startswith("EarlyStopping")]
    stopped = epochs < len(values) or "finite" in "".join(messages)
    assert len(messages) == stopped
    assert callback.stopped_step == (epochs * STEPS if stopped else 0)
    json.dumps(callback.state_dict(), allow_nan=False)


@pytest.mark.slow
def test_early_stopping_by_a_training_metric(tmp_path):
    class Epochs(Scripted):
        def training_step(self, batch):
            self.log("loss", float(self.current_epoch), on_step=False, on_epoch=True)
            return super().training_step(batch)

    callback = EarlyStopping("loss", patience=2)
    assert fit(tmp_path, callback, task=Epochs(), max_epochs=9).current_epoch == 3
    assert callback.best_score == 0.0


@pytest.mark.slow
def test_early_stopping_refuses_a_metric_that_nobody_logs(tmp_path):
    with pytest.raises(ConfigError, match=r"EarlyStopping monitors 'val/sco'.*Did you mean 'val/score'"):
        fit(tmp_path, EarlyStopping("val/sco"), values=[0.5, 0.5])
    assert [path.name for path in tmp_path.rglob("step-*")] == ["step-00000004"]
    trainer = fit(tmp_path, EarlyStopping("val/sco", strict=False), values=[0.5, 0.5])
    assert trainer.current_epoch == 2


@pytest.mark.slow
def test_early_stopping_waits_on_over_a_resume(tmp_path):
    values = [0.5, 0.6, 0.6, 0.6, 0.1, 0.1]
    fit(tmp_path, EarlyStopping("val/score", patience=3), values=values, max_epochs=2)
    callback = EarlyStopping("val/score", patience=3)
    trainer = fit(tmp_path, callback, values=values, resume="auto")
    assert trainer.current_epoch == 4
    assert callback.best_score == pytest.approx(0.5)
    assert (callback.wait_count, callback.stopped_step, callback.stopped_epoch) == (3, 16, 3)


def test_a_stop_in_the_middle_of_an_epoch_is_no_look(tmp_path):
    class Epochs(Scripted):
        def training_step(self, batch):
            self.log("loss", 1.0, on_step=False, on_epoch=True)
            return super().training_step(batch)

    callback = EarlyStopping("loss", patience=9)
    fit(tmp_path, callback, task=Epochs(), max_epochs=9, max_steps=STEPS * 3 + 1)
    assert callback.wait_count == 2  # the first of three epochs set the best score


# --- LearningRateMonitor, ThroughputMonitor ---------------------------------------------------------------------------


class Rates(Scripted):
    """Takes its optimizers from outside."""

    def __init__(self, build):
        super().__init__()
        self.build = build

    def configure_optimizers(self):
        return self.build(self.net)


def logged(trainer, name):
    lines = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def names_logged(trainer):
    text = (trainer.run_dir / "metrics.jsonl").read_text()
    return {name for line in text.splitlines() for name in json.loads(line)} - {"step", "time", "epoch"}


def fit_with_rates(tmp_path, build, callback=None, **options):
    chosen = {"logger": JSONLinesLogger(), "log_every_n_steps": 2, "max_epochs": 2, **options}
    callbacks = [callback or LearningRateMonitor(), Checkpoint()]
    return fit(tmp_path, *callbacks, task=Rates(build), **chosen)


def with_steps(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def with_epochs(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "name": "rate"}]


def test_rates_are_those_that_the_step_used(tmp_path):
    trainer = fit_with_rates(tmp_path, with_steps)
    assert logged(trainer, "lr-SGD") == {step: 0.5 ** (step - 1) for step in (2, 4, 6, 8)}


@pytest.mark.parametrize(
    ("interval", "expected"),
    [(None, {0: 1.0, 4: 0.5}), ("epoch", {0: 1.0, 4: 0.5}), ("step", {2: 1.0, 4: 1.0, 6: 0.5, 8: 0.5})],
)
def test_rates_by_epoch(tmp_path, interval, expected):
    trainer = fit_with_rates(tmp_path, with_epochs, LearningRateMonitor(interval))
    assert logged(trainer, "rate") == expected


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda net: torch.optim.AdamW(net.parameters()), {"lr-AdamW"}),
        (
            lambda net: torch.optim.AdamW([{"params": [net.weight]}, {"params": [net.bias], "name": "bias"}]),
            {"lr-AdamW/pg1", "lr-AdamW/bias"},
        ),
    ],
)
def test_names_of_rates(tmp_path, build, expected):
    names = names_logged(fit_with_rates(tmp_path, build))
    assert {name for name in names if not name.startswith("throughput/")} == expected


def test_momentum_and_weight_decay(tmp_path):
    def build(net):
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.25)

    trainer = fit_with_rates(tmp_path, build, LearningRateMonitor("step", log_momentum=True, log_weight_decay=True))
    assert logged(trainer, "lr-SGD-momentum") == dict.fromkeys((2, 4, 6, 8), 0.9)
    assert logged(trainer, "lr-SGD-weight_decay") == dict.fromkeys((2, 4, 6, 8), 0.25)


def test_an_unknown_interval_is_refused():
    with pytest.raises(ConfigError, match="'step', 'epoch' or None, got 'steps'"):
        LearningRateMonitor("steps")


def test_several_optimizers_of_a_kind_are_numbered(tmp_path):
    class Two(Scripted):
        automatic_optimization = False

        def training_step(self, batch):
            self.manual_backward(self.net(batch[0]).sum())
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD([self.net.weight], lr=0.1), torch.optim.SGD([self.net.bias], lr=0.2)]

    logger = JSONLinesLogger()
    trainer = fit(tmp_path, LearningRateMonitor(), task=Two(), logger=logger, log_every_n_steps=1, max_epochs=1)
    assert logged(trainer, "lr-SGD") == dict.fromkeys((1, 2, 3, 4), 0.1)
    assert logged(trainer, "lr-SGD-1") == dict.fromkeys((1, 2, 3, 4), 0.2)


def test_throughput_does_not_count_validation(tmp_path, clock):
    logger = JSONLinesLogger()
    task = Scripted(seconds=0.02, validation_seconds=0.5, sleep=clock)
    trainer = fit(
        tmp_path, ThroughputMonitor(), task=task, logger=logger, log_every_n_steps=3, val_check_interval=2, max_epochs=2
    )
    steps, samples = (logged(trainer, f"throughput/{kind}_per_second") for kind in ("steps", "samples"))
    assert list(steps) == [3, 6]
    assert all(value == pytest.approx(50) for value in steps.values()), steps
    assert all(samples[step] == pytest.approx(2 * steps[step]) for step in steps)
    assert logged(trainer, "epoch") == {3: 0, 6: 1}


# --- Timer ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("00:00:00:05", 5),
        ("01:02:03:04", 93784),
        (" 1:0:0:0 ", 86400),
        (timedelta(minutes=2), 120),
        ({"hours": 1, "seconds": 0.5}, 3600.5),
        ({}, 0),
    ],
)
def test_durations(value, seconds):
    assert parse_duration(value).total_seconds() == seconds


@pytest.mark.parametrize(
    "value",
    ["", "12:00:00", "1:2:3:4:5", "a:b:c:d", "00:00:00:-5", {"hour": 1}, {"hours": "x"}, timedelta(-1), 5, None],
)
def test_durations_that_are_none(value):
    with pytest.raises(ConfigError, match="duration"):
        parse_duration(value)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789:-. ", max_size=14) | st.text(max_size=8))
def test_any_text_is_a_duration_or_refused(text):
    try:
        duration = parse_duration(text)
    except ConfigError:
        return
    days, hours, minutes, seconds = map(int, text.split(":"))
    assert duration == timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def test_a_timer_stops_the_run(tmp_path, caplog, clock):
    timer = Timer(timedelta(seconds=6))
    with caplog.at_level(logging.INFO, logger="legato"):
        trainer = fit(tmp_path, timer, task=Scripted(seconds=1, validation_seconds=1, sleep=clock), max_epochs=50)
    assert trainer.global_step == 6  # ranks tell each other the time after a step, before they validate
    assert sum("Timer" in record.message for record in caplog.records) == 1
    with pytest.raises(ConfigError, match="'step' or 'epoch', got 'steps'"):
        Timer(interval="steps")


def test_a_timer_that_looks_by_epoch_ends_the_epoch(tmp_path, clock):
    trainer = fit(
        tmp_path, Timer({"seconds": 2}, interval="epoch"), task=Scripted(seconds=1, sleep=clock), max_epochs=50
    )
    assert trainer.global_step == STEPS


def test_a_timer_counts_the_time_before_a_resume(tmp_path, clock):
    fit(tmp_path, Timer("00:00:00:10"), task=Scripted(seconds=1, sleep=clock), max_epochs=2)
    trainer = fit(tmp_path, Timer("00:00:00:10"), task=Scripted(seconds=1, sleep=clock), max_epochs=100, resume="auto")
    assert trainer.global_step == 11  # and not 10 more than the first had
    resumed = fit(tmp_path, Timer("00:00:00:10"), task=Scripted(seconds=1, sleep=clock), max_epochs=100, resume="auto")
    assert resumed.global_step <= trainer.global_step + 1


# --- ModelSummary -----------------------------------------------------------------------------------------------------


class Nested(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4, dtype=torch.float64))
        self.head = torch.nn.Linear(8, 4, bias=False)
        self.head.weight = torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)
        self.tied = self.body[0]


def test_the_summary_counts_once_and_by_depth():
    lines = summarize(Nested(), 1).splitlines()
    assert lines[0].split() == ["name", "type", "parameters", "trainable"]
    assert [line.split() for line in lines[2:-2]] == [["body", "Sequential", "76", "76"], ["head", "Linear", "32", "0"]]
    assert lines[-1] == "108 parameters (76 trainable, 32 frozen), 576 B"
    deep = summarize(Nested(), -1)
    assert "body.1" in deep
    assert "body.1" not in summarize(Nested(), 1)
    assert summarize(Nested(), 0) == lines[-1]


def test_the_summary_of_what_is_not_built_yet():
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(2, 2))
    text = summarize(lazy)
    assert "0 + uninitialized" in text
    assert text.endswith("6 parameters (6 trainable, 0 frozen), 24 B, and 2 uninitialized parameter tensors")
    assert summarize(torch.nn.Linear(1000, 500)).endswith("500,500 parameters (500,500 trainable, 0 frozen), 2 MB")
    assert summarize(torch.nn.Module()) == "0 parameters (0 trainable, 0 frozen), 0 B"


def test_the_summary_is_printed_when_a_fit_begins(tmp_path, capsys):
    fit(tmp_path, ModelSummary(), max_epochs=1)
    assert "net   Linear           5          5" in capsys.readouterr().out
