"""A resumed run equals the uninterrupted one: weights to the bit, points, callbacks and hooks."""

import math

import pytest
import torch
from resumed_run import (
    EPOCHS,
    STEPS,
    Net,
    assert_same,
    everything,
    fit,
    lines,
    loaders,
    make_trainer,
    run_undisturbed,
    summary,
)
from tiny import Tiny, make_loader

import legato as lg
from legato.base.errors import CheckpointError, TaskError
from legato.callbacks import EarlyStopping, ExponentialMovingAverage
from legato.loggers.json_lines import JSONLinesLogger
from legato.trainer.checkpoints import find
from legato.trainer.processes.launch import run_workers


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"))


# --- stopped --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_stopped_after_every_step_is_the_undisturbed_run(tmp_path, undisturbed):
    """Each resume has other loader workers and other initial weights, in the same run directory."""
    for stop in range(1, STEPS):
        trainer, _ = fit(tmp_path, workers=2 if stop % 5 == 0 else 0, weights=stop - 1, max_steps=stop)
        assert trainer.global_step == stop
    trainer, task = fit(tmp_path, workers=2, weights=99)
    assert_same(trainer, task, undisturbed)
    assert trainer.run_dir.name == "version_0"
    assert len(list(trainer.run_dir.parent.iterdir())) == 1


@pytest.mark.slow
def test_a_finished_run_has_nothing_left_to_do(tmp_path, undisturbed):
    fit(tmp_path)
    trainer, task = fit(tmp_path, weights=4)
    assert_same(trainer, task, undisturbed)


