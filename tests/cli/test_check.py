"""`legato check`: what it tries, what it finds, and that nothing is left behind."""

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import completed, run_module
from waiting import free_port, own_lines

import legato as lg
from legato.callbacks import Checkpoint
from legato.cli import recorder
from legato.cli.check import Report, check_config, check_gradients, count_kept
from legato.cli.config.build import ConfiguredRun
from legato.cli.config.check import load_config
from legato.cli.main import main
from legato.cli.recorder import Record

CONFIG = """\
task: {_target_: checked_task.Line}
data: {_target_: checked_task.Points}
trainer: {max_epochs: 3, strategy: ddp, devices: 2, accelerator: cpu}
"""
ALONE = ("trainer.strategy=single", "trainer.devices=1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a task with its data, and a config."""
    shutil.copy(Path(__file__).parents[1].joinpath("checked_task.py"), tmp_path)
    (tmp_path / "line.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("checked_task", "misspelt"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def in_two_terminals(*arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """Run the command line as ranks 0 and 1 of a group that somebody else starts."""
    port, completed_runs = free_port(), {}

    def start(rank: int) -> None:
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        completed_runs[rank] = completed(run_module, "legato", *arguments, env={**os.environ, **place})

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [completed_runs[0], completed_runs[1]]


# --- whole checks ---------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_all_is_well_and_nothing_is_left(folder: Path) -> None:
    before = files(folder)
    first, second = in_two_terminals("check", "line.yaml", "trainer.replicas=3")
    assert first.returncode == 0
    assert first.stderr == ""
    assert (second.returncode, own_lines(second.stdout), second.stderr) == (0, [], "")
    worked, processes, node = own_lines(first.stdout)[:3]
    assert worked == "Worked          fit, resume, test"
    assert processes == "Processes       2 processes on 1 node, started by environment"
    assert re.fullmatch(r" {16}  node 0 \S+: ranks 0-1 on cpu", node)
    for words in (
        "for 15 steps",
        "Memory  ",
        ", on rank ",
        "at once, ",
        "Logged          loss, val/loss\n",
    ):
        assert words in first.stdout
    assert first.stdout.endswith("No problems found.\n")
    assert files(folder) == before


@pytest.mark.parametrize(("words", "sentence"), [
    (("trainer.reproducible=bitwise", *ALONE), "With reproducible=bitwise, resuming rejects differences."),
    ((), "With reproducible=order, resuming lists differences; the process count affects rounding."),
])  # fmt: skip
def test_what_bits_depend_on_is_shown(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], sentence: str) -> None:
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    (row,) = re.findall(r"(?m)^Bits depend on  (.*)$", check("trainer.threads=2", *words).text())
    assert row.startswith(f"torch {torch.__version__}, ")
    assert "NCCL_PROTO=Simple" in row
    assert re.search(f"{torch.backends.cpu.get_cpu_capability()}, cpu, 32-true, 2 threads, .*{sentence}$", row)


def test_ranks_that_differ_have_a_row_each() -> None:
    records = [Record(rank=0, bits="torch 2.13"), Record(rank=1, bits="torch 2.13"), Record(rank=2, bits="torch 2.12")]
    rows = [line for line in Report(records=records).text().splitlines() if "torch" in line]
    assert rows == ["Bits depend on  torch 2.13", "  on rank 2     torch 2.12"]


def check(*words: str) -> Report:
    return check_config(load_config(["line.yaml", *words]))


@pytest.mark.slow
def test_everything_that_is_wrong_is_listed(folder: Path) -> None:
    before = files(folder)
    report = check(
        "task.fault=unused on rank 1",
        "trainer.strategy.find_unused_parameters=true",
        f"trainer.max_epochs={10**12}",
        "callbacks.saved={_target_: legato.callbacks.Checkpoint, monitor: val/los, dirpath: elsewhere, save_top_k: -1}",
        "callbacks.stop={_target_: legato.callbacks.EarlyStopping, monitor: acc}",
    )
    checkpoint, stopping, space = report.problems
    assert checkpoint == (
        "Checkpoint monitors 'val/los', but nothing logged it. Did you mean 'val/loss'? Logged: loss, val/loss."
    )
    assert stopping.startswith("EarlyStopping monitors 'acc', but nothing logged it.")
    assert space.startswith("Checkpoints will take ")
    assert f" in {folder}, which has " in space
    assert report.tried == ["fit", "resume", "test"]
    assert [record.rank for record in report.records] == [0, 1]
    assert files(folder) == before


@pytest.mark.slow
def test_a_gradient_that_the_strategy_needs_ends_the_check(folder: Path) -> None:
    """Of the first rank that lacks it."""
    report = check("task.fault=unused on rank 1")
    assert report.tried == ["test"]
    (problem,) = report.problems
    assert problem.startswith("fit: ")
    assert "head.weight" in problem


@pytest.mark.slow
def test_faults_of_stages_and_places(folder: Path) -> None:
    """In one process: a bug in the test, a metric that a schedule goes by, a run root that cannot be."""
    (folder / "runs").write_text("in the way")
    before = files(folder)
    report = check("task.fault=test plateau", *ALONE, "trainer.replicas=2")
    root, stage, schedule = report.problems
    assert root.startswith(f"Cannot write to the run root {folder / 'runs'}: ")
    assert stage.startswith("test: ValueError: a bug in the test\n")
    assert 'checked_task.py", line ' in stage
    assert "trainer.py" not in stage
    assert schedule.startswith("A learning rate scheduler monitors 'val/lss', but nothing logged it.")
    assert report.tried == ["fit", "resume"]
    assert report.records[0].total_steps == 21
    assert len(report.records[0].seconds) >= 2
    assert report.checkpoint_bytes is not None
    assert files(folder) == before


@pytest.mark.slow
def test_a_bug_in_a_worker_is_told_with_its_rank_and_place(folder: Path) -> None:
    (problem,) = check("task.fault=test").problems
    assert problem.startswith("test: ValueError (rank ")
    assert 'checked_task.py", line ' in problem
    assert "trainer.py" not in problem


def test_a_state_that_no_checkpoint_holds(folder: Path) -> None:
    report = check("task.fault=state", *ALONE)
    assert report.tried == ["test"]
    (problem,) = report.problems
    assert problem.startswith("fit: odd is an object, but a checkpoint stores JSON values and tensors.")


def test_a_parameter_that_no_loss_uses_is_a_problem_in_one_process(folder: Path) -> None:
    before = files(folder)
    report = check("task.fault=unused", *ALONE, "trainer.enable_checkpointing=false", "loggers={}")
    (problem,) = report.problems
    assert problem.startswith(
        "No gradient reaches head.bias, head.weight. Freeze parameters that the loss does not use"
    )
    assert "find_unused" not in problem
    assert report.tried == ["fit", "test"]
    assert files(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["name: ddp", "_target_: legato.strategies.DDPStrategy"])
def test_no_process_of_an_elastic_run_leaves_its_trial(folder: Path, strategy: str) -> None:
    report = check(f"trainer.strategy={{{strategy}, elastic: true}}", "task.fault=unused on rank 1")
    assert (report.problems, report.tried) == ([], ["fit", "resume", "test"])


def test_the_command_line_ends_with_2_and_lists_problems(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "line.yaml").write_text(CONFIG + "callbacks: {own: {_target_: misspelt.Watcher}}\n")
    (folder / "misspelt.py").write_text(
        "import legato as lg\n\nclass Watcher(lg.Callback):\n"
        "    def on_train_batch_ends(self, trainer, task):\n        pass\n"
    )
    before = files(folder)
    assert main(["check", "line.yaml", *ALONE]) == 2
    shown = capsys.readouterr()
    assert shown.out == "Worked          nothing\n"
    first, second, *_ = shown.err.splitlines()
    assert first == "legato: the check found 1 problem:"
    assert second.startswith("  1. fit: Watcher.on_train_batch_ends is named like a hook but isn't one")
    assert files(folder) == before


# --- figures --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "steps", "per_epoch", "count"),
    [
        ({}, 100, 10, 2),  # the newest, and the next one before the newest is deleted
        ({"save_top_k": 3, "monitor": "x"}, 100, 10, 5),
        ({"save_top_k": 3, "monitor": "x", "save_last": False}, 100, 10, 4),
        ({"save_top_k": 0}, 100, 10, 2),
        ({"save_top_k": 0, "save_last": False}, 100, 10, 0),
        ({"save_top_k": 30, "monitor": "x"}, 100, 10, 11),
        ({"save_top_k": -1}, 100, 10, 11),
        ({"save_top_k": -1, "every_n_train_steps": 25, "save_last": False}, 100, 10, 4),
        ({"save_top_k": -1}, None, None, None),
        ({"save_top_k": -1, "train_time_interval": 5}, 100, 10, None),
        ({"save_top_k": 2, "train_time_interval": 5}, 100, 10, 3),
    ],
)
def test_checkpoints_kept_at_once(
    options: dict[str, Any], steps: int | None, per_epoch: int | None, count: int | None
) -> None:
    assert count_kept(Checkpoint(**options), steps, per_epoch) == count


def test_the_report_of_many_ranks_is_short() -> None:
    notes = [
        Record(
            rank,
            [9.0] * 3 + [2.0 + rank] * 3,
            logged=["loss"],
            total_steps=3600,
            host_bytes=10**9 + rank,
            device_bytes=rank,
            place=(rank, 0, "here", "cpu"),
            origin="alone",
        )
        for rank in range(16)
    ]
    text = Report(records=notes, tried=["fit"], checkpoint_bytes=10**6, remarks=["A remark."]).text()
    assert text.splitlines() == [
        "Worked          fit",
        "Processes       16 processes on 1 node, started by alone",
        "                  node 0 here: ranks 0-15 on cpu",
        "Seconds/step    17; 17 h 0 min for 3,600 steps",
        "Memory          1 GB, on rank 15",
        "Device memory   15 B, on rank 15",
        "Checkpoint      1 MB",
        "Logged          loss",
        "Remark          A remark.",
    ]


@pytest.mark.slow
def test_the_time_of_a_step_is_not_that_of_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [3.0, 2.0, 1.0, 0.5, 0.1, 0.1, 0.1, 0.1]
    report = Report(records=[Record(0, slow, total_steps=100, logged=[]), Record(1, [9.0, *slow, 0.2], logged=[])])
    assert report.seconds == 0.1
    assert "Seconds/step    0.1; 10 s for 100 steps\n" in report.text()
    report = Report(records=[Record(0, slow[:2], total_steps=100, logged=[])])
    assert "2; 3 min 20 s for 100 steps, or less: only the first steps were timed" in report.text()
    monkeypatch.setattr(recorder, "SECONDS", 60.0)
    for accumulate, steps in ((4, 2), (1, 11)):  # not to the end of the epoch
        report = check(*ALONE, f"trainer.accumulate_grad_batches={accumulate}")
        assert len(report.records[0].seconds) == steps
    monkeypatch.setattr(recorder, "MOST_STEPS", 5)
    assert len(check(*ALONE).records[0].seconds) == 5
    monkeypatch.setattr(recorder, "SECONDS", 0.0)
    assert len(check(*ALONE).records[0].seconds) == 2


@pytest.mark.parametrize("declared", [True, False])
def test_parameters_without_gradient_are_a_remark_where_the_strategy_was_told_of_them(trainer, declared):
    made = trainer(strategy={"name": "ddp", "find_unused_parameters": declared}, devices=2)
    report = Report(tried=["fit"], records=[Record(rank=0, without_gradient=["head.bias"])])
    check_gradients(ConfiguredRun(made, lg.Task(), None, None, None), report)
    messages, nothing = (report.remarks, report.problems) if declared else (report.problems, report.remarks)
    assert nothing == []
    assert "No gradient reaches head.bias." in messages[0]
