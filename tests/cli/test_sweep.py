"""`legato sweep` with real processes: choices, failures, a kill in the middle, the same command again."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line_folder import CONFIG, TASK
from forked import Forked, run_module

from legato.base.errors import ConfigError
from legato.cli.main import main
from legato.cli.sweep import AHEAD, Axis, Sweep, Trial, guided_values, list_values, read_axis, share_devices

SLOW = (
    TASK
    + """
    def on_train_batch_end(self, outputs, batch, batch_idx):
        import time
        time.sleep(0.2)
"""
)
OBJECTIVE = ("--metric", "val_loss", "--mode", "min")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a task with its data, and a config."""
    (tmp_path / "line.py").write_text(TASK)
    (tmp_path / "line.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "line", raising=False)
    return tmp_path


def sweep(*words: str) -> Forked:
    return Forked(run_module, "legato", "sweep", "line.yaml", *words, *OBJECTIVE)


def finished(process: Forked, code: int, timeout: float = 200) -> tuple[str, str]:
    streams = process.communicate(timeout=timeout)
    assert process.returncode == code, streams
    return streams


def rows_of(directory: Path) -> list[dict[str, str]]:
    with (directory / "summary.csv").open() as file:
        return list(csv.DictReader(file))


# --- values -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1,2", ["1", "2"]),
        ("[1,2]", ["[1,2]"]),
        ("[1,2], [3, 4]", ["[1,2]", "[3, 4]"]),
        ("{a: 1, b: 2},null", ["{a: 1, b: 2}", "null"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ('"a,\'b",c', ['"a,\'b"', "c"]),
        ("it's,fine", ["it's", "fine"]),
    ],
)
def test_commas_separate_outside_of_brackets_and_quotes(text: str, wanted: list[str]) -> None:
    axis = read_axis(f"a={text}")
    assert axis == (Axis("a", tuple(wanted)) if len(wanted) > 1 else None)


def test_what_varies() -> None:
    assert read_axis("a=1") is None
    assert read_axis("a='x,y'") is None
    assert read_axis("a=range(32,129,32)") == Axis("a", ("32", "64", "96", "128"))
    assert read_axis("a=log(1e-5, 1e-2)") == Axis("a", ("1e-5", "1e-2"), "log")
    assert read_axis("a=uniform(1,8)") == Axis("a", ("1", "8"), "uniform")
    for text in (
        "range(3,1)",
        "range(a)",
        "log(0,1)",
        "uniform(2,1)",
        "uniform(1)",
        "1,,2",
    ):
        with pytest.raises(ConfigError, match=r"^a="):
            read_axis(f"a={text}")


def test_a_grid_goes_through_all_combinations_the_last_key_first() -> None:
    grid = list_values([Axis("a", ("1", "2")), Axis("b", ("x", "y"))], None, 0)
    assert [list(values.values()) for values in grid] == [["1", "x"], ["1", "y"], ["2", "x"], ["2", "y"]]


def test_random_values_follow_from_seed_and_number() -> None:
    axes = [Axis("lr", ("1e-5", "1e-2"), "log"), Axis("n", ("3", "5"), "uniform"), Axis("c", ("x", "y"))]
    values = list_values(axes, 30, 1)
    assert list_values(axes, 3, 1) == values[:3] != list_values(axes, 3, 2)
    assert all(1e-5 <= float(trial["lr"]) <= 1e-2 for trial in values)
    assert {trial["n"] for trial in values} == {"3", "4", "5"}
    assert sum(float(trial["lr"]) < 1e-4 for trial in values) > 3
    with pytest.raises(ConfigError, match="--random 20"):
        list_values(axes, None, 1)
    grid = [Axis("a", ("1", "2")), Axis("b", ("x", "y"))]
    assert list_values(grid, 3, 0) == list_values(grid, 9, 0)[:3]
    assert len(list_values(grid, 9, 0)) == 4


@pytest.mark.slow
def test_optuna_chooses_the_same_in_whatever_order_trials_end() -> None:
    pytest.importorskip("optuna")
    axes = [Axis("x", ("-4.0", "4.0"), "uniform"), Axis("c", ("1", "2"))]

    def play(jobs: int) -> list[dict[str, str]]:
        results: dict[int, float | None] = {}
        reported: list[float | None] = []
        source, chosen, running = random.Random(jobs), list[dict[str, str]](), list[int]()
        values = guided_values(axes, 30, 3, "min", reported)
        while len(chosen) < 30 or running:
            ready = [results.get(number, "missing") for number in range(max(0, len(chosen) - AHEAD + 1))]
            if len(chosen) < 30 and len(running) < jobs and "missing" not in ready:
                reported[:] = ready  # type: ignore[assignment]
                running.append(len(chosen))
                chosen.append(next(values))
            else:
                ended = running.pop(source.randrange(len(running)))
                results[ended] = None if ended == 5 else float(chosen[ended]["x"]) ** 2
        return chosen

    alone = play(1)
    assert alone == play(3) == play(4)
    assert sum(abs(float(trial["x"])) for trial in alone[-10:]) < sum(abs(float(trial["x"])) for trial in alone[:10])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no key has several values"),
        (["task.lr=1,2", "task.lr=3,4"], "task.lr is set twice"),
        (["run.root=a,b"], "run.root cannot vary"),
        (["task.lr=1,2"], "no callback in the config monitors a metric. Set the metric to compare: --metric NAME"),
        (["task.lr=1,high", *OBJECTIVE], "task.lr must be float, not the string 'high'"),
        (["task.rate=1,2", *OBJECTIVE], "override: task.rate is not an argument of Line. It takes lr"),
        (["task.lr=uniform(0,1)", *OBJECTIVE], "Limit it with --random 20"),
        (["task.lr=1,2", "--jobs", "0", *OBJECTIVE], "--jobs must be at least 1"),
        (["task.lr=1,2", "--random", "2", "--optuna", "3"], "cannot be combined"),
        (["task.lr=1,2", "--job", "2"], "Did you mean '--jobs'?"),
        (["task.lr=1,2", "launcher=slurm", *OBJECTIVE], "on this machine"),
    ],
)
def test_mistakes_are_found_before_the_first_trial(words: list[str], message: str, capsys: Any) -> None:
    assert main(["sweep", "line.yaml", *words]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


# --- trials -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_failed_trial_stops_no_other_and_the_same_command_goes_on() -> None:
    words = ("task.lr=1e9,0.3,0.1", "trainer.max_epochs=1", "--jobs", "2")
    out, err = finished(sweep(*words), 1)
    assert "1 of 3 trials failed" in err
    directory = Path("runs/default/sweep_0")
    assert str(directory) in out
    rows = rows_of(directory)
    assert [row["task.lr"] for row in rows] == ["0.3", "0.1", "1e9"]
    assert [row["state"] for row in rows] == ["done", "done", "failed"]
    assert float(rows[0]["val_loss"]) < float(rows[1]["val_loss"])
    assert "was never logged with a finite value." in rows[2]["error"]
    assert out.splitlines()[-4].split() == ["task.lr", "val_loss", "step", "state", "run"]
    assert out.splitlines()[-3].split()[0] == "0.3"
    done = directory / "001-lr=0.3"
    before = (done / "log.txt").stat().st_mtime_ns
    out, _ = finished(sweep(*words, "resume=auto"), 1)
    assert "000-lr=1e9 failed" in out
    assert "001-lr=0.3 started" not in out
    assert (done / "log.txt").stat().st_mtime_ns == before
    assert not Path("runs/default/sweep_1").exists()
    finished(sweep("task.lr=0.3,0.2", "trainer.max_epochs=1"), 0)
    assert Path("runs/default/sweep_1").exists()


@pytest.mark.slow
def test_a_trial_that_never_begins_has_the_reason_in_its_row() -> None:
    words = ("task._target_=line.Line,line.Fails",)
    fails = "class Fails(Line):\n    def __init__(self):\n        raise OSError('no disk')\n"
    Path("line.py").write_text(f"{TASK}\n\n{fails}")
    finished(sweep(*words, "trainer.max_epochs=1"), 1)
    failed = rows_of(Path("runs/default/sweep_0"))[-1]
    assert (failed["state"], failed["error"]) == ("failed", "OSError: no disk")


@pytest.mark.slow
def test_optuna_goes_on_with_the_same_trials() -> None:
    pytest.importorskip("optuna")
    words = ("task.lr=log(1e-3,0.5)", "trainer.max_epochs=1", "--optuna")
    finished(sweep(*words, "2"), 0)
    few = {row["run"]: row["val_loss"] for row in rows_of(Path("runs/default/sweep_0"))}
    finished(sweep(*words, "3", "--jobs", "2"), 0)
    many = {row["run"]: row["val_loss"] for row in rows_of(Path("runs/default/sweep_0"))}
    assert len(many) == 3
    assert few.items() <= many.items()


def trial_processes() -> list[psutil.Process]:
    """Return the processes in this folder, but this one and its helpers."""
    here = psutil.Process()
    helpers = {here.pid, *(child.pid for child in here.children())}
    processes = psutil.process_iter(["cwd"])
    return [process for process in processes if process.info["cwd"] == str(Path.cwd()) and process.pid not in helpers]


def wait_for(condition: Any, seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_a_sweep_that_is_ended_or_killed_goes_on() -> None:
    """Ctrl-C, SIGTERM and SIGKILL, in this order; then the result is that of an undisturbed run."""
    Path("line.py").write_text(SLOW)
    words = (
        "task.lr=0.1,0.3",
        "trainer.max_epochs=12",
        "--jobs",
        "2",
        "callbacks.c={_target_: legato.callbacks.Checkpoint, every_n_train_steps: 1}",
    )
    logs = [Path(f"runs/default/sweep_0/{name}/version_0/metrics.jsonl") for name in ("000-lr=0.1", "001-lr=0.3")]
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)):
        before = [len(log.read_text().splitlines()) if log.exists() else 0 for log in logs]
        process = sweep(*words)
        wait_for(
            lambda before=before: all(
                log.exists() and len(log.read_text().splitlines()) > count + 1
                for log, count in zip(logs, before, strict=True)
            )
        )
        os.kill(process.pid, number)
        out, _ = finished(process, code)
        if number != signal.SIGKILL:
            assert "Trials left to run: 2. Repeat the command to continue." in out
            assert not trial_processes()
        wait_for(lambda: not trial_processes())
        assert all('"step": 36' not in log.read_text() for log in logs)
    out, _ = finished(sweep(*words), 0)
    assert "done" in out.splitlines()[-1]
    out, _ = finished(sweep(*words, "--quiet"), 0)
    assert out.splitlines()[0].split()[:2] == ["task.lr", "val_loss"]  # the table, and not how many trials there are
    for log in logs:
        steps = [json.loads(line)["step"] for line in log.read_text().splitlines() if "val_loss" in line]
        assert steps == sorted(set(steps))
        assert steps[-1] == 36
        assert not (log.parents[1] / "version_1").exists()
    Path("line.py").write_text(TASK)
    assert main(["fit", "line.yaml", "task.lr=0.3", "trainer.max_epochs=12", "run.root=plain"]) == 0
    plain = [
        json.loads(line).get("val_loss")
        for line in Path("plain/default/version_0/metrics.jsonl").read_text().splitlines()
    ]
    rows = rows_of(Path("runs/default/sweep_0"))
    assert float(rows[0]["val_loss"]) == min(value for value in plain if value is not None)


