"""Runs that stop moving: ended within hang_timeout by one message that says which rank is where; nothing is left."""

import inspect
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from tiny import Tiny, Validated, make_data, make_loader
from torch import distributed
from torch.utils.data import DataLoader, Dataset
from waiting import free_port

from legato.trainer.errors import ConfigError, DataError, DisagreementError, HangError, LegatoError
from legato.trainer.processes.environment import warm_up

TWO = {"devices": 2, "strategy": "ddp", "hang_timeout": 2.0}


@pytest.fixture(autouse=True)
def nothing_left():
    """After the test no process is left that was not there before but the fork server and its helper."""
    warm_up()
    deadline = time.monotonic() + 10
    while len(before := set(psutil.Process().children(recursive=True))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    yield
    deadline = time.monotonic() + 10
    while (left := set(psutil.Process().children(recursive=True)) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def line_of(function, text):
    """Where in this file a line of a function stands."""
    lines, first = inspect.getsourcelines(function)
    return first + next(index for index, line in enumerate(lines) if text in line)


class Stuck(Dataset):
    """One of its samples never comes."""

    def __init__(self, bad, rank=None):
        self.data, self.bad, self.rank = make_data(32), bad, rank

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == self.bad:
            while True:
                time.sleep(60)  # the line that is named
        return self.data[index]


def hang(made, task, *loaders):
    """Train until the run is ended, and return what is said."""
    with pytest.raises(HangError) as caught:
        made.fit(task, *loaders)
    assert "No progress for 2 s (trainer.hang_timeout)" in str(caught.value)
    return str(caught.value)


def stacks(made, rank):
    return (made.run_dir / "hang" / f"rank-{rank}.txt").read_text()


def test_a_sample_that_never_comes(trainer):
    made = trainer(logger=True, **TWO)
    said = hang(made, Tiny(), DataLoader(Stuck(20), 4))
    line = line_of(Stuck.__getitem__, "the line that is named")
    assert re.search(rf"rank 1 is in test_hangs\.py:{line} \(__getitem__\) since \d+ s, at step 3", said), said
    assert re.search(r"rank 0 waits in .* since \d+ s, at step 3", said), said
    assert "The others wait for rank 1." in said
    assert f'test_hangs.py", line {line} in __getitem__' in stacks(made, 1)
    assert "train_step" in stacks(made, 0)
    assert str(made.run_dir / "hang") in said


def test_a_loader_worker_that_is_stuck(trainer):
    made = trainer(logger=True, **TWO)
    said = hang(made, Tiny(), DataLoader(Stuck(20), 4, num_workers=1))
    line = line_of(Stuck.__getitem__, "the line that is named")
    assert f"rank 1 waits for a loader's worker, which is in test_hangs.py:{line} (__getitem__)" in said
    assert "The others wait for rank 1." in said
    assert "Loader worker" in stacks(made, 1)


def test_a_collective_that_one_rank_calls_alone(trainer):
    class Alone(Tiny):
        def on_train_start(self):
            self.group = distributed.new_group([0, 1])

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_rank == 0 and batch_idx == 1:
                distributed.all_reduce(torch.ones(1), group=self.group)  # alone

    made = trainer(logger=True, **TWO)
    said = hang(made, Alone(), make_loader(32))
    line = line_of(Alone.on_train_batch_end, "# alone")
    assert f"rank 0 waits in all_reduce, called in test_hangs.py:{line} (on_train_batch_end)" in said
    assert re.search(r"rank 1 waits in ", said)
    assert "All wait, for each other" in said


def test_a_validation_that_hangs(trainer):
    class Sleeps(Validated):
        def validation_step(self, batch, batch_idx):
            if not self.trainer.sanity_checking and self.global_rank == 0 and batch_idx == 1:
                time.sleep(600)
            super().validation_step(batch, batch_idx)

    said = hang(trainer(**TWO), Sleeps(), make_loader(16), make_loader(32))
    assert re.search(
        r"rank 0 is in test_hangs\.py:\d+ \(validation_step\) since \d s, at step \d, batch 2 of valid", said
    )


def test_a_process_that_is_stopped_does_not_answer(trainer):
    class Stops(Tiny):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_rank == 1 and batch_idx == 1:
                os.kill(os.getpid(), signal.SIGSTOP)

    said = hang(trainer(**TWO), Stops(), make_loader(32))
    assert "rank 1 does not answer" in said
    assert "The others wait for rank 1." in said


def test_a_hang_may_be_followed_by_a_restart(trainer, tmp_path):
    class Once(Tiny):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_rank == 1 and batch_idx == 1 and not (tmp_path / "hung").exists():
                (tmp_path / "hung").touch()
                time.sleep(600)

    made = trainer(max_restarts=1, logger=True, **TWO)
    made.fit(Once(), make_loader(32))
    assert made.global_step == 4


def test_slow_is_not_stuck(trainer):
    class Slow(Validated):
        def training_step(self, batch, batch_idx):
            time.sleep(0.25)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            time.sleep(0.25)

    made = trainer(hang_timeout=0.8, accumulate_grad_batches=4, num_sanity_val_steps=0)
    made.fit(Slow(), make_loader(24), make_loader(16))
    assert made.global_step == 2


# --- without hang_timeout ---------------------------------------------------------------------------------------------
def test_a_report_comes_by_default_and_the_run_goes_on(trainer, capfd):
    class Slow(Tiny):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_rank == 1 and batch_idx == 3:
                time.sleep(4)  # the line that is named

    made = trainer(devices=2, strategy="ddp", hang_report_seconds=1.0, logger=True)
    made.fit(Slow(), make_loader(48))
    said = capfd.readouterr().err
    assert made.global_step == 6
    assert 1 <= said.count("the run is not ended") <= 2  # after 1 s, and after twice as many
    line = line_of(Slow.on_train_batch_end, "the line that is named")
    assert re.search(rf"rank 1 is in test_hangs\.py:{line} \(on_train_batch_end\) since \d s, at step", said), said
    assert "The others wait for rank 1." in said
    assert f"line {line} in on_train_batch_end" in stacks(made, 1)


def test_the_longest_step_counts(trainer, capfd):
    class Slow(Tiny):
        def training_step(self, batch, batch_idx):
            time.sleep(0.5)
            return super().training_step(batch, batch_idx)

        def on_train_end(self):
            time.sleep(1.5)

    trainer(hang_report_seconds=0.2).fit(Slow(), make_loader(24))
    assert "No progress" not in capfd.readouterr().err.replace("at step 1.", "").partition("at step 4")[2]


def test_loaders_of_different_lengths_are_refused(trainer):
    class Uneven(Tiny):
        def train_dataloader(self):
            return make_loader(32 if self.trainer.global_rank else 48)

    with pytest.raises(DataError, match=r"Rank 0 and rank 1 have data of different lengths .*training: 48 and 32"):
        trainer(devices=2, strategy="ddp").fit(Uneven())


SILENT = """
import os, socket, sys
sys.path.insert(0, {tests!r})
from tiny import Tiny, make_loader, make_trainer
silent = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(silent.getsockname()[1]))
make_trainer({folder!r}, strategy="ddp", devices=2, hang_report_seconds=1.0).fit(Tiny(), make_loader())
"""


def test_a_start_up_in_which_nobody_answers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SILENT.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path)))
    process = subprocess.Popen([sys.executable, script], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    while "No progress" not in said:
        said += process.stderr.readline()
        assert process.poll() is None, said
    process.terminate()  # it is deaf no longer, either
    said += process.communicate(timeout=20)[1]
    assert process.returncode in (75, 128 + signal.SIGTERM)
    assert re.search(r"rank 1 waits for the other processes to meet it \(.*rendezvous.* at start-up", said), said


LATE = """
import os, sys
sys.path.insert(0, {tests!r})
from tiny import Tiny, make_loader, make_trainer
from waiting import runs, wait_until

class Late(Tiny):
    def teardown(self, stage):
        if self.global_rank == 1:  # when rank 0, which holds the store, has ended
            assert wait_until(lambda: not runs(int(os.environ["FIRST"])), 60)

os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT={port!r})
trainer = make_trainer({folder!r}, strategy="ddp", devices=2)
trainer.fit(Late(), make_loader(8))
"""


def test_a_rank_ends_though_the_one_with_the_store_has_ended_before(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LATE.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path), port=str(free_port())))
    first = subprocess.Popen([sys.executable, script], env=os.environ | {"RANK": "0"})
    late = subprocess.Popen([sys.executable, script], env=os.environ | {"RANK": "1", "FIRST": str(first.pid)})
    try:
        assert first.wait(60) == 0
        assert late.wait(30) == 0
    finally:
        first.kill()
        late.kill()
        first.wait()
        late.wait()


