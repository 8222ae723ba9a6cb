"""Profilers: real runs, measured."""

import json
import logging
import time

import pytest
import torch
from tiny import Tiny, Validated, make_loader, make_trainer

import legato as lg
from legato.base.errors import ConfigError
from legato.compat.lightning.profilers import (
    PassThroughProfiler,
    Profiler,
    Profiling,
    PyTorchProfiler,
    SimpleProfiler,
    make_profiler,
)


class Slow(lg.Callback):
    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        time.sleep(0.01)


def fit(folder, profiler, samples=20, **options):
    task = Validated()
    trainer = make_trainer(folder, callbacks=[Slow(), Profiling(profiler)], num_sanity_val_steps=0, **options)
    trainer.fit(task, make_loader(samples), make_loader(8))
    return trainer, task


def test_a_simple_profile_of_a_run(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="legato")
    profiler = SimpleProfiler()
    trainer, _ = fit(tmp_path, profiler)
    counts = {action: len(seconds) for action, seconds in profiler.recorded_durations.items()}
    kind = type(trainer.strategy).__name__
    for action in (f"{kind}.training_step", f"{kind}.backward", f"{kind}.optimizer_step", "Slow.on_train_batch_end"):
        assert counts[action] == 5, action
    assert counts[f"{kind}.validation_step"] == 2
    assert counts["train_dataloader_next"] >= 5
    assert sum(profiler.recorded_durations["Slow.on_train_batch_end"]) >= 0.05
    assert profiler.current_actions == {}
    assert "FIT Profiler Report" in caplog.text
    assert "Slow.on_train_batch_end" in caplog.text


def test_nothing_of_it_is_left(tmp_path):
    trainer, _ = fit(tmp_path, SimpleProfiler())
    assert not set(vars(trainer.strategy)) & {"training_step", "backward", "optimizer_step", "evaluation_step"}


def test_the_same_weights_as_without(tmp_path):
    plain, task = Validated(), fit(tmp_path, PyTorchProfiler(tmp_path))[1]
    make_trainer(tmp_path, num_sanity_val_steps=0).fit(plain, make_loader(), make_loader(8))
    for ours, theirs in zip(plain.parameters(), task.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_report_in_a_file(tmp_path):
    fit(tmp_path, SimpleProfiler(tmp_path / "profile", "mine", extended=False))
    text = (tmp_path / "profile" / "fit-mine.txt").read_text()
    assert "Mean duration (s)" in text
    assert "Num calls" not in text


def test_an_action_begins_once_and_ends_once():
    simple = SimpleProfiler()
    simple.start("a")
    with pytest.raises(ValueError, match="already started"):
        simple.start("a")
    with pytest.raises(ValueError, match="never started"):
        simple.stop("b")


@pytest.mark.parametrize("samples", [40, 12])
def test_a_trace_of_torch(tmp_path, samples, caplog):
    caplog.set_level(logging.INFO, logger="legato")
    fit(tmp_path, PyTorchProfiler(tmp_path / "traces", row_limit=5, sort_by_key="cpu_time_total"), samples)
    (trace,) = (tmp_path / "traces").glob("*.pt.trace.json")
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert any("aten::linear" in name or "aten::addmm" in name for name in names)
    steps = [name for name in names if name == "[profile]SingleStrategy.training_step"]
    assert len(steps) >= 3
    assert any(name.endswith("Linear: model.0") for name in names)
    assert "Self CPU time total" in caplog.text


def test_wishes_that_cannot_be_met():
    with pytest.raises(ConfigError, match="Did you mean 'simple'"):
        make_profiler("simpel")
    with pytest.raises(ConfigError, match="simple, pytorch"):
        make_profiler("advanced")
    assert isinstance(make_profiler(None), PassThroughProfiler)
    with pytest.raises(ConfigError, match="cpu_time"):
        PyTorchProfiler(sort_by_key="cpu_tim")
    with pytest.raises(KeyError, match="row_limit"):
        PyTorchProfiler(table_kwargs={"row_limit": 3})
    with pytest.raises(ConfigError, match="schedule"):
        PyTorchProfiler(schedule=3)


class Counting(Profiler):
    def __init__(self):
        super().__init__()
        self.actions = []

    def start(self, action_name):
        self.actions.append(action_name)

    def stop(self, action_name):
        pass

    def summary(self):
        return "counted"


def test_a_profiler_of_ones_own_and_other_stages(tmp_path):
    profiler = Counting()
    trainer = make_trainer(tmp_path, callbacks=[Profiling(profiler)])
    trainer.validate(Validated(), make_loader(), verbose=False)
    assert profiler.actions.count("SingleStrategy.validation_step") == 5
    assert profiler.stage == "validate"
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Broken(), make_loader())
    assert "training_step" not in vars(trainer.strategy)


class Broken(Tiny):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("broken")


@pytest.mark.slow
def test_a_profile_on_two_processes(tmp_path):
    trainer = make_trainer(
        tmp_path, callbacks=[Profiling(SimpleProfiler(tmp_path / "p", "x"))], strategy="ddp", devices=2
    )
    trainer.fit(Tiny(), make_loader())
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["fit-x-0.txt", "fit-x-1.txt"]
