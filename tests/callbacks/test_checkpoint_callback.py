"""The Checkpoint callback: real runs that write real directories."""

import json
import math
import shutil
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import STEPS, Scripted, fit, loader, make_trainer

import legato as lg
from legato.base.checkpoint_index import CheckpointIndex, Entry
from legato.base.errors import CheckpointError, ConfigError
from legato.callbacks import Checkpoint
from legato.callbacks.checkpoint_callback import CheckpointCallback
from legato.trainer.checkpoints import find


class Saves(lg.Callback):
    """Notes the step of every checkpoint that is written."""

    def __init__(self):
        self.steps = []

    def on_save_checkpoint(self, trainer, task, checkpoint):
        self.steps.append(trainer.global_step)


def kept(trainer):
    return sorted(int(path.name.removeprefix("step-")) for path in (trainer.run_dir / "checkpoints").glob("step-*"))


def step_of(path):
    return int(str(path)[-8:]) if path else None


def test_without_a_monitor_the_newest_is_kept(tmp_path):
    saves = Saves()
    trainer = fit(tmp_path, Checkpoint(), saves, num_sanity_val_steps=1)
    callback = trainer.checkpoint_callback
    assert saves.steps == [4, 8, 12]
    assert kept(trainer) == [12]
    assert step_of(callback.last_model_path) == step_of(callback.best_model_path) == 12
    assert callback.best_model_score is None
    assert callback.best_k_models == {}
    assert callback.kth_best_model_path == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "top_k", "last", "expected", "best"),
    [
        ("max", 1, True, [8, 20], 8),
        ("max", 1, False, [8], 8),
        ("max", 2, True, [8, 16, 20], 8),
        ("max", 2, False, [8, 16], 8),
        ("min", 1, True, [12, 20], 12),
        ("min", 2, False, [4, 12], 12),
        ("max", -1, True, [4, 8, 12, 16, 20], 8),
        ("max", 0, True, [20], None),
        ("max", 0, False, [], None),
    ],
)
def test_the_best_and_the_newest_are_kept(tmp_path, mode, top_k, last, expected, best):
    values, saves = [0.2, 0.9, 0.1, 0.8, 0.5], Saves()
    callback = Checkpoint("val/score", mode, save_top_k=top_k, save_last=last, every_n_epochs=1)
    (tmp_path / "default" / "version_0" / "checkpoints").mkdir(parents=True)
    trainer = fit(tmp_path, callback, saves, values=values)
    (trainer.run_dir / "checkpoints").mkdir(exist_ok=True)
    assert kept(trainer) == expected
    assert len(saves.steps) == len(set(saves.steps))
    assert step_of(callback.best_model_path) == best
    if best is not None:
        assert callback.best_model_score.item() == pytest.approx(values[best // STEPS - 1])
        scores = [score.item() for score in callback.best_k_models.values()]
        assert scores == sorted(scores, reverse=mode == "max")
        assert step_of(callback.kth_best_model_path) == step_of(list(callback.best_k_models)[-1])
    if last:
        assert step_of(callback.last_model_path) == 20


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    scores=st.lists(st.one_of(st.none(), st.integers(0, 6).map(float)), min_size=1, max_size=12),
    top_k=st.integers(-1, 4),
    last=st.booleans(),
    mode=st.sampled_from(["min", "max"]),
    monitored=st.booleans(),
)
def test_the_index_keeps_what_a_look_back_at_all_would_keep(scores, top_k, last, mode, monitored):
    index = CheckpointIndex("run", "score" if monitored else None, mode)
    names = [f"step-{step:08d}" for step in range(len(scores))]
    for name, score in zip(names, scores, strict=True):
        index.checkpoints[name] = Entry(int(name[5:]), score)
        kept = index.kept(top_k, last)
        index.checkpoints = {name: entry for name, entry in index.checkpoints.items() if name in kept}
    sign = -1 if mode == "max" else 1
    ranked = sorted((sign * score, name) for name, score in zip(names, scores, strict=True) if score is not None)
    best = [name for _, name in ranked] if monitored else names[::-1]
    expected = set(names if top_k == -1 else best[:top_k]) | ({names[-1]} if last else set())
    assert set(index.checkpoints) == expected


def test_a_value_that_is_not_finite_never_counts_as_best(tmp_path):
    values = [math.nan, 0.5, -math.inf, math.nan, 0.7]
    callback = Checkpoint("val/score", "min", save_top_k=2)
    trainer = fit(tmp_path, callback, values=values)
    assert kept(trainer) == [8, 20]
    assert step_of(callback.best_model_path) == 8
    assert list(map(float, callback.best_k_models.values())) == pytest.approx([0.5, 0.7])
    json.dumps(callback.state_dict(), allow_nan=False)


def test_of_two_equals_the_earlier_one_stays(tmp_path):
    trainer = fit(tmp_path, Checkpoint("val/score", save_last=False), values=[0.5, 0.5, 0.5])
    assert kept(trainer) == [4]


def test_every_n_steps_with_a_training_metric_scores_the_step_itself(tmp_path):
    values = [0.9, 0.8, 0.7, 0.1, 0.6, 0.85, 0.2, 0.3]
    callback, saves = Checkpoint("train/score", save_top_k=2, every_n_train_steps=2, save_last=False), Saves()
    task = Scripted(train_values=values)
    trainer = fit(tmp_path, callback, saves, task=task, max_epochs=2, log_every_n_steps=1)
    assert kept(trainer) == [4, 8]
    assert list(map(float, callback.best_k_models.values())) == pytest.approx([0.1, 0.3])
    assert saves.steps == [2, 4, 8]  # step 6 is worse than both that were there


def test_a_validation_metric_does_not_count_for_steps_it_did_not_measure(tmp_path):
    callback, saves = Checkpoint("val/score", "max", save_top_k=1, every_n_train_steps=2, every_n_epochs=1), Saves()
    trainer = fit(tmp_path, callback, saves, values=[0.9, 0.5, 0.1])
    assert saves.steps == [2, 4, 6, 8, 10, 12]
    assert kept(trainer) == [4, 12]
    assert callback.best_model_score.item() == pytest.approx(0.9)


def test_several_validations_an_epoch_each_save(tmp_path):
    saves = Saves()
    fit(tmp_path, Checkpoint("val/score"), saves, values=[0.9, 0.8], val_check_interval=2)
    assert saves.steps == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("options", "trainer_options", "expected"),
    [
        ({"every_n_epochs": 2}, {}, [8, 16, 20]),
        ({"every_n_epochs": 2, "save_last": False}, {}, [8, 16]),
        ({"every_n_epochs": 0, "every_n_train_steps": 6}, {}, [6, 12, 18, 20]),
        ({"monitor": "val/score", "save_on_train_epoch_end": True}, {}, [4, 8, 12, 16, 20]),
        ({"monitor": "val/score"}, {"check_val_every_n_epoch": 2}, [8, 16, 20]),
        ({"save_on_train_epoch_end": False}, {"check_val_every_n_epoch": 2}, [8, 16, 20]),
        ({}, {"max_steps": 6}, [4, 6]),
    ],
)
def test_when_it_saves(tmp_path, options, trainer_options, expected):
    saves = Saves()
    values = [0.9, 0.8, 0.7, 0.6, 0.5]
    trainer = fit(tmp_path, Checkpoint(**options, save_top_k=-1), saves, values=values, **trainer_options)
    assert saves.steps == expected
    assert kept(trainer) == expected


