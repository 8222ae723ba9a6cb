"""Runs that hang in the user's code after a signal end in time, by force, after a dump of stacks and a save."""

import functools
import os
import signal
import time
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import unanswered_run
from forked import Forked, run_module, run_script
from torch.distributed import TCPStore
from waiting import kill_session, members, wait_until

from legato.trainer.checkpoints import find
from legato.trainer.processes import signals
from legato.trainer.processes.launch import run_workers
from legato.trainer.processes.signals import RESUME_ME, SignalWatch, handling_end_signals, raise_for_signal

TWO = {"devices": 2, "strategy": "ddp"}


@contextmanager
def running(folder, *arguments, stderr=None, **options):
    """A run in a new process and session, of which nothing survives."""
    process = Forked(unanswered_run.run_with, folder, arguments, options, stderr=stderr)
    try:
        assert wait_until((folder / "stuck").exists, 60) or process.poll() is not None
        yield process
    finally:
        kill_session(process.pid)
        process.communicate()


def stuck(folder):
    """Return the hanging process, once it hangs."""
    time.sleep(0.5)
    return int((folder / "stuck").read_text())


def press_twice(process, whom):
    """Press Ctrl-C twice, and again if a busy machine delivers two presses so late that they count as one."""
    while process.poll() is None:
        with suppress(ProcessLookupError):
            os.kill(whom, signal.SIGINT)
        wait_until(lambda: process.poll() is not None, 0.7)


def end(process, code, seconds=60):
    """Wait for the end; return the output."""
    errors = process.communicate(timeout=seconds)[1]
    assert process.returncode == code, errors
    assert wait_until(lambda: not members(process.pid), 20), members(process.pid)
    return errors


def checkpoints(folder):
    saved = find.checkpoints_in(folder / "runs" / "default" / "version_0" / "checkpoints")
    for path in saved:
        find.verify(path)
    return [path.name for path in saved]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("sleep", signal.SIGTERM),
        ("swallows", signal.SIGHUP),
        ("lock", signal.SIGTERM),
        ("python", signal.SIGTERM),
        ("library", signal.SIGHUP),
        ("loader", signal.SIGTERM),
    ],
)
def test_a_signal_that_is_not_answered(tmp_path, how, number):
    with running(tmp_path, how) as process:
        os.kill(stuck(tmp_path), number)
        errors = end(process, 128 + number)
    assert f"{number.name}: this process is exiting before its work is done" in errors
    assert "not responded for 1 s" in errors
    assert "unanswered_run.py" in errors or how == "loader"
    assert "legato-signals" not in errors
    assert len(checkpoints(tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleep", "swallows", "library", "loader", "validate, library"])
def test_a_second_ctrl_c(tmp_path, how):
    with running(tmp_path, how, grace=60.0) as process:
        press_twice(process, stuck(tmp_path))
        errors = end(process, 130)
    assert "Ctrl-C was pressed again" in errors
    assert "unanswered_run.py" in errors or how == "loader"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "whom"),
    [
        ("library", "the launcher"),
        ("library", "the rank that hangs"),
        ("library", "the other rank"),
        ("holds the interpreter", "the launcher"),  # sent to a rank, nobody hears it
    ],
)
def test_two_processes(tmp_path, how, whom):
    with running(tmp_path, how, 1, **TWO) as process:
        rank = stuck(tmp_path)
        peer = next(process_id for process_id in ranks_of(process) if process_id != rank)
        os.kill(
            {"the launcher": process.pid, "the rank that hangs": rank, "the other rank": peer}[whom], signal.SIGTERM
        )
        errors = end(process, 128 + signal.SIGTERM)
    assert "in wait_in_c" in errors or whom == "the other rank"
    assert "of 2 " in errors


@pytest.mark.slow
def test_ctrl_c_twice_to_the_launcher(tmp_path):
    with running(tmp_path, "library", 1, grace=60.0, **TWO) as process:
        stuck(tmp_path)
        press_twice(process, process.pid)
        errors = end(process, 1)  # a forked function's KeyboardInterrupt
    assert "Ctrl-C was pressed again" in errors
    assert "KeyboardInterrupt" in errors


def ranks_of(process):
    """Return the workers of a launcher: the group leaders in its session."""
    return [
        process_id
        for process_id in members(process.pid)
        if os.getpgid(process_id) == process_id and process_id != process.pid
    ]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["setup", "save", "teardown"])
def test_what_comes_before_and_after_the_steps(tmp_path, how):
    with running(tmp_path, how, callbacks=[]) as process:
        os.kill(stuck(tmp_path), signal.SIGTERM)
        errors = end(process, 128 + signal.SIGTERM)
    assert "not responded for 1 s" in errors
    assert bool(checkpoints(tmp_path)) == (how == "teardown")


