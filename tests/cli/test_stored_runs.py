"""Commands that look at runs on disk: what they print, in what width, and what clean deletes."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny import Tiny, make_loader, make_trainer

import legato as lg
from legato.base.checkpoint_index import CheckpointIndex, Entry
from legato.base.quantities import time_taken
from legato.base.run_names import RUN_FILE
from legato.cli.main import main
from legato.cli.runs.differences import short_names
from legato.trainer.checkpoints import commit, find
from legato.trainer.runs.directory import RunDirectory
from legato.trainer.runs.lock import RunLock
from legato.trainer.runs.run_file import flat_config

CONFIG = """\
seed: {seed}
run:
  name: default
  root: runs
resume: null
task:
  _target_: {task}
  lr: {lr}
trainer:
  max_epochs: 3
  accumulate_grad_batches: 1
callbacks:
  checkpoint:
    _target_: legato.callbacks.Checkpoint
    monitor: val/loss
    mode: min
"""


MADE = []
"""The runs that the test has made."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    MADE.clear()
    return tmp_path


def write_index(path, steps, best):
    """Write the index of a run's checkpoints; best: the step of the best one, None for none."""
    entries = {find.directory_name(step): Entry(step, 0.4 if step == best else 0.5) for step in steps}
    if best is None:
        entries = {name: entry._replace(score=None) for name, entry in entries.items()}
    (path / "checkpoints" / "index.json").write_bytes(CheckpointIndex("abc", "val/loss", "min", entries).dump())