class Signalled(Trial):
    """A trial in whose start Ctrl-C comes."""

    def start(self, words: Any, devices: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        self.devices = devices
        self.process = self.started = subprocess.Popen(["sleep", "60"], start_new_session=True)


class OneTrial(Sweep):
    """A sweep of a trial that is signalled."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.metric, self.mode, self.axes = folder, "loss", "min", []
        self.trials: list[Any] = [Signalled(folder / "000", {})]
        self.fixed, self.count, self.signals, self.free = [], 1, [], [""]

    def next_trial(self) -> Trial:
        return self.trials[0]


def test_a_trial_that_was_being_started_at_ctrl_c_may_save(folder: Path) -> None:
    sweep = OneTrial(folder)
    sweep.run()
    assert sweep.trials[0].started.returncode == -signal.SIGTERM


# --- devices --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("names", "jobs", "each", "wanted"),
    [
        ("0123", 4, 1, ["0", "1", "2", "3"]),
        ("0123", 2, None, ["0,1", "2,3"]),
        ("01234", 2, None, ["0,1", "2,3"]),
        ("0123", 4, 2, ["0,1", "2,3"]),  # two at a time
        ("01", 4, None, ["0", "1"]),
        ("01", 2, 4, []),  # fit tells that there are too few
        ("", 4, None, []),
    ],
)
def test_devices_are_shared_out(names: str, jobs: int, each: int | None, wanted: list[str]) -> None:
    assert share_devices(list(names), jobs, each) == wanted


@pytest.mark.slow
def test_trials_at_a_time_see_different_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sees = """
    def on_fit_start(self):
        import os, time
        from pathlib import Path
        seen = Path(f"sees-{os.environ['CUDA_VISIBLE_DEVICES']}")
        seen.touch(exist_ok=False)  # nobody else has it now
        time.sleep(1)
        seen.rename(f"saw-{self.lr}-{seen.name[5:]}")
"""
    (folder / "line.py").write_text(TASK + sees)
    (folder / "line.yaml").write_text(CONFIG.replace("  accelerator: cpu\n", ""))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6, 7")  # of which this machine has none
    output, _ = finished(sweep("task.lr=1,2,3,4", "--jobs", "3"), 0)
    assert "4 trials" in output
    saw = sorted(path.name for path in folder.glob("saw-*"))
    assert [name.split("-")[1] for name in saw] == ["1", "2", "3", "4"]
    assert {name.split("-")[2] for name in saw} == {"6", "7"}


def test_a_sweep_of_more_values_than_can_be_listed_is_refused() -> None:
    many = [Axis(key, tuple(map(str, range(1000)))) for key in "abc"]
    for axes in ([read_axis("a=range(1,1000000000)")], many):
        for count in (None, 20):
            with pytest.raises(ConfigError, match="at most 100,000 combinations"):
                list_values(axes, count, 0)