@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_an_epoch_that_one_rank_leaves(trainer, ranks):
    class Leaves(Tiny):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 and self.global_rank in ranks else None

    made = trainer(devices=2, strategy="ddp", max_epochs=2)
    if ranks == [0, 1]:
        made.fit(Leaves(), make_loader(48))
        assert made.global_step == 4
        return
    with pytest.raises(DisagreementError, match=r"returned -1 on rank 1 at step 3 .*but rank 0 went on"):
        made.fit(Leaves(), make_loader(48))


def test_a_surplus_collective(trainer):
    class Surplus(Tiny):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_rank == 1 and batch_idx == 1:
                distributed.all_reduce(torch.ones(100))  # surplus

    with pytest.raises(LegatoError, match=r"of 2 was killed by SIGABRT.* different collectives"):
        trainer(devices=2, strategy={"name": "ddp", "timeout": {"step": 4.0}}).fit(Surplus(), make_loader(32))


def test_a_surplus_collective_at_the_end(trainer):
    """Rank 1 has done its work while rank 0 waits for it."""

    class Surplus(Tiny):
        def teardown(self, stage):
            if self.global_rank == 0:
                distributed.barrier()  # surplus

    made = trainer(devices=2, strategy={"name": "ddp", "timeout": {"startup": 60, "step": 3.0}})
    with pytest.raises(RuntimeError) as caught:
        made.fit(Surplus(), make_loader(32))
    assert "Timed out" in str(caught.value) or "closed" in str(caught.value)


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from tiny import Tiny, make_loader, make_trainer

class Sleeps(Tiny):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            time.sleep(600)
        return super().training_step(batch, batch_idx)

make_trainer({folder!r}, hang_timeout=2.0, logger=True).fit(Sleeps(), make_loader(num_workers=2))
"""


def test_a_single_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("HangError: No progress for 2 s")
    assert re.search(r"The process is in script\.py:9 \(training_step\) since 2 s, at step 3\.?\n", done.stderr)
    assert "Traceback" not in done.stderr
    assert "script.py" in (tmp_path / "default/version_0/hang/rank-0.txt").read_text()


@pytest.mark.parametrize("value", [0, -1.0, True, "60"])
def test_what_is_no_time_is_refused(trainer, value):
    with pytest.raises(ConfigError, match=r"trainer\.hang_timeout"):
        trainer(hang_timeout=value)
