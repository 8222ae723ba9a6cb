"""Contents of a run directory, and the search below a folder, with real runs."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
from config_folder import write
from forked import Forked
from tiny import Validated, make_loader, make_trainer
from waiting import wait_until

import legato as lg
from legato.base.errors import ConfigError, LegatoError, WorkerError
from legato.base.version import LAST_READER_OF_RUNS
from legato.cli.config.read import dump_yaml
from legato.trainer.runs.directory import BestValue, RunDirectory, find_run, find_runs, is_run
from legato.trainer.runs.run_file import RUN_FILE, flat_config


class Ends(Validated):
    """Calls `end` in the second training step."""

    def __init__(self, end):
        super().__init__()
        self.end = end

    def training_step(self, batch, batch_idx):
        if self.global_step == 1:
            self.end()
        self.log("loss", loss := super().training_step(batch, batch_idx))
        return loss


def fit(folder, task=None, resume=None, **options):
    options = {"max_steps": 3, "logger": True, "enable_checkpointing": True, "log_every_n_steps": 1, **options}
    trainer = make_trainer(folder, **options)
    trainer.fit(task or Ends(lambda: None), make_loader(18), make_loader(18), resume=resume)
    return trainer


def only_run(folder):
    (arrays,) = find_runs(folder)
    return arrays


# --- how a run stands -------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_finished_run_says_so_with_its_step_time_and_best_value(tmp_path):
    trainer = fit(tmp_path, max_steps=-1, max_epochs=2, callbacks=[lg.callbacks.Checkpoint("val_loss", save_top_k=2)])
    run = only_run(tmp_path)
    assert (run.path, run.name, run.state, run.step, run.error) == (
        trainer.run_dir,
        "default/version_0",
        "done",
        10,
        "",
    )
    values = run.metrics["val_loss"][~numpy.isnan(run.metrics["val_loss"])]
    assert len(values) == 2
    assert run.best == BestValue("val_loss", "min", pytest.approx(min(values)))
    assert run.seconds == pytest.approx(trainer.elapsed, abs=1)
    assert [item.step for item in run.checkpoints if item.complete] == [5, 10]
    assert run.checkpoints[0].size == sum(path.stat().st_size for path in run.checkpoints[0].path.iterdir())
    assert not run.is_empty
    assert time.time() - 100 < run.began < time.time()


def fails():
    raise ZeroDivisionError("a bug of the user")


def exits():
    sys.exit(0)


def interrupts():
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "error", "state", "expected"),
    [
        (fails, ZeroDivisionError, "failed", "ZeroDivisionError: a bug of the user"),
        (exits, WorkerError, "failed", "sys.exit(0) in exits ("),
        (interrupts, KeyboardInterrupt, "preempted", "Ctrl-C"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), SystemExit, "preempted", "ended by a signal"),
    ],
)
def test_a_run_that_ends_early_says_why(tmp_path, end, error, state, expected):
    with pytest.raises(error):
        fit(tmp_path, Ends(end))
    run = only_run(tmp_path)
    assert run.state == state
    assert expected in run.error
    assert (f"in {end.__name__}\n" in run.traceback) == (state == "failed")
    if error is SystemExit:  # which has left a checkpoint
        fit(tmp_path, resume="auto")
        assert (only_run(tmp_path).state, only_run(tmp_path).error, only_run(tmp_path).step) == ("done", "", 3)


def wait_in_training(folder):
    fit(Path(folder), Ends(lambda: time.sleep(600)))


@pytest.mark.slow
def test_a_killed_run_has_failed_and_a_running_one_runs(tmp_path):
    process = Forked(wait_in_training, str(tmp_path))
    try:
        assert wait_until(lambda: any(item.step == 1 for item in find_runs(tmp_path)), 60)
        run = only_run(tmp_path)
        assert (run.state, run.error) == ("running", "")
        assert 0 < run.seconds < 100
    finally:
        os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    run = only_run(tmp_path)
    assert run.state == "failed"
    assert "ended without an error message" in run.error


@pytest.mark.slow
def test_a_resume_that_is_refused_leaves_the_record_as_it_was(tmp_path):
    fit(tmp_path)
    before = (only_run(tmp_path).path / RUN_FILE).read_bytes()
    with pytest.raises(LegatoError):
        fit(tmp_path, resume="auto", replicas=2)
    assert (only_run(tmp_path).path / RUN_FILE).read_bytes() == before


class FailsOnRankOne(Validated):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1:
            raise ZeroDivisionError("on rank 1")
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_workers_leave_the_error_of_the_rank_that_failed_first(tmp_path):
    with pytest.raises(Exception, match="on rank 1"):
        fit(tmp_path, FailsOnRankOne(), devices=2, strategy="ddp")
    run = only_run(tmp_path)
    assert run.state == "failed"
    assert "on rank 1" in run.error


# --- finding ----------------------------------------------------------------------------------------------------------
def record(path, **values):
    path.mkdir(parents=True, exist_ok=True)
    fields = {"legato": "0.1.0", "id": "a", "state": "done", "created": 1.0, "began": 1.0, "ended": 2.0}
    (path / RUN_FILE).write_text(json.dumps({**fields, **values}))
    return path


def test_runs_are_found_below_a_folder_and_nothing_else(tmp_path):
    for name in ("a/version_10", "a/version_9", "team/b/version_0"):
        record(tmp_path / name)
    record(tmp_path / "a/version_9/checkpoints/version_0")  # within a run
    (tmp_path / "lightning_logs/version_0").mkdir(parents=True)
    (tmp_path / "lightning_logs/version_0/hparams.yaml").write_text("{}")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [item.name for item in find_runs(tmp_path)] == ["a/version_9", "a/version_10", "team/b/version_0"]
    assert not is_run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"'.*/tem' is not a folder. Did you mean 'team'\?"):
        find_runs(tmp_path / "tem")


def test_a_run_is_named_by_path_or_by_name_or_by_that_of_its_newest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old, new = record(tmp_path / "runs/a/version_0"), record(tmp_path / "runs/a/version_1", created=2.0)
    assert find_run("a").path == Path("runs/a/version_1")
    assert find_run("a").name == "a/version_1"
    assert find_run("a/version_0").path.samefile(old)
    assert find_run("a/version_0").name == "a/version_0"
    assert find_run("runs").path.samefile(new)
    record(tmp_path / "runs/a/sweep-0/trial-3/version_0", created=3.0)  # below the name, but of another
    assert find_run("a").path == Path("runs/a/version_1")
    write("runs/a/version_0/config.yaml", "task: {}\n")
    assert find_run("runs/a/version_0/config.yaml").path.samefile(old)
    (old / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert find_run("runs/a/version_0/checkpoints/step-00000001").path.samefile(old)
    with pytest.raises(ConfigError, match="Did you mean 'a/version_1'"):
        find_run("a/version_11")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"state": 3, "step": "x", "best": [], "ended": 1}', "\0"])
def test_broken_files_are_no_reason_to_fail(tmp_path, text):
    run = RunDirectory(tmp_path)
    for name in (RUN_FILE, "metrics.jsonl"):
        (tmp_path / name).write_text(text)
    (tmp_path / "checkpoints").write_text(text)
    assert isinstance(run.state, str)
    assert (run.step, run.error, run.best, run.checkpoints) == (0, "", None, [])
    assert run.is_empty


def test_a_run_directory_of_before_is_refused_with_the_last_commit_that_reads_it(tmp_path):
    (tmp_path / "a/version_0").mkdir(parents=True)
    (tmp_path / "a/version_0/status.json").write_text("{}")
    assert find_runs(tmp_path) == []
    with pytest.raises(
        ConfigError, match=rf"an earlier version of Legato .* that can read it is {LAST_READER_OF_RUNS}"
    ):
        find_run(tmp_path / "a/version_0")
    with pytest.raises(ConfigError, match=LAST_READER_OF_RUNS):
        fit(tmp_path, run_name="a", resume="auto")


# --- reading ----------------------------------------------------------------------------------------------------------
def test_a_stored_config_is_read_as_yaml_reads_it():
    values = {"task": {"_target_": "a.B", "lr": 0.1, "names": ["x", "y # z"], "deep": {}}, "seed": None}
    values["list"] = [{"a": 1, "b": {"c": "t: u"}}, [1, 2], {"a": "two\nlines"}]
    values |= {"time": "10:00:00:00", "word": "yes", "small": 1e-5}
    task = {f"task.{name}": value for name, value in values.pop("task").items()}
    assert flat_config(dump_yaml({"task": {"_target_": "a.B", "lr": 0.1, "names": ["x", "y # z"], "deep": {}}})) == task
    assert flat_config(dump_yaml(values)) == values


LINES = """\
{"step": 1, "time": 10.0, "loss": 0.5}
torn {"step
{"step": 2, "time": 11.0, "loss": "NaN", "val/acc": 1}
{"step": 4, "time": 12.0, "loss": "-Infinity"}"""


def test_metrics_are_arrays_of_one_length(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(LINES)
    arrays = RunDirectory(tmp_path).metrics
    assert arrays["step"].tolist() == [1, 2, 4]
    assert arrays["step"].dtype == numpy.int64
    assert arrays["loss"].tolist()[0] == 0.5
    assert numpy.isnan(arrays["loss"][1])
    assert arrays["loss"][2] == -math.inf
    assert numpy.isnan(arrays["val/acc"]).tolist() == [True, False, True]
    record(tmp_path)
    assert lg.runs.open(tmp_path).metrics.keys() == arrays.keys()
    assert lg.runs.open(tmp_path / "metrics.jsonl").metrics["step"].tolist() == [1, 2, 4]
    (tmp_path / "metrics.jsonl").unlink()
    assert lg.runs.open(tmp_path).metrics == {}
    with pytest.raises(AttributeError, match=r"its name here is legato\.runs\.open\(run\)\.metrics"):
        lg.read_metrics  # noqa: B018


def test_a_frame_has_the_steps_as_its_index(tmp_path):
    pytest.importorskip("pandas")
    record(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(LINES)
    frame = lg.runs.open(tmp_path).frame()
    assert frame.index.tolist() == [1, 2, 4]
    assert list(frame.columns) == ["time", "loss", "val/acc"]
    assert frame["loss"].dropna().tolist() == [0.5, -math.inf]
    (tmp_path / "metrics.jsonl").unlink()
    assert lg.runs.open(tmp_path).frame().empty


@pytest.mark.slow
def test_runs_in_python(tmp_path, monkeypatch):
    best = lg.callbacks.Checkpoint("val_loss", save_top_k=1)
    trainer = fit(tmp_path / "runs", run_name="net", max_steps=-1, max_epochs=1, callbacks=[best])
    monkeypatch.chdir(tmp_path)
    (run,) = lg.runs.list()
    assert run.path == lg.runs.open("net").path == lg.runs.open(trainer.run_dir).path.relative_to(tmp_path)
    assert [entry.path.name for entry in run.checkpoints] == ["step-00000005"]
    assert run.best_checkpoint == run.checkpoints[0]
    assert run.best.value == pytest.approx(run.metrics["val_loss"][-1])
    with pytest.raises(ConfigError, match="Did you mean 'net'"):
        lg.runs.open("nte")


@pytest.mark.slow
def test_reading_a_run_does_not_load_torch(tmp_path):
    record(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(LINES)
    code = (
        "import sys, legato; run, = legato.runs.list(sys.argv[1]); "
        "assert run.state == 'done' and run.best is not None and not run.checkpoints; "
        "legato.runs.open(sys.argv[1]).metrics; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


@pytest.mark.skipif(sys.platform == "darwin", reason="its file system has no such names")
def test_a_folder_whose_name_is_no_text(tmp_path, monkeypatch):
    """Refused for runs, because TensorBoard cannot write there; as a working directory it is recorded unchanged."""
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    odd.mkdir()
    monkeypatch.chdir(odd)
    with pytest.raises(ConfigError, match="not valid text in this locale"):
        lg.Trainer(default_root_dir="runs", max_steps=1).fit(Validated(), make_loader())
    assert list(odd.iterdir()) == []
    trainer = lg.Trainer(default_root_dir=tmp_path / "runs", max_steps=1)
    trainer.fit(Validated(), make_loader())
    (start,) = json.loads((Path(trainer.run_dir) / "environment.json").read_text())["starts"]
    assert start["working_directory"] == str(odd)


def test_a_program_without_stdout_and_stderr(tmp_path, monkeypatch):
    """Like pythonw and daemons."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    trainer = lg.Trainer(default_root_dir=tmp_path, max_steps=1)
    trainer.fit(Validated(), make_loader())
    trainer.print("said to nobody")
    assert trainer.global_step == 1