def test_every_so_many_seconds(tmp_path, clock):
    saves = Saves()
    callback = Checkpoint(train_time_interval=timedelta(seconds=5), save_top_k=-1, save_last=False)
    fit(tmp_path, callback, saves, task=Scripted(seconds=1, sleep=clock), max_epochs=4)
    assert saves.steps == [6, 11, 16]  # ranks tell each other the time after a step: it is that of the one before
    assert Checkpoint(train_time_interval=1.5).seconds_between == 90


def test_a_dry_run_writes_nothing(tmp_path):
    callback = Checkpoint("val/scor")
    trainer = make_trainer(tmp_path, callback, fast_dev_run=True)
    trainer.fit(Scripted([0.5]), loader(), loader(1))
    assert not list(tmp_path.rglob("step-*"))
    assert callback.best_model_path == ""


@pytest.mark.parametrize("with_validation", [True, False])
def test_a_monitor_that_nobody_logs_is_refused_with_the_state_saved(tmp_path, with_validation):
    callback = Checkpoint("val/scroe", save_top_k=1, save_last=False)
    trainer = make_trainer(tmp_path, callback, max_epochs=3, log_every_n_steps=1)
    task = Scripted([0.5] * 3, train_values=[1.0] * 12)
    with pytest.raises(ConfigError, match="'val/scroe', but nothing logged it by the end of epoch 0") as caught:
        trainer.fit(task, loader(), loader(1) if with_validation else None)
    assert "Logged: train/score" in str(caught.value)
    assert ("Did you mean 'val/score'?" in str(caught.value)) == with_validation
    assert kept(trainer) == [4]