@pytest.mark.slow
def test_an_error_is_told_though_the_other_rank_must_be_ended_by_force(tmp_path):
    """The launcher asks that rank to end, so its missing answer is a consequence."""
    with running(tmp_path, "setup", **TWO) as process:
        errors = end(process, 1)
    assert "LookupError: the other rank fails" in errors
    assert "not responded for 1 s" in errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_save_that_moves_is_finished_first(tmp_path, number):
    """Each file takes less than the grace time, but all together more: the run waits as long as the save progresses."""
    grace = 4 * unanswered_run.SLOW
    with running(tmp_path, "slow save", grace=grace) as process:
        assert wait_until((tmp_path / "saving").exists, 30)
        began = time.monotonic()
        os.kill(process.pid, number)
        time.sleep(0.7)
        os.kill(process.pid, number)
        assert not checkpoints(tmp_path)
        assert process.communicate(timeout=30) is not None
    assert time.monotonic() - began > grace
    # by a KeyboardInterrupt or the code that requests a restart, or else after the save
    assert process.returncode in ((1, 130) if number == signal.SIGINT else (RESUME_ME,))
    assert checkpoints(tmp_path) == ["step-00000002"]
    # what follows the save may be cut off: run.json, which is synced as well, is then the one of before
    assert {path.name for path in (tmp_path / "runs").rglob("*.partial")} <= {".run.json.partial"}


@pytest.mark.slow
def test_a_closed_terminal(tmp_path):
    """SIGHUP is answered like SIGTERM, with a checkpoint and the exit code that requests a restart."""
    with running(tmp_path, "moves", max_epochs=100) as process:
        os.kill(stuck(tmp_path), signal.SIGHUP)
        errors = end(process, RESUME_ME)
    assert "SIGHUP: stopped at step" in errors
    assert checkpoints(tmp_path)


@pytest.mark.slow
def test_nohup(tmp_path):
    with running(tmp_path, "moves", nohup=True, max_epochs=3) as process:
        os.kill(stuck(tmp_path), signal.SIGHUP)
        end(process, 0)


def test_a_wakeup_descriptor_of_an_event_loop_hears_signals_too(trainer):
    from tiny import Tiny, make_loader

    class Kills(Tiny):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 1:
                os.kill(os.getpid(), signal.SIGUSR1)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        with pytest.raises(SystemExit):
            trainer().fit(Kills(), make_loader())
        assert signal.set_wakeup_fd(before) == writer
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
    assert os.read(reader, 10) == bytes([signal.SIGUSR1])
    os.close(reader)


def test_a_process_with_many_open_files_hears_signals():
    """As among many ranks: select() takes only file numbers below 1024."""
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with SignalWatch() as watch:
            writer = signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(writer)
            os.write(writer, bytes([signal.SIGTERM]))
            assert wait_until(lambda: watch.signal_to_answer == signal.SIGTERM, 3)
    finally:
        for file in files:
            os.close(file)


@pytest.mark.slow
@pytest.mark.parametrize(("imports", "seconds"), [(True, 1.5), (False, 0.0), (False, 0.1), (False, 0.4)])
def test_a_signal_to_the_whole_group_while_workers_start(tmp_path, imports, seconds):
    """The fork server also gets the signal, while it imports torch and before it forks."""
    script = tmp_path / "script.py"
    script.write_text(STARTS.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path), imports=imports))
    process = Forked(run_script, script)
    try:
        assert wait_until((tmp_path / "begun").exists, 60)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGTERM)
        errors = process.communicate(timeout=60)[1]
    finally:
        kill_session(process.pid)
        process.communicate()
    assert process.returncode == RESUME_ME, errors
    assert "Traceback" not in errors


def wait_for_rank_0(folder, answers):
    """Rank 0 answers the signal, or is killed by it; rank 1 waits for rank 0 in C++, where it hears nothing."""
    rank, signals.NOTHING_TO_SAVE = int(os.environ["RANK"]), 1.0
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    with handling_end_signals(raise_for_signal, SignalWatch()) if rank or answers else nullcontext():
        (folder / f"rank-{rank}").touch()
        time.sleep(60) if rank == 0 else store.wait(["never"], timedelta(seconds=60))


@pytest.mark.slow
@pytest.mark.parametrize("answers", [True, False])
def test_a_rank_that_waits_for_one_that_the_signal_has_ended(tmp_path, answers):
    """As in the rendezvous of a run that is starting: it can be resumed, though one rank is ended by force."""
    process = Forked(run_workers, functools.partial(wait_for_rank_0, tmp_path, answers), 2)
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("rank-*"))) == 2, 60)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGTERM)
        end(process, RESUME_ME)
    finally:
        kill_session(process.pid)
        process.communicate()


STARTS = """
import sys
sys.path.insert(0, {tests!r})
from multiprocessing import util
from pathlib import Path
import forked
from tiny import Tiny, make_loader, make_trainer

class Long(Tiny):
    def __getstate__(self):
        (Path({folder!r}) / "begun").touch()
        return super().__getstate__() if hasattr(Tiny, "__getstate__") else self.__dict__

if __name__ == "__main__":
    if {imports}:  # a fork server that starts as ever
        util.spawnv_passfds = forked._start_program
    make_trainer({folder!r}, strategy="ddp", devices=2, max_epochs=100000).fit(Long(), make_loader(32))
"""
TORCHRUN = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import unanswered_run
unanswered_run.run(Path({folder!r}), "library", 1, devices=2, strategy="ddp")
"""


@pytest.mark.slow
def test_torchrun(tmp_path):
    """The agent forwards SIGTERM, and the ranks end themselves before the agent kills them."""
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path)))
    words = "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)
    process = Forked(run_module, *words)
    try:
        assert wait_until((tmp_path / "stuck").exists, 120)
        os.kill(process.pid, signal.SIGTERM)
        errors = process.communicate(timeout=60)[1]
    finally:
        kill_session(process.pid)
        process.communicate()
    assert process.returncode != 0
    assert "SIGTERM: this process is exiting before its work is done" in errors