class StopsAt(lg.Callback):
    """Asks the run to stop after a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        trainer.should_stop |= trainer.global_step == self.step


@pytest.mark.slow
@pytest.mark.parametrize("averages", [False, True])
def test_a_run_goes_on_without_the_validation_of_its_stop(tmp_path, averages):
    """EarlyStopping and other callbacks count the validations of the uninterrupted run."""
    ends = []
    for folder, stops in (("whole", [STEPS]), ("stopped", [4, STEPS])):
        for stop in stops:
            callbacks = [StopsAt(stop), *([ExponentialMovingAverage(0.5)] if averages else [])]
            trainer, task = fit(tmp_path / folder, callbacks, val_check_interval=1.0)
        assert trainer.global_step == STEPS
        stopping, counter = trainer.callbacks[:2]
        ends.append((everything(trainer, task).tolist(), stopping.wait_count, stopping.best_score, counter.counts))
    assert ends[0] == ends[1]


class SavesEverywhere(lg.callbacks.MonitoringCallback):
    """Saves in every hook that allows it, and records the calls of hooks."""

    def __init__(self, folder=None):
        self.folder, self.seen = folder, []

    def _note(self, name, trainer):
        self.seen.append((name, trainer.current_epoch, trainer.global_step))
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"{len(self.seen):03d}-{name}")


def _watch(name):
    def hook(self, trainer, task, *arguments):
        if name != "on_train_batch_end" or trainer.global_step > self.seen[-1][2]:
            self._note(name, trainer)

    return hook


for name in (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
):
    setattr(SavesEverywhere, name, _watch(name))
AGAIN = {"on_train_start", "on_train_epoch_start"}


@pytest.mark.slow
@pytest.mark.parametrize("interval", [4, 1.0], ids=["within", "at the end"])
def test_a_run_goes_on_from_every_hook(tmp_path, interval):
    """No end of an epoch, validation or point is repeated or left out."""
    within = interval != 1.0
    arguments = {"val_check_interval": interval, "logger": [JSONLinesLogger()], "max_epochs": 2}
    saver = SavesEverywhere(tmp_path / "saved")
    trainer, task = fit(tmp_path / "whole", [saver], checkpoint=False, **arguments)
    expected, points = everything(trainer, task), lines(trainer.run_dir)
    folders = sorted((tmp_path / "saved").iterdir())
    assert len(folders) == len(saver.seen) > 20
    # the batches of a validation are alike, and where validation comes at the end, the steps before it are
    chosen = {event: index for index, event in enumerate(saver.seen) if within or event[2] % (STEPS // EPOCHS) == 0}
    for (name, _, step), index in chosen.items():
        folder = folders[index]
        if "validation" in name and name != "on_validation_end":  # the whole validation is repeated
            while saver.seen[index][0] != "on_validation_start":
                index -= 1
            index -= 1
        after = SavesEverywhere()
        trainer, task = fit(tmp_path / folder.name, [after], resume=folder, weights=5, checkpoint=False, **arguments)
        assert torch.equal(everything(trainer, task), expected), folder
        again = {*AGAIN, name} if name == "on_train_end" else AGAIN
        seen = [event for event in after.seen if event[0] not in again]
        assert seen == [event for event in saver.seen[index + 1 :] if event[0] not in again], folder
        if step < trainer.global_step:
            logged = lines(trainer.run_dir)
            assert {at: logged[at] for at in logged if at > step} == {at: points[at] for at in points if at > step}
            assert logged.get(step, {}).items() <= points.get(step, {}).items()


def test_saving_in_the_middle_of_a_step_is_refused(tmp_path):
    class TooEarly(lg.Callback):
        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            if batch_idx == 3:
                trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
                trainer.save_checkpoint(tmp_path / "whole")

    with pytest.raises(TaskError, match="in the middle of step 2"):
        fit(tmp_path, [TooEarly()])
    assert (tmp_path / "weights").is_dir()
    assert not (tmp_path / "whole").exists()


# --- callbacks ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_was_stopped_early_stays_stopped(tmp_path):
    def run(patience, **strategy):
        trainer = make_trainer(tmp_path, max_epochs=9, val_check_interval=1.0, **strategy)
        trainer.callbacks[0] = EarlyStopping("val/loss", min_delta=1e6, patience=patience)
        trainer.checkpoint_callback.every_n_train_steps = 4  # so that the last step is saved when all is over
        trainer.fit(Net(), *loaders(), resume="auto")
        return trainer.global_step, trainer.current_epoch

    assert run(2) == (15, 3)
    assert run(2) == (15, 3)
    assert run_workers(lambda: run(2, strategy="ddp", devices=2), 2) == (15, 3)
    assert run(4) == (25, 5)


@pytest.mark.slow
def test_what_validation_logs_is_not_judged_between_validations(tmp_path):
    """With validation every second epoch, a resume in between must not judge the old value again."""

    def run(folder, **arguments):
        settings = {"val_check_interval": 1.0, "check_val_every_n_epoch": 2, "max_epochs": 4, "logger": False}
        trainer = make_trainer(tmp_path / folder, **{**settings, **arguments})
        saved = trainer.checkpoint_callback
        saved.every_n_train_steps, saved.every_n_epochs = 0, 1
        trainer.fit(Net(frequency=2), *loaders(), resume="auto")
        return trainer

    reference = run("whole")
    for stop in (6, 11, 12):
        run(f"stopped {stop}", max_steps=stop)
        resumed = run(f"stopped {stop}")
        for name in ("stopping", "best"):
            assert summary(resumed, None)[name] == summary(reference, None)[name], (stop, name)


@pytest.mark.slow
def test_the_timer_goes_on_over_resumes(tmp_path, clock):
    class Slow(lg.Callback):
        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            clock(0.25)

    limit = {"max_time": {"seconds": 4}, "max_epochs": 1000}
    first, _ = fit(tmp_path, [Slow()], max_time={"seconds": 2}, max_epochs=1000)
    assert 2 <= first.elapsed < 4
    second, _ = fit(tmp_path, [Slow()], **limit)
    assert second.global_step > first.global_step
    assert 4 <= second.elapsed < 6
    third, _ = fit(tmp_path, [Slow()], **limit)
    assert third.global_step == second.global_step


# --- where to start from --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_path_begins_a_new_run_directory(tmp_path, undisturbed):
    first, _ = fit(tmp_path, max_steps=7)
    before = {path: path.stat().st_mtime_ns for path in first.run_dir.rglob("*")}
    best = first.checkpoint_callback.last_model_path
    for name, keyword in (("path", "resume"), ("lightning", "ckpt_path"), ("folder", "resume")):
        source = first.run_dir if name == "folder" else best
        trainer, task = make_trainer(tmp_path), Net(seed=8)
        trainer.fit(task, *loaders(), **{keyword: source})
        assert trainer.run_dir != first.run_dir
        assert torch.equal(everything(trainer, task), undisturbed["everything"])
        assert math.isclose(trainer.early_stopping_callback.best_score, undisturbed["summary"]["stopping"][1])
    assert {path: path.stat().st_mtime_ns for path in first.run_dir.rglob("*")} == before
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        fit(tmp_path, resume=tmp_path / "nowhere")
    same = make_trainer(tmp_path, max_steps=3)
    task = Net()
    same.fit(task, *loaders())
    same.max_steps = -1
    same.fit(task, *loaders(), ckpt_path="last")
    assert torch.equal(everything(same, task), undisturbed["everything"])


def damage_newest(trainer):
    newest = sorted((trainer.run_dir / "checkpoints").glob("step-*"))[-1]
    with (newest / "model.safetensors").open("r+b") as file:
        file.seek(200)
        file.write(b"x")
    return newest


@pytest.mark.slow
def test_a_broken_newest_checkpoint_is_passed_over(tmp_path, undisturbed, caplog):
    trainer, _ = fit(tmp_path, max_steps=9)
    assert damage_newest(trainer).name == "step-00000009"
    trainer, task = fit(tmp_path)
    assert "Skipping the damaged checkpoint step-00000009" in caplog.text
    assert torch.equal(everything(trainer, task), undisturbed["everything"])
    assert lines(trainer.run_dir) == undisturbed["lines"]


def test_a_broken_checkpoint_leaves_no_run_directory_behind(tmp_path):
    first, _ = fit(tmp_path, max_steps=4)
    broken = damage_newest(first)
    for source in (first.run_dir, broken):
        with pytest.raises(CheckpointError):
            fit(tmp_path, resume=source)
    assert [path.name for path in first.run_dir.parent.iterdir()] == ["version_0"]


# --- another optimizer ----------------------------------------------------------------------------------------------
class Optimized(Tiny):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kinds", [("SGD", "Adam"), ("Adam", "SGD"), ("Adam", "AdamW")], ids=str)
def test_an_optimizer_of_another_class_is_refused_before_training(trainer, tmp_path, kinds):
    was, now = (getattr(torch.optim, name) for name in kinds)
    first = trainer()
    first.fit(Optimized(was), make_loader())
    first.save_checkpoint(tmp_path / "first")
    trainer(max_epochs=2).fit(Optimized(was), make_loader(), resume=tmp_path / "first")
    task, made = Optimized(now), trainer(max_epochs=2)
    with pytest.raises(CheckpointError) as caught:
        made.fit(task, make_loader(), resume=tmp_path / "first")
    assert task.seen == []
    assert f"optimizer is {was.__name__}, but the task now returns {now.__name__}" in str(caught.value)
    assert "configure_optimizers" in str(caught.value)


# --- other settings ---------------------------------------------------------------------------------------------------
class Rated(Tiny):
    """SGD with settings and, optionally, a scheduler."""

    def __init__(self, scheduler=None, **settings):
        super().__init__()
        self.scheduler, self.settings = scheduler, settings

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), **self.settings)
        return (
            optimizer if self.scheduler is None else {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}
        )


def halving(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


GROUP = "optimizers.0.groups.0."


@pytest.mark.parametrize(
    ("scheduler", "now", "differences"),
    [
        (None, {"lr": 0.1, "momentum": 0.9}, None),
        (None, {"lr": 0.2, "momentum": 0.5}, f"{GROUP}lr=0.1 (not 0.2), {GROUP}momentum=0.9 (not 0.5)."),
        (halving, {"lr": 0.1, "momentum": 0.9}, None),
        (halving, {"lr": 0.2, "momentum": 0.9}, f"{GROUP}lr=0.1 (not 0.2)."),
    ],
)  # fmt: skip
def test_settings_that_an_optimizer_does_not_go_on_with_are_told(
    trainer, tmp_path, caplog, scheduler, now, differences
):
    first = trainer()
    first.fit(Rated(scheduler, lr=0.1, momentum=0.9), make_loader())
    first.save_checkpoint(tmp_path / "first")
    caplog.clear()
    trainer(max_epochs=2).fit(Rated(scheduler, **now), make_loader(), resume=tmp_path / "first")
    warnings = [message for message in caplog.messages if "with settings that differ" in message]
    assert len(warnings) == (differences is not None)
    assert differences is None or f"Values from the checkpoint: {differences}" in warnings[0]


class Counts(torch.nn.Linear):
    """A layer whose extra state is not a tensor: the number of its calls."""

    calls = 0

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Counted(Tiny):
    def __init__(self):
        super().__init__()
        self.model = Counts(3, 1)


def test_a_state_of_a_layer_that_is_no_tensor_goes_on(tmp_path):
    options = {"default_root_dir": tmp_path, "logger": None, "enable_progress_bar": False, "accelerator": "cpu"}
    lg.Trainer(max_steps=2, **options).fit(Counted(), make_loader())
    task = Counted()
    trainer = lg.Trainer(max_steps=5, **options)
    trainer.fit(task, make_loader(), resume="auto")
    assert (trainer.global_step, task.model.calls) == (5, 5)
    saved = find.newest_complete(trainer.run_dir / "checkpoints")
    assert Counted.load_from_checkpoint(saved).model.calls == 5