def make_run(name, *, steps=(5, 10), points=3, lr=0.1, seed=0, task="line.Line", **status):
    """Write what a run of this name leaves; return its directory."""
    path = Path("runs") / name
    path.mkdir(parents=True)
    made = 1000.0 + len(MADE)
    MADE.append(path)
    times = {"created": made, "began": made, "ended": made + 62, "elapsed": 62.0}
    status = {"legato": "0.1.0", "id": "abc", "stage": "fit", "state": "done", **times, **status}
    progress = {"step": points, "epoch": 1, "max_epochs": 3, "max_steps": -1, "monitor": "val/loss", "mode": "min"}
    values = {"best": 0.5 - lr} if steps else {}
    config = CONFIG.format(lr=lr, seed=seed, task=task)
    (path / RUN_FILE).write_text(json.dumps({**progress, **values, "config": flat_config(config), **status}))
    (path / "config.yaml").write_text(config)
    lines = [
        {"step": number, "time": 1000.0 + number, "lr-SGD": lr, "val/loss": 1 / number + lr}
        for number in range(1, points + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in steps:
        checkpoint = path / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    if steps:
        write_index(path, steps, steps[0])
        (checkpoint / "state.json").write_text("{}")
    return path


def said(capsys, *words, code=0):
    """Run the command; return what it printed."""
    assert main(words) == code
    out, err = capsys.readouterr()
    assert (err == "") == (code == 0)
    return out if code == 0 else err


# --- runs -------------------------------------------------------------------------------------------------------------
def test_runs_are_listed_with_state_step_best_value_duration_and_difference(capsys):
    make_run("a/version_0")
    make_run("a/version_1", lr=0.2)
    make_run("a/version_2", seed=7)
    make_run("b/version_0", steps=(), points=0, step=0, state="failed", error="ValueError: x", task="other.Net")
    make_run("b/version_1", state="running", ended=None)  # nobody holds its lock: it was killed
    lines = said(capsys, "runs").splitlines()
    assert [line.split() for line in lines] == [
        ["name", "state", "step", "best", "duration", "differs", "by"],
        ["a/version_0", "done", "3", "val/loss", "0.4", "1", "min", "2", "s", "seed=0", "lr=0.1"],
        ["a/version_1", "done", "3", "val/loss", "0.3", "1", "min", "2", "s", "seed=0", "lr=0.2"],
        ["a/version_2", "done", "3", "val/loss", "0.4", "1", "min", "2", "s", "seed=7", "lr=0.1"],
        ["b/version_0", "failed", "0", "-", "1", "min", "2", "s"],
        ["b/version_1", "failed", "3", "val/loss", "0.4", "1", "min", "2", "s", "seed=0", "lr=0.1"],
    ]
    assert [line.split()[0] for line in said(capsys, "runs", "--sort", "best").splitlines()[1:]][-1] == "a/version_1"
    assert [line.split()[0] for line in said(capsys, "runs", "--state", "failed").splitlines()[1:]] == [
        "b/version_0",
        "b/version_1",
    ]


def test_runs_differ_by_what_they_set_and_not_by_defaults(capsys):
    for number, keys in enumerate([[], ["task.lr"], ["trainer.max_epochs"]]):
        path = make_run(f"a/version_{number}", lr=0.1 * (1 + (number == 1)))
        status = json.loads((path / RUN_FILE).read_text())
        (path / RUN_FILE).write_text(json.dumps({**status, "set": keys}))
    rows = [line.split() for line in said(capsys, "runs").splitlines()[1:]]
    assert [row[-1] for row in rows] == ["s", "lr=0.2", "s"]


def test_a_run_that_differs_by_many_keys_has_a_short_row(capsys):
    for number in range(2):
        path = make_run(f"a/version_{number}")
        status = json.loads((path / RUN_FILE).read_text())
        status["config"] |= {f"loggers.mine.option_{index}": index + number for index in range(12)}
        (path / RUN_FILE).write_text(json.dumps(status))
    for line in said(capsys, "runs").splitlines()[1:]:
        assert line.endswith(" and 6 more")
        assert line.count("=") == 6


def test_where_there_is_no_run_that_is_said(capsys):
    assert said(capsys, "runs") == "There are no runs in runs.\n"
    assert "'rusn' is not a folder." in said(capsys, "runs", "rusn", code=2)
    Path("runs").mkdir()
    assert "Did you mean 'runs'?" in said(capsys, "runs", "rnus", code=2)
    assert "Did you mean '--state'?" in said(capsys, "runs", "--sate", "done", code=2)
    assert "invalid choice: 'dome'" in said(capsys, "runs", "--state", "dome", code=2)


@pytest.mark.slow
def test_a_thousand_runs_take_few_calls(capsys):
    for number in range(1000):
        make_run(f"sweep/version_{number}", lr=number / 1000, steps=(1,))
    calls = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        lines = said(capsys, "runs", "--all").splitlines()
    finally:
        sys.setprofile(None)
    assert calls["call"] < 300 * 1000  # of Python functions; as many take a second
    assert len(lines) == 1001
    assert "lr=0.5" in lines[501]
    lines = said(capsys, "runs").splitlines()
    assert len(lines) == 52
    assert lines[-1] == "950 older runs not shown; --all shows them."


def in_terminal(command, columns=80):
    """Run a command whose output is a terminal; return what it printed."""
    code = (
        "import os, pty, struct, fcntl, termios, subprocess, sys\n"
        "own, other = pty.openpty()\n"
        f"fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack('HHHH', 24, {columns}, 0, 0))\n"
        "process = subprocess.Popen(sys.argv[1:], stdout=other, stderr=other)\n"
        "os.close(other)\n"
        "while True:\n"
        "    try: found = os.read(own, 65536)\n"
        "    except OSError: break\n"
        "    if not found: break\n"
        "    os.write(1, found)\n"
        "sys.exit(process.wait())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    done = subprocess.run(
        [sys.executable, "-c", code, sys.executable, "-m", "legato", *command],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    return done.stdout.replace("\r", "")


@pytest.mark.slow
def test_lines_fit_the_terminal():
    for number in range(3):
        make_run(f"a-run-with-a-rather-long-name/version_{number}", lr=number / 7, seed=number)
    for words in (["runs"], ["show", "runs"], ["compare", *map(str, Path("runs").glob("*/*"))]):
        lines = in_terminal(words).splitlines()
        assert len(lines) > 3
        assert max(map(len, lines)) <= 80
    assert any(line.endswith("...") for line in in_terminal(["runs"], 60).splitlines())


# --- show and compare -------------------------------------------------------------------------------------------------
def test_show_counts_epochs_as_the_progress_bar_does(capsys, tmp_path):
    class Fails(Tiny):
        def training_step(self, batch, batch_idx):
            if self.current_epoch == 2 and batch_idx == 3:
                raise ZeroDivisionError("a bug of the user")
            self.log("loss", loss := self.loss(batch))
            return loss

    options = {"logger": True, "log_every_n_steps": 1, "max_epochs": 3, "default_root_dir": "runs"}
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, **options).fit(Fails(), make_loader())
    assert "state  failed, step 13, epoch 3 of 3\n" in said(capsys, "show", "runs")
    path = next(Path("runs").rglob(RUN_FILE))
    status = json.loads(path.read_text())
    del status["ended"]  # as a process leaves it that is killed
    path.write_text(json.dumps({**status, "state": "running", "step": 0, "epoch": 0}))
    assert "state  failed, step 13, epoch 3 of 3\n" in said(capsys, "show", "runs")
    make_trainer(tmp_path, **{**options, "default_root_dir": "done"}).fit(Tiny(), make_loader())
    assert "state  done, step 15, epoch 3 of 3\n" in said(capsys, "show", "done")


def test_show_tells_state_config_metrics_error_and_files(capsys):
    path = make_run("a/version_0", task="legato.tasks.Digits", lr=0.25)
    start = {"arguments": ["/bin/legato", "fit", "a b.yaml"], "processes": 2, "device": "cpu", "host": {"name": "moon"}}
    start |= {"strategy": "ddp", "git": {"commit": "0123456789abcdef", "diff_file": "uncommitted.diff"}}
    (path / "environment.json").write_text(json.dumps({"starts": [start]}))
    status = json.loads((path / RUN_FILE).read_text())
    (path / RUN_FILE).write_text(json.dumps({**status, "set": ["task.lr", "trainer.max_epochs"]}))
    text = said(capsys, "show", "a")
    assert "by     legato fit 'a b.yaml'\n" in text
    assert "on     2 x cpu on moon, strategy ddp, commit 0123456789 and uncommitted.diff\n" in text
    assert "run    a/version_0  (runs/a/version_0)\nstate  done, step 3, epoch 1 of 3\n" in text
    assert "best   val/loss 0.25 (min)" in text
    assert "  task.lr: 0.25\n  trainer.max_epochs: 3\n" in text
    assert "accumulate_grad_batches" not in text  # a default
    assert re.search(r"2 checkpoints, \d.*; complete: 5, 10\n", text)
    trace = "Traceback:\n  line.py:3\nValueError: too bad"
    make_run("b/version_0", state="failed", error="ValueError: too bad", traceback=trace, points=0, steps=())
    text = said(capsys, "show")  # the newest
    assert "last error:\n  Traceback:\n    line.py:3\n  ValueError: too bad\n" in text
    assert "metrics: none" in text
    assert "Did you mean 'b'?" in said(capsys, "show", "bb", code=2)


ODD = {
    "nested": lambda path: path.write_text("[" * 100_000),
    "nested in a value": lambda path: path.write_text('{"step": 1, "state": ' + "[" * 100_000),
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": os.mkdir,
    "numbers": lambda path: path.write_text(
        '{"legato": "1", "id": "x", "step": 1e999, '
        '"time": "x", "created": NaN, "began": 1e300, "elapsed": -Infinity, "epoch": {}, "best": "x"}'
    ),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", [RUN_FILE, "metrics.jsonl", "environment.json", "checkpoints/named/state.json"])
def test_one_odd_file_stops_no_list_of_runs(capsys, name, kind):
    path, intact = make_run("a/version_0"), make_run("b/version_0")
    (path / "checkpoints/named").mkdir()
    (path / "checkpoints/named/manifest.json").write_text("{}")
    (path / name).unlink(missing_ok=True)
    ODD[kind](path / name)
    lines = said(capsys, "runs").splitlines()
    is_run = name != RUN_FILE or kind == "numbers"
    assert sorted(line.split()[0] for line in lines) == [*["a/version_0"] * is_run, "b/version_0", "name"]
    said(capsys, "show", "a" if is_run else "b")
    said(capsys, "clean", "--dry-run")
    assert RunDirectory(intact).state == "done"


def test_a_broken_run_is_shown_as_far_as_it_goes(capsys):
    path = make_run("a/version_0")
    (path / "environment.json").write_text('{"starts": [3]}')
    (path / "metrics.jsonl").write_bytes(b'\xff\n{"step": 1\n')
    (path / RUN_FILE).write_text('{"legato": "0.1.0", "id": "abc", "config": 3, "set": 3, "state": "done"}')
    (path / "checkpoints" / "step-00000005" / "manifest.json").unlink()
    text = said(capsys, "show", "a")
    assert "state  done, step 0\n" in text
    assert "config: not stored" in text
    assert re.search(r"2 checkpoints, \d.*; complete: 10\n", text)
    assert said(capsys, "runs").splitlines()[1].split()[:3] == ["a/version_0", "done", "0"]


def test_compare_puts_what_differs_side_by_side(capsys):
    make_run("a/version_0")
    make_run("a/version_1", lr=0.2, points=2)
    text = said(capsys, "compare", "a/version_0", "a/version_1")
    assert [line.split() for line in text.splitlines() if line.startswith("task.lr")] == [["task.lr", "0.1", "0.2"]]
    (row,) = (line for line in text.splitlines() if line.startswith("val/loss"))
    assert row.split() == ["val/loss", "0.4333", "(0.4333", "..", "1.1)", "0.7", "(0.7", "..", "1.2)"]
    assert "config: the same" in said(capsys, "compare", "a/version_0", "a/version_0")
    make_run("a/version_2", config=None)
    script = "config: none stored for a/version_2, started by a script\n"
    assert script in said(capsys, "compare", "a/version_0", "a/version_2")
    assert "needs at least two runs" in said(capsys, "compare", "a", code=2)


def test_times_and_short_names():
    assert [time_taken(seconds) for seconds in (None, 1.25, 59.7, 61, 3700, 200000)] == [
        "-", "1.2 s", "60 s", "1 min 1 s", "1 h 1 min", "2 d 7 h",
    ]  # fmt: skip
    assert short_names(["task.lr", "data.lr", "seed"]) == {"task.lr": "task.lr", "data.lr": "data.lr", "seed": "seed"}


# --- clean ------------------------------------------------------------------------------------------------------------
def left():
    return sorted(
        str(path.relative_to("runs")) for path in Path("runs").glob("*/version_*") if not path.parent.is_symlink()
    )


NAMES = ("done", "stopped", "odd")


def make_saved_run(name, *, steps=(5, 10), run="abc", best=5, **options):
    """Make a run whose checkpoints are real ones, written by `run`; best: the step of the best one."""
    path = make_run(name, steps=(), **{"best": 0.4, **options})
    for step in steps:
        contents = {"state_dict": {"weight": torch.ones(2)}, "global_step": step}
        commit.write(path / "checkpoints" / find.directory_name(step), contents, run=run)
    write_index(path, steps, best)
    return path


def everything():
    make_saved_run("done/version_0", steps=(5, 10, 15, 20), best=10)
    make_run("done/version_1", points=0, step=0, steps=())  # empty
    make_run("done/version_2", points=0, step=0, steps=())
    Path("runs/done/version_2/predictions.safetensors").write_text("mine")
    make_saved_run("failed/version_0", state="failed")
    make_saved_run("stopped/version_0", state="preempted")
    make_saved_run("odd/version_0", best=None, steps=(1, 2, 3))  # its best one is not known
    Path("runs/lightning/version_0").mkdir(parents=True)
    Path("runs/lightning/version_0/metrics.csv").write_text("step,loss\n")
    Path("runs/link").symlink_to(Path("runs/failed").absolute())


def test_clean_deletes_what_it_lists_and_nothing_else(capsys):
    everything()
    before = left()
    text = said(capsys, "clean", "--dry-run")
    assert left() == before
    assert "runs/failed/version_0  " in text
    assert "can be resumed from step 10" in text
    assert "Confirmation requires a terminal" in capsys.readouterr().err or main(["clean"]) == 2
    assert left() == before
    capsys.readouterr()
    said(capsys, "clean", "--yes", "--only", "empty")
    assert sorted(set(before) - set(left())) == ["done/version_1"]
    said(capsys, "clean", "--yes")
    assert sorted(set(before) - set(left())) == ["done/version_1", "failed/version_0"]
    kept = {
        name: [int(path.name[5:]) for path in sorted(Path("runs", name).glob("*/checkpoints/step-*"))] for name in NAMES
    }
    assert kept == {"done": [10, 20], "stopped": [5, 10], "odd": [1, 2, 3]}
    assert said(capsys, "clean", "--yes") == "There is nothing to delete.\n"


@pytest.mark.parametrize(("answer", "deleted"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_clean_asks(capsys, monkeypatch, answer, deleted):
    make_saved_run("failed/version_0", state="failed")

    class Terminal:
        def isatty(self):
            return True

        def readline(self):
            return answer

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda question: print(question) or answer.strip())
    assert "Delete 1 folder, " in said(capsys, "clean")
    assert (left() == []) == deleted


def test_clean_leaves_a_run_that_was_resumed_while_it_asked(capsys, monkeypatch):
    path = make_saved_run("failed/version_0", state="failed")

    def resume_and_say_yes(question):
        status = json.loads((path / RUN_FILE).read_text())
        (path / RUN_FILE).write_text(json.dumps({**status, "state": "done"}))
        return "y"

    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", resume_and_say_yes)
    assert "was not deleted: it has changed" in said(capsys, "clean", "--only", "failed")
    assert left() == ["failed/version_0"]


def test_clean_leaves_a_run_that_somebody_writes_to(capsys):
    path = make_saved_run("failed/version_0", state="failed")
    lock = RunLock(path, "validate")
    lock.take()
    try:
        assert said(capsys, "clean", "--yes") == "There is nothing to delete.\n"
        assert left() == ["failed/version_0"]
    finally:
        lock.release()
    said(capsys, "clean", "--yes")
    assert left() == []


def files_below(*folders):
    """Return the files below folders, with their bytes; a link with what it points to."""
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file()]
    return {path: os.readlink(path) if path.is_symlink() else path.read_bytes() for path in files}


@pytest.mark.parametrize("state", ["failed", "running", "done"])
def test_clean_leaves_folders_that_are_no_runs(capsys, state):
    foreign = Path("runs/service")
    (foreign / "checkpoints/v1").mkdir(parents=True)
    (foreign / RUN_FILE).write_text(json.dumps({"state": state, "step": 0, "id": "abc", "ended": 1.0}))
    (foreign / "checkpoints/v1/manifest.json").write_text("{}")
    before = files_below(Path("runs"))
    assert said(capsys, "clean", "--yes") == "There is nothing to delete.\n"
    assert files_below(Path("runs")) == before


def test_clean_deletes_only_checkpoints_that_this_run_wrote(capsys):
    path = make_saved_run("done/version_0", steps=(5, 10, 15, 20), best=20)
    inside = path / "checkpoints"
    (inside / "v1").mkdir()
    (inside / "v1/manifest.json").write_text("{}")  # of another program
    (inside / "v1/state.json").write_text("{}")
    commit.write(inside / "step-00000012", {"state_dict": {}, "global_step": 12}, run="def")  # of another run
    (inside / "step-00000010/notes.txt").write_text("mine")
    left = [inside / "v1", *(inside / f"step-000000{step}" for step in (10, 12, 20))]
    kept = files_below(*left) | {inside / "index.json": (inside / "index.json").read_bytes()}
    text = said(capsys, "clean", "--yes")
    assert "step-00000010 was not deleted" in text
    assert "notes.txt, which Legato did not write" in text
    assert files_below(inside) == kept


def test_clean_never_follows_a_link(capsys, tmp_path):
    elsewhere = make_saved_run("../elsewhere", steps=(1, 2, 3))
    linked = make_run("done/version_0", steps=())
    (linked / "checkpoints").symlink_to((elsewhere / "checkpoints").absolute())
    failed = make_run("failed/version_0", steps=(), state="failed")
    (failed / "checkpoints").symlink_to((elsewhere / "checkpoints").absolute())
    (failed / "metrics.csv").symlink_to((elsewhere / "metrics.jsonl").absolute())
    (failed / "evaluations").symlink_to(elsewhere.absolute())
    before = files_below(elsewhere)
    assert f"{failed} was kept, because Legato did not write checkpoints, evaluations, metrics.csv.\n" in said(
        capsys, "clean", "--yes"
    )
    assert files_below(elsewhere) == before
    assert (linked / "checkpoints").is_symlink()


def test_clean_deletes_of_a_run_what_legato_writes_and_names_the_rest(capsys):
    empty = make_run("empty/version_0", steps=(), points=0, step=0)
    (empty / "checkpoints").mkdir()
    (empty / "checkpoints/pretrained.pt").write_text("mine")
    failed = make_saved_run("failed/version_0", state="failed")
    for name in (
        "hang/rank-0.txt",
        "evaluations/test/version_0/metrics.jsonl",
    ):
        (failed / name).parent.mkdir(parents=True, exist_ok=True)
        (failed / name).write_text("")
        os.utime(failed / name, (0, 0))  # nobody has touched the lock for long
    for name in ("environment.json", "uncommitted-1.diff", "events.out.tfevents.1.host", "wandb-id.txt"):
        (failed / name).write_text("")
    for name in ("checkpoints/pretrained.pt", "notes.txt", "evaluations/test/version_0/figure.png"):
        (failed / name).write_text("mine")
    (failed / "checkpoints/.step-00000007.partial").mkdir()
    text = said(capsys, "clean", "--yes")
    assert "was kept, because Legato did not write checkpoints, evaluations, notes.txt.\n" in text
    assert set(files_below(failed).values()) == {b"mine"}
    assert len(files_below(failed)) == 3
    assert (empty / "checkpoints/pretrained.pt").read_text() == "mine"  # not even listed: it holds more than a start
    assert str(empty) not in text
    assert said(capsys, "clean", "--yes") == "There is nothing to delete.\n"


def test_clean_deletes_a_failed_run_that_legato_has_written(capsys, tmp_path):
    class Fails(Tiny):
        def on_train_epoch_end(self):
            raise ZeroDivisionError("a bug of the user")

    saves = [lg.callbacks.Checkpoint(every_n_train_steps=1)]
    options = {"logger": True, "enable_checkpointing": True, "callbacks": saves, "default_root_dir": "runs"}
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, **options).fit(Fails(), make_loader())
    assert len(left()) == 1
    said(capsys, "clean", "--yes")
    assert left() == []
