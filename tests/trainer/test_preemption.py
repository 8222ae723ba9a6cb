"""Runs ended by real signals: a complete checkpoint, exit code 75 or 130, and the same bits after a resume."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import preempted_run
import psutil
import pytest
import torch
from forked import Forked, run_module, run_source
from waiting import kill_session, members, wait_until

from legato.trainer.checkpoints import find
from legato.trainer.processes.signals import ONE_PRESS, RESUME_ME, handling_end_signals

SCRIPT = Path(preempted_run.__file__)
ONE = {"hold": "step-4"}
TWO = {"hold": "step-4", "pace": 0.1, "devices": 2, "strategy": "ddp"}  # what a launcher passes on comes later


class Running:
    """A run in its own process group, as started by a terminal or a scheduler."""

    def __init__(self, folder: Path, program: dict[str, Any] | tuple[Any, ...] | list[str], **popen: Any) -> None:
        """`program`: options of a run, a function with its arguments, or the words of a command."""
        self.folder = folder
        for mark in folder.glob("*-*"):
            mark.unlink()
        if isinstance(program, list):
            streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **popen}
            self.process = subprocess.Popen(program, start_new_session=True, **streams)
        else:
            called = program if isinstance(program, tuple) else (preempted_run.run, folder, program)
            self.process = Forked(*called, **popen)
        self.output = self.errors = ""

    def wait_for(self, mark: str, seconds: float = 60) -> int:
        """Wait until the run leaves a mark; return the process that left it."""
        assert wait_until((self.folder / mark).exists, seconds) or self.process.poll() is not None, mark
        assert (self.folder / mark).exists(), self.process.communicate()[1]
        return int((self.folder / mark).read_text())

    def end(self, seconds: float = 60, go: bool = True) -> int:
        """Wait for its end, and return its exit code; nothing of it may live on. `go`: from where it holds."""
        if go:
            (self.folder / "go").touch()
        self.output, self.errors = self.process.communicate(timeout=seconds)
        assert wait_until(lambda: not members(self.process.pid), 30), members(self.process.pid)
        return self.process.returncode


@contextmanager
def running(folder: Path, program: dict[str, Any] | tuple[Any, ...] | list[str], **popen: Any) -> Iterator[Running]:
    run = Running(folder, program, **popen)
    try:
        yield run
    finally:
        kill_session(run.process.pid)
        run.process.communicate()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing disturbed; `bitwise`, so the same for any number of processes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    preempted_run.run(folder, {})
    return torch.load(folder / "weights.pt", weights_only=True)


def assert_resumes(folder: Path, options: dict[str, Any], weights: dict[str, torch.Tensor], devices: int = 1) -> None:
    """Resume without delays, by default in one process; it must end with the bits of the undisturbed run."""
    preempted_run.run(folder, {**options, "pace": 0.0, "hold": "", "devices": devices})
    resumed = torch.load(folder / "weights.pt", weights_only=True)
    assert all(torch.equal(resumed[name], value) for name, value in weights.items())


def checkpoints(folder: Path) -> list[str]:
    """Return the names of all checkpoints, each of which must be complete."""
    paths = find.checkpoints_in(folder / "runs" / "default" / "version_0" / "checkpoints")
    for path in paths:
        find.verify(path)
    return [path.name for path in paths]


def stopped_at(run: Running) -> int:
    """Return the step at which the run stopped, from its log line, which has the code that requests a restart."""
    lines = [line for line in run.errors.splitlines() if "stopped at step" in line]
    assert len(lines) == 1, run.errors
    assert "is complete" in lines[0]
    assert "Traceback" not in run.errors
    match = re.search(r"stopped at step (\d+)", lines[0])
    assert match is not None
    return int(match[1])


# --- one process ------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SIGTERM", ONE),
        ("SIGUSR1", {**ONE, "workers": 1}),
        ("SIGTERM", {**ONE, "enable_checkpointing": False}),
    ],
)
def test_a_signal_in_a_step(tmp_path, undisturbed, name, options):
    with running(tmp_path, options) as run:
        os.kill(run.wait_for("step-4-0"), getattr(signal, name))
        assert run.end() == RESUME_ME, run.errors
    step = stopped_at(run)
    assert step == 5
    assert f"{name}: stopped at step 5" in run.errors
    assert f"step-{step:08d}" in checkpoints(tmp_path)
    assert not list(tmp_path.glob("epoch_end-*"))
    assert not (tmp_path / "train_end-0").exists()
    assert (tmp_path / "teardown-0").exists()
    assert_resumes(tmp_path, options, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "options"), [(4, {}), (6, {"val_check_interval": 1.0})])
def test_a_signal_in_a_validation_leaves_it_and_a_resume_does_it_again(tmp_path, step, options):
    preempted_run.run(tmp_path / "undisturbed", options)
    weights = torch.load(tmp_path / "undisturbed" / "weights.pt", weights_only=True)
    with running(tmp_path, {**options, "hold": f"validation-{step}-0"}) as run:
        os.kill(run.wait_for(f"validation-{step}-0-0"), signal.SIGTERM)
        assert run.end() == RESUME_ME, run.errors
    assert stopped_at(run) == step
    assert not (tmp_path / f"validation-{step}-2-0").exists()
    assert_resumes(tmp_path, options, weights)
    logged = [json.loads(line) for line in (tmp_path / "runs/default/version_0/metrics.jsonl").read_text().splitlines()]
    assert sum("val_loss" in point and point["step"] == step for point in logged) == 1


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_second_signal_does_not_break_the_save(tmp_path, undisturbed, asynchronous):
    options = {"hold": "saving-3", "asynchronous": asynchronous}
    with running(tmp_path, options) as run:
        process = run.wait_for("saving-3-0")
        os.kill(process, signal.SIGTERM)
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            time.sleep(0.02)
            os.kill(process, number)
        assert run.end() == RESUME_ME, run.errors
    assert stopped_at(run) == 3
    assert "step-00000003" in checkpoints(tmp_path)
    assert_resumes(tmp_path, options, undisturbed)


@pytest.mark.slow
def test_a_signal_before_training_has_nothing_to_save(tmp_path):
    with running(tmp_path, {"hold": "setup"}) as run:
        os.kill(run.wait_for("setup-0"), signal.SIGTERM)
        assert run.end(go=False) == RESUME_ME, run.errors
    assert "Traceback" not in run.errors
    assert not checkpoints(tmp_path)
    assert not (tmp_path / "step-0-0").exists()


@pytest.mark.slow
def test_a_signal_in_teardown_comes_when_all_is_done(tmp_path, undisturbed):
    with running(tmp_path, {"hold": "teardown", "workers": 1}) as run:
        os.kill(run.wait_for("teardown-0"), signal.SIGTERM)
        assert run.end() == RESUME_ME, run.errors
    assert checkpoints(tmp_path)[-1] == "step-00000018"
    assert_resumes(tmp_path, {}, undisturbed)


@pytest.mark.slow
def test_any_moment(tmp_path, undisturbed):
    """A run that a signal ends ever later after its start, resumed each time."""
    with running(tmp_path, (preempted_run.sweep, tmp_path, {"pace": 0.02}, 0.07)) as run:
        assert run.end(300) == 0
    ends = json.loads(run.output)
    assert set(ends) <= {0, RESUME_ME}, run.errors
    assert ends[-1] == 0
    assert ends.count(RESUME_ME) >= 5
    # Python swallows what a handler raises within a destructor or a callback, and says so; the run ends all the same.
    errors = re.sub(r"Exception ignored in.*?\nSystemExit: 75\n", "", run.errors, flags=re.DOTALL)
    assert "Traceback" not in errors
    checkpoints(tmp_path)
    assert_resumes(tmp_path, {}, undisturbed)


def test_handlers_are_put_back_and_a_forked_child_ends_by_signals(trainer):
    from tiny import Tiny, make_loader

    ends = []

    class Forks(Tiny):
        def on_train_start(self):
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(writer, b"x")  # Python forgets signals that come before this
                time.sleep(60)
                os._exit(0)
            os.read(reader, 1)
            os.kill(child, signal.SIGTERM)
            os.close(reader)
            os.close(writer)
            ends.append(os.waitpid(child, 0)[1])

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    trainer().fit(Forks(), make_loader())
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before
    assert ends == [signal.SIGTERM]


def test_an_ignored_signal_stays_ignored():
    heard = []
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with handling_end_signals(heard.append):
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


# --- several processes ------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("whom", ["rank 0", "rank 1", "all", "launcher", "everyone"])
def test_a_signal_to_any_of_two_processes(tmp_path, undisturbed, whom):
    options = {**TWO, "workers": 1} if whom == "everyone" else TWO
    with running(tmp_path, options) as run:
        ranks = [run.wait_for("step-4-0"), run.wait_for("step-4-1")]
        # everyone: with the loaders' workers, as SLURM does it; the launcher's own children are in its session
        targets = {"rank 0": ranks[:1], "rank 1": ranks[1:], "all": ranks, "launcher": [run.process.pid]}
        if whom == "everyone":
            targets[whom] = [run.process.pid] + [p for rank in ranks for p in [rank, *children(rank)]]
        for process in targets[whom]:
            os.kill(process, signal.SIGTERM)
        assert run.end() == RESUME_ME, run.errors
    step = stopped_at(run)
    assert checkpoints(tmp_path)[-1] == f"step-{step:08d}"
    assert not (tmp_path / f"step-{step}-0").exists()
    assert not (tmp_path / f"step-{step}-1").exists()
    assert_resumes(tmp_path, options, undisturbed, devices=2 if whom == "everyone" else 1)


def children(process: int) -> list[int]:
    return [child.pid for child in psutil.Process(process).children(recursive=True)]


@pytest.mark.slow
def test_one_rank_in_a_validation(tmp_path, undisturbed):
    with running(tmp_path, {**TWO, "hold": "validation-4-0"}) as run:
        os.kill(run.wait_for("validation-4-0-1"), signal.SIGUSR1)
        assert run.end() == RESUME_ME, run.errors
    assert stopped_at(run) == 4
    assert_resumes(tmp_path, TWO, undisturbed)


@pytest.mark.slow
def test_one_rank_while_saving(tmp_path, undisturbed):
    with running(tmp_path, {**TWO, "hold": "saving-3"}) as run:
        process = run.wait_for("saving-3-1")
        os.kill(process, signal.SIGTERM)
        time.sleep(0.1)
        os.kill(process, signal.SIGTERM)
        assert run.end() == RESUME_ME, run.errors
    assert 3 <= stopped_at(run) <= 6
    assert_resumes(tmp_path, TWO, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["rank 1", "launcher", "launcher, early"])
def test_start_up_of_two_processes(tmp_path, whom):
    with running(tmp_path, {**TWO, "hold": "setup"}) as run:
        process = run.process.pid
        if whom == "launcher, early":
            assert wait_until((tmp_path / "runs").exists, 30)
        else:
            rank = run.wait_for("setup-1")
            process = rank if whom == "rank 1" else process
        os.kill(process, signal.SIGTERM)
        assert run.end(go=whom == "rank 1") == RESUME_ME, run.errors
    assert "Traceback" not in run.errors
    assert not checkpoints(tmp_path)


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("options", [{**ONE, "workers": 1}, TWO])
def test_ctrl_c_in_a_library_call_raises_keyboard_interrupt_after_the_save(tmp_path, undisturbed, options):
    with running(tmp_path, {**options, "catch": True}) as run:
        run.wait_for("step-4-0")
        pressed = time.monotonic()
        os.killpg(run.process.pid, signal.SIGINT)  # with the loader's workers
        time.sleep(0.05)
        if time.monotonic() < pressed + ONE_PRESS / 2:  # else a busy machine would make it a second press
            os.killpg(run.process.pid, signal.SIGINT)
        assert run.end() == 0, run.errors
    assert (tmp_path / "caught").exists()
    step = stopped_at(run)
    assert checkpoints(tmp_path)[-1] == f"step-{step:08d}"
    assert_resumes(tmp_path, options, undisturbed)


CONFIG = """
task: {{_target_: command.Slow, folder: {folder}, hold: step-4}}
data: {{_target_: command.Data, folder: {folder}}}
trainer: {{accelerator: cpu, devices: {devices}, replicas: 2, max_epochs: 3, log_every_n_steps: 4}}
run: {{root: {folder}/runs}}
resume: auto
"""
MODULE = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import preempted_run
from torch.utils.data import DataLoader
import legato as lg

class Slow(preempted_run.Slow):
    def __init__(self, folder: str, hold: str) -> None:
        super().__init__(Path(folder), 0.1, hold)

class Data(lg.DataModule):
    def __init__(self, folder: str) -> None:
        super().__init__()
        (Path(folder) / "began").touch()

    def train_dataloader(self):
        return DataLoader(preempted_run.Numbers(48), 4, num_workers=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_ctrl_c_of_the_command_line_in_a_terminal(tmp_path, devices):
    (tmp_path / "command.py").write_text(MODULE.format(tests=str(SCRIPT.parent)))
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path, devices=devices))
    keyboard, terminal = pty.openpty()
    command = [sys.executable, "-m", "legato", "fit", "config.yaml"]
    # the terminal becomes the controlling one of the new session, so that Ctrl-C is a signal to its process group
    begin = f"import os, forked; os.close(os.open({os.ttyname(terminal)!r}, os.O_RDWR)); "
    forked = run_source, begin + f"forked.run_module(*{command[2:]!r})"
    program = [sys.executable, "-c", begin.replace(", forked", "") + f"os.execv({command[0]!r}, {command!r})"]
    with running(tmp_path, forked if devices == 1 else program, cwd=tmp_path) as run:
        run.wait_for("step-4-0")
        os.write(keyboard, b"\x03")
        assert run.end() == 130, run.errors
    os.close(keyboard)
    os.close(terminal)
    step = stopped_at(run)
    assert "Ctrl-C: stopped at step" in run.errors
    assert checkpoints(tmp_path)[-1] == f"step-{step:08d}"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, RESUME_ME), (signal.SIGINT, 130)])
def test_the_command_line_is_told_before_it_has_a_trainer(tmp_path, monkeypatch, number, code):
    monkeypatch.chdir(tmp_path)
    module = MODULE.format(tests=str(SCRIPT.parent)) + "\nimport time; Path('began').touch(); time.sleep(20)"
    (tmp_path / "command.py").write_text(module)
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path, devices=1))
    with running(tmp_path, (run_module, "legato", "fit", "config.yaml")) as run:
        assert wait_until((tmp_path / "began").exists, 30)
        os.kill(run.process.pid, number)
        assert run.end() == code
    assert "Traceback" not in run.errors


# --- SLURM ------------------------------------------------------------------------------------------------------------
class Slurm:
    """A job 4711 whose squeue and scontrol are scripts; scontrol records its arguments."""

    def __init__(self, folder: Path, state: str = "RUNNING", scontrol: str = "") -> None:
        self.noted = folder / "scontrol"
        tools = folder / "bin"
        tools.mkdir()
        for name, script in (("squeue", f"echo {state}"), ("scontrol", scontrol or f"echo $@ >> {self.noted}")):
            (tools / name).write_text(f"#!/bin/sh\n{script}\n")
            (tools / name).chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}

    @property
    def requeued(self) -> bool:
        return self.noted.exists() and self.noted.read_text() == "requeue 4711\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "state", "requeued"),
    [
        (signal.SIGUSR1, "COMPLETING", True),  # a warning, whatever comes after it
        (signal.SIGTERM, "RUNNING", True),  # it is to make room
        (signal.SIGTERM, "COMPLETING", False),  # scancel
        (signal.SIGTERM, "", False),
    ],
)
def test_a_job_is_requeued_unless_it_was_cancelled(tmp_path, number, state, requeued):
    job = Slurm(tmp_path, state)
    with running(tmp_path, {"hold": "step-2", "requeue": True}, env=job.environment) as run:
        os.kill(run.wait_for("step-2-0"), number)
        assert run.end() == RESUME_ME, run.errors
    assert job.requeued == requeued
    assert ("the job has been requeued" in run.errors) == requeued
    assert ("SLURM is ending job 4711" in run.errors) != requeued
    assert checkpoints(tmp_path)


@pytest.mark.slow
def test_a_requeue_that_fails_is_told(tmp_path):
    job = Slurm(tmp_path, scontrol="echo Job is gone >&2; exit 1")
    with running(tmp_path, {"hold": "step-2", "requeue": True}, env=job.environment) as run:
        os.kill(run.wait_for("step-2-0"), signal.SIGUSR1)
        assert run.end() == RESUME_ME, run.errors
    assert "scontrol requeue 4711 failed: Job is gone" in run.errors


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"devices": 2, "strategy": "ddp"}])
def test_a_job_is_requeued_once_by_a_signal_in_its_start_up(tmp_path, options):
    job = Slurm(tmp_path)
    with running(tmp_path, {"hold": "setup", "requeue": True, **options}, env=job.environment) as run:
        run.wait_for("setup-0")
        os.kill(run.process.pid, signal.SIGUSR1)
        assert run.end(go=False) == RESUME_ME, run.errors
    assert job.requeued, run.errors


@pytest.mark.slow
def test_a_job_is_requeued_by_a_signal_while_its_modules_are_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = MODULE.format(tests=str(SCRIPT.parent)) + "\nimport time; Path('began').touch(); time.sleep(20)"
    (tmp_path / "command.py").write_text(module)
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path, devices=1))
    job = Slurm(tmp_path)
    command = run_module, "legato", "fit", "config.yaml", "trainer.requeue=true"
    with running(tmp_path, command, env=job.environment) as run:
        assert wait_until((tmp_path / "began").exists, 30)
        os.kill(run.process.pid, signal.SIGUSR1)
        assert run.end() == RESUME_ME
    assert job.requeued, run.errors