def test_a_metric_that_is_still_to_come_is_waited_for(tmp_path):
    trainer = fit(tmp_path, Checkpoint("val/score"), values=[0.5] * 4, check_val_every_n_epoch=4)
    assert kept(trainer) == [16]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_top_k": -2}, "save_top_k must be 0 \\(none\\), positive"),
        ({"every_n_epochs": -1}, "every_n_epochs must be 0"),
        ({"every_n_train_steps": -1}, "every_n_train_steps must be 0"),
        ({"monitor": "x", "mode": "mim"}, "mode must be 'min' or 'max', got 'mim'"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Checkpoint(**options)


def test_two_need_two_folders(tmp_path):
    with pytest.raises(ConfigError, match="Two Checkpoint callbacks write to the same folder"):
        fit(tmp_path, Checkpoint(), Checkpoint("val/score"), values=[0.5])
    elsewhere = Checkpoint("val/score", "max", dirpath=tmp_path / "own", save_last=False)
    trainer = fit(tmp_path, Checkpoint(), elsewhere, values=[0.5, 0.9, 0.1])
    assert kept(trainer) == [12]
    assert names_in(tmp_path / "own") == ["step-00000008"]


def test_another_runs_folder_is_refused_before_the_first_step(tmp_path):
    def run(**options):
        elsewhere = Checkpoint(
            dirpath=tmp_path / "own", every_n_train_steps=2, save_top_k=options.pop("save_top_k", -1)
        )
        return fit(tmp_path, elsewhere, values=[0.5], **options)

    def there():
        return {path: path.read_bytes() for path in (tmp_path / "own").rglob("*") if path.is_file()}

    run()
    before = there()
    with pytest.raises(ConfigError, match="own' contains checkpoints from another run, which this run would overwrite"):
        run(save_top_k=1, seed=9)
    assert there() == before
    run(resume=tmp_path / "own" / "step-00000002")  # of which it is the same run, going on


class EveryStep(Scripted):
    """Logs a number that tells the step, for the step, the epoch or both."""

    def __init__(self, on_step, on_epoch):
        super().__init__()
        self.options = {"on_step": on_step, "on_epoch": on_epoch}

    def training_step(self, batch):
        self.log("train/number", float(self.global_step + 1), **self.options)
        return super().training_step(batch)


@pytest.mark.parametrize(
    ("on_step", "on_epoch", "monitor", "expected"),
    [
        (False, True, "train/number", {4: 2.5, 8: 6.5}),
        (True, True, "train/number_epoch", {4: 2.5, 8: 6.5}),
        (True, False, "train/number", {step: float(step) for step in range(1, 9)}),
        (True, True, "train/number_step", {step: float(step) for step in range(1, 9)}),
    ],
)
@pytest.mark.parametrize("every", [1, 3])
def test_a_value_is_that_of_the_checkpoints_own_step_or_none(tmp_path, on_step, on_epoch, monitor, expected, every):
    """Not the mean over the epoch before, nor the value of the newest logging point."""
    callback = Checkpoint(monitor, save_top_k=-1, every_n_train_steps=every)
    fit(tmp_path, callback, task=EveryStep(on_step, on_epoch), max_epochs=2, log_every_n_steps=50)
    steps = {step for step in range(1, 9) if step % every == 0 or step == 8}
    scores = {step_of(name): score for name, score in callback.scores.items()}
    assert scores == {step: expected.get(step) for step in steps}


@pytest.mark.parametrize("every", [{"every_n_train_steps": 2}, {"train_time_interval": 1e-9}])
def test_a_save_that_is_due_waits_for_the_value_of_its_step(tmp_path, every):
    best = Checkpoint("val/score", "max", save_last=False, **every)
    trainer = fit(tmp_path, best, values=[0.5, 0.9], val_check_interval=2)
    assert kept(trainer) == [6]
    assert float(best.best_model_score) == pytest.approx(0.9)


def test_a_run_that_can_save_nothing_says_so(tmp_path, caplog):
    never = Checkpoint("val/score", "max", save_last=False, every_n_train_steps=3)
    trainer = fit(tmp_path, never, values=[0.5, 0.9])
    assert not (trainer.run_dir / "checkpoints").exists()
    assert (
        "was saved by step 4. With save_last=False, saving a checkpoint requires a value for 'val/score'" in caplog.text
    )


VALUES = [1.0, 9.0, 9.0, 9.0, 5.0, 5.0, 5.0, 5.0, 6.0, 6.0, 6.0, 6.0]


class Told(Scripted):
    """Logs in training, over each epoch, what it is told."""

    def training_step(self, batch):
        self.log("told", VALUES[self.global_step], on_step=False, on_epoch=True)
        return super().training_step(batch)


@pytest.mark.parametrize("save_last", [True, False])
def test_the_mean_of_a_part_of_an_epoch_is_compared_with_nothing(tmp_path, save_last):
    def run(folder, **options):
        best = Checkpoint("told", save_last=save_last)
        made = fit(tmp_path / folder, best, values=[0.5] * 3, task=Told([0.5] * 3), **options)
        return best, made

    uninterrupted, _ = run("whole")
    run("stopped", max_steps=1)
    resumed, made = run("stopped", resume="auto")
    assert resumed.best_model_score == uninterrupted.best_model_score == 5.0
    assert kept(made) == ([8, 12] if save_last else [8])


@pytest.mark.slow
def test_a_resume_goes_on_where_it_was_also_in_a_moved_directory(tmp_path):
    values = [0.5, 0.9, 0.1, 0.8, 0.95, 0.2]
    options = {"values": values, "log_every_n_steps": 1}
    undisturbed = fit(tmp_path / "a", Checkpoint("val/score", "max", save_top_k=2), **options)
    fit(tmp_path / "b", Checkpoint("val/score", "max", save_top_k=2), **options | {"max_epochs": 3})
    shutil.move(tmp_path / "b", tmp_path / "c")
    folder = tmp_path / "c" / "default" / "version_0" / "checkpoints"
    (folder / "step-00000001").mkdir()  # not written by this run
    (folder / "notes.txt").write_text("mine")
    resumed = fit(tmp_path / "c", Checkpoint("val/score", "max", save_top_k=2), resume="auto", **options)
    assert resumed.run_dir == folder.parent
    assert kept(undisturbed) == [8, 20, 24]
    names = {path.name for path in folder.iterdir()}
    assert names == {"step-00000001", "notes.txt", "step-00000008", "step-00000020", "step-00000024", "index.json"}
    mine, theirs = resumed.checkpoint_callback, undisturbed.checkpoint_callback
    assert mine.scores == theirs.scores
    assert step_of(mine.best_model_path) == 20
    assert str(folder) in mine.best_model_path


class StopsOnce(Scripted):
    """Validates after every step, and stops once in the validation of `stop_step`, as a killed run does."""

    def __init__(self, values, stop_step=None, hook="validation_step"):
        super().__init__()
        self.values, self.stop_step, self.hook = values, stop_step, hook

    def stop_in(self, hook):
        if hook == self.hook and self.global_step == self.stop_step:
            raise KeyboardInterrupt

    def validation_step(self, batch):
        self.log("val/score", self.values[self.global_step - 1])
        self.stop_in("validation_step")

    def on_validation_epoch_end(self):
        self.stop_in("on_validation_epoch_end")


@pytest.mark.parametrize("hook", ["validation_step", "on_validation_epoch_end"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_second_one_keeps_the_best_of_a_validation_that_stopped(tmp_path, every, hook):
    values = [0.5, 0.4, 0.6, 0.3, 0.7, 0.1, 0.8, 0.9]

    def run(folder, stop_step, resume=None):
        best = Checkpoint("val/score", save_top_k=2, save_last=False, dirpath=folder / "best")
        main = Checkpoint(every_n_train_steps=every)
        task = StopsOnce(values, stop_step, hook)
        fit(folder, main, best, task=task, val_check_interval=1, max_epochs=2, resume=resume)
        return best

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", stop_step=6)
    resumed = run(tmp_path / "stopped", None, resume="auto")
    undisturbed = run(tmp_path / "undisturbed", None)
    assert resumed.scores == undisturbed.scores
    assert step_of(resumed.best_model_path) == 6
    assert names_in(tmp_path / "stopped" / "best") == ["step-00000004", "step-00000006"]


@pytest.mark.slow
def test_a_run_that_starts_from_another_one_touches_nothing_there(tmp_path):
    first = fit(tmp_path, Checkpoint("val/score", "max", save_top_k=3), values=[0.9, 0.8, 0.7])
    before = kept(first)
    second = fit(
        tmp_path,
        Checkpoint("val/score", "max"),
        values=[0.9, 0.8, 0.7, 0.1, 0.2],
        resume=first.checkpoint_callback.last_model_path,
    )
    assert second.run_dir != first.run_dir
    assert kept(first) == before == [4, 8, 12]
    assert kept(second) == [20]
    assert second.checkpoint_callback.best_model_score.item() == pytest.approx(0.2)


def test_a_crash_between_writing_and_deleting_leaves_nothing_for_good(tmp_path):
    class Crash(Checkpoint):
        def _prune(self, trainer, **options):
            if trainer.global_step == 8:
                raise KeyboardInterrupt
            super()._prune(trainer, **options)

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Crash(), max_epochs=4)
    assert len(list(tmp_path.rglob("step-*"))) == 2
    trainer = fit(tmp_path, Checkpoint(), max_epochs=4, resume="auto")
    assert kept(trainer) == [16]


def test_a_save_that_fails_is_no_checkpoint(tmp_path):
    class Break(lg.Callback):
        def on_train_epoch_end(self, trainer, task):
            if trainer.current_epoch == 1:
                (trainer.run_dir / "checkpoints").rename(trainer.run_dir / "elsewhere")
                (trainer.run_dir / "checkpoints").write_text("in the way")

    callback = Checkpoint()
    with pytest.raises(CheckpointError):
        fit(tmp_path, callback, Break())
    assert step_of(callback.last_model_path) == 4


def test_in_the_background(tmp_path):
    values = [0.5, 0.9, 0.1, 0.8, 0.95, 0.2]
    callback = Checkpoint("val/score", "max", save_top_k=2, asynchronous=True)
    trainer = fit(tmp_path, callback, values=values)
    assert kept(trainer) == [8, 20, 24]
    assert step_of(callback.best_model_path) == 20


def test_a_save_that_fails_in_the_background_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    class Slow(lg.Callback):
        steps = 0

        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            self.steps = trainer.global_step
            for thread in threading.enumerate():
                if thread.name == "legato-checkpoint":
                    thread.join()

    def full(*arguments, **options):
        raise OSError("the disk came loose")

    monkeypatch.setattr("legato.trainer.checkpoints.background.commit", full)
    slow = Slow()
    trainer = make_trainer(tmp_path, Checkpoint(every_n_train_steps=3, asynchronous=True))
    trainer.callbacks.append(slow)
    with pytest.raises(CheckpointError, match="in the background failed: the disk came loose"):
        trainer.fit(Scripted(), loader())
    assert slow.steps == 3  # the step after the third, whose state was to be saved


def test_weights_only(tmp_path):
    trainer = fit(tmp_path, Checkpoint(save_weights_only=True))
    with pytest.raises(CheckpointError, match="only weights"):
        fit(tmp_path, Checkpoint(), resume=trainer.checkpoint_callback.last_model_path)


@pytest.mark.slow
def test_a_step_that_has_no_batch_for_one_rank_is_saved_by_all(tmp_path):
    callback = Checkpoint(every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(tmp_path, callback, max_epochs=2, strategy="ddp", devices=2)
    trainer.fit(Scripted(), loader(5))  # the last of three steps has one batch for two ranks
    assert kept(trainer) == [1, 2, 3, 4, 5, 6]
    assert step_of(callback.last_model_path) == 6
    assert (trainer.run_dir / "checkpoints" / "step-00000006").samefile(callback.best_model_path)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_names_of_ones_own(tmp_path):
    callback = Checkpoint("val/score", save_top_k=2, filename="{epoch:02d} at {val/score:.2f}")
    values = [0.5, 0.25, 0.75, 0.8]
    trainer = fit(tmp_path, callback, values=values, max_epochs=3)
    folder = trainer.run_dir / "checkpoints"
    assert names_in(folder) == ["00 at 0.50", "01 at 0.25", "02 at 0.75"]
    assert callback.best_model_path == str(folder / "01 at 0.25")
    assert callback.last_model_path == str(folder / "02 at 0.75")
    again = Checkpoint("val/score", save_top_k=2, filename="{epoch:02d} at {val/score:.2f}")
    trainer = fit(tmp_path, again, values=values, resume="auto")
    assert (trainer.run_dir, trainer.global_step) == (folder.parent, 16)
    assert names_in(folder) == ["00 at 0.50", "01 at 0.25", "03 at 0.80"]
    assert again.best_model_path == str(folder / "01 at 0.25")


@pytest.mark.parametrize(
    ("filename", "top_k", "values", "names", "best"),
    [
        ("best", 1, [0.3, 0.5, 0.6], ["best", "best-v1"], "best"),
        ("best", 1, [0.3, 0.5, 0.2], ["best"], "best"),
        ("best", 2, [0.3, 0.5, 0.6], ["best", "best-v1", "best-v2"], "best"),
        ("best", 2, [0.5, 0.3, 0.6], ["best", "best-v1", "best-v2"], "best-v1"),
        ("best", -1, [0.5, 0.3, 0.6], ["best", "best-v1", "best-v2"], "best-v1"),
        ("m={val/score:.1f}", 1, [0.31, 0.34, 0.33], ["m=0.3", "m=0.3-v1"], "m=0.3"),
        ("m={val/score:.1f}", 2, [0.31, 0.34, 0.29], ["m=0.3", "m=0.3-v1"], "m=0.3-v1"),
    ],
)
def test_a_worse_one_never_replaces_a_better_one_of_the_same_name(tmp_path, filename, top_k, values, names, best):
    callback = Checkpoint("val/score", save_top_k=top_k, filename=filename)
    trainer = fit(tmp_path, callback, values=values)
    assert names_in(trainer.run_dir / "checkpoints") == sorted(names)
    assert callback.best_model_path == str(trainer.run_dir / "checkpoints" / best)
    assert callback.best_model_score.item() == pytest.approx(min(values))
    epoch = values.index(min(values))
    assert find.checkpoint_step(Path(callback.best_model_path)) == (epoch + 1) * STEPS
    assert find.checkpoint_step(Path(callback.last_model_path)) == len(values) * STEPS


def test_one_name_is_always_the_newest(tmp_path):
    callback = Checkpoint(filename="newest")
    trainer = fit(tmp_path, callback)
    folder = trainer.run_dir / "checkpoints"
    assert names_in(folder) == ["newest"]
    task = Scripted.load_from_checkpoint(callback.last_model_path)
    assert torch.equal(task.net.weight, trainer.task.net.weight)


@pytest.mark.parametrize(
    ("filename", "message"),
    [("{val/scor}", "Did you mean 'val/score'"), ("{epoch}/{step}", "not a valid"), (".{epoch}", "not a valid")],
)
def test_a_name_that_cannot_be_made_is_refused(tmp_path, filename, message):
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, Checkpoint(filename=filename), values=[0.5])


class Own(CheckpointCallback):
    """Saves under its own name, and tells where."""

    best_model_path = ""

    def on_train_epoch_end(self, trainer, task):
        self.best_model_path = str(trainer.run_dir / "own" / f"epoch{trainer.current_epoch}")
        trainer.save_checkpoint(self.best_model_path)


def test_a_callback_of_ones_own_that_saves(tmp_path):
    callback = Own()
    trainer = make_trainer(tmp_path, callback, max_epochs=2)
    trainer.fit(Scripted([0.5, 0.25, 0.125]), loader(), loader(1))
    assert trainer.checkpoint_callbacks == [callback]
    assert trainer.validate(dataloaders=loader(1), ckpt_path="best", verbose=False) is not None
    assert not (trainer.run_dir / "checkpoints").exists()
    assert find.newest_complete(trainer.run_dir / "own").name == "epoch1"


class Failing(Scripted):
    """Fails within a step, or within a validation."""

    def __init__(self, values, where):
        super().__init__(values)
        self.where = where

    def training_step(self, batch):
        if self.where == "step" and self.global_step == 6:
            raise ZeroDivisionError
        return super().training_step(batch)

    def validation_step(self, batch):
        if self.where == "validation" and self.global_step == 8:
            raise ZeroDivisionError
        super().validation_step(batch)


class AfterErrors(lg.Callback):
    """Saves when the run fails."""

    def on_exception(self, trainer, task, exception):
        self.saved = trainer.saver.save_after_error(trainer.default_root_dir / "failed")


@pytest.mark.parametrize(("where", "step"), [("step", 6), ("validation", 8)])
def test_a_run_that_failed_goes_on_from_its_last_finished_step(tmp_path, where, step):
    saving = AfterErrors()
    options = {"accumulate_grad_batches": 2, "max_epochs": 6} if where == "step" else {"max_epochs": 3}
    values = [0.5, 0.25, 0.125, 1.0, 2.0, 3.0]
    tasks = Scripted(values), Failing(values, where), Scripted(values)
    for task in tasks[1:]:
        task.load_state_dict(tasks[0].state_dict())
    uninterrupted = fit(tmp_path / "whole", task=tasks[0], **options)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, saving, task=tasks[1], **options)
    assert saving.saved
    trainer = make_trainer(tmp_path / "again", **options)
    trainer.fit(tasks[2], loader(), loader(1), resume=tmp_path / "failed")
    assert trainer.global_step == uninterrupted.global_step > step
    assert torch.equal(tasks[2].net.weight, tasks[0].net.weight)
    assert trainer.callback_metrics == uninterrupted.callback_metrics
