"""Hanging runs end within hang_timeout with one message that has each rank's position, and leave nothing behind."""

import inspect
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from forked import Forked, completed, run_script, run_source
from tiny import Tiny, Validated, make_data, make_loader, make_trainer
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from waiting import children, free_port, wait_until

from legato.base.errors import ConfigError, DataError, DisagreementError, HangError, WorkerError
from legato.trainer.processes import hang
from legato.trainer.processes.launch import run_workers, warm_up

TWO = {"devices": 2, "strategy": "ddp", "hang_timeout": 2.0}


@pytest.fixture(autouse=True)
def nothing_left():
    """After the test no new process is left, except the fork server and its helper."""
    warm_up()
    assert wait_until(lambda: len(children()) >= 2)
    before = children()
    yield
    assert wait_until(lambda: children() <= before)


def line_of(function, text):
    """Return the number in this file of a line of a function."""
    lines, first = inspect.getsourcelines(function)
    return first + next(index for index, line in enumerate(lines) if text in line)


class Stuck(Dataset):
    """Reading one of the samples never returns."""

    def __init__(self, bad, rank=None):
        self.data, self.bad, self.rank = make_data(32), bad, rank

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == self.bad:
            while True:
                time.sleep(60)  # the line that is named
        return self.data[index]


def hanging(made, task, *loaders):
    """Train until the run is ended, and return the error's text."""
    with pytest.raises(HangError) as caught:
        made.fit(task, *loaders)
    assert "No progress for 2 s (trainer.hang_timeout)" in str(caught.value)
    return str(caught.value)


def stacks(made, rank):
    return (made.run_dir / "hang" / f"rank-{rank}.txt").read_text()


@pytest.mark.slow
def test_a_sample_that_never_comes(trainer):
    made = trainer(logger=True, **TWO)
    output = hanging(made, Tiny(), DataLoader(Stuck(20), 4))
    line = line_of(Stuck.__getitem__, "the line that is named")
    assert re.search(rf"rank 1 is in test_hangs\.py:{line} \(__getitem__\) for \d+ s, at step 3", output), output
    assert re.search(r"rank 0 is waiting in .* for \d+ s, at step 3", output), output
    assert "The others are waiting for rank 1." in output
    assert f'test_hangs.py", line {line} in __getitem__' in stacks(made, 1)
    assert "train_step" in stacks(made, 0)
    assert str(made.run_dir / "hang") in output


@pytest.mark.slow
def test_a_loader_worker_that_is_stuck(trainer):
    made = trainer(logger=True, **TWO)
    output = hanging(made, Tiny(), DataLoader(Stuck(20), 4, num_workers=1))
    line = line_of(Stuck.__getitem__, "the line that is named")
    assert f"rank 1 is waiting for a loader's worker, which is in test_hangs.py:{line} (__getitem__)" in output
    assert "The others are waiting for rank 1." in output
    assert "Loader worker" in stacks(made, 1)


@pytest.mark.slow
def test_a_collective_that_one_rank_calls_alone(trainer):
    class Alone(Tiny):
        def on_train_start(self):
            self.group = distributed.new_group([0, 1])

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_rank == 0 and batch_idx == 1:
                distributed.all_reduce(torch.ones(1), group=self.group)  # alone

    made = trainer(logger=True, **TWO)
    output = hanging(made, Alone(), make_loader(32))
    line = line_of(Alone.on_train_batch_end, "# alone")
    assert f"rank 0 is waiting in all_reduce, called in test_hangs.py:{line} (on_train_batch_end)" in output
    assert re.search(r"rank 1 is waiting in ", output)
    assert "All ranks are waiting for each other" in output


@pytest.mark.slow
def test_a_validation_that_hangs(trainer):
    class Sleeps(Validated):
        def validation_step(self, batch, batch_idx):
            if not self.trainer.sanity_checking and self.global_rank == 0 and batch_idx == 1:
                time.sleep(600)
            super().validation_step(batch, batch_idx)

    output = hanging(trainer(**TWO), Sleeps(), make_loader(16), make_loader(32))
    assert re.search(
        r"rank 0 is in test_hangs\.py:\d+ \(validation_step\) for \d+ s, at step \d, batch 2 of valid", output
    )


@pytest.mark.slow
def test_a_process_that_is_stopped_does_not_answer(trainer):
    class Stops(Tiny):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_rank == 1 and batch_idx == 1:
                os.kill(os.getpid(), signal.SIGSTOP)

    output = hanging(trainer(**TWO), Stops(), make_loader(32))
    assert "rank 1 is not responding" in output
    assert "The others are waiting for rank 1." in output


@pytest.mark.slow
def test_a_hang_may_be_followed_by_a_restart(trainer, tmp_path):
    class Once(Tiny):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_rank == 1 and batch_idx == 1 and not (tmp_path / "hung").exists():
                (tmp_path / "hung").touch()
                time.sleep(600)

    made = trainer(max_restarts=1, logger=True, **TWO)
    made.fit(Once(), make_loader(32))
    assert made.global_step == 4


@pytest.mark.slow
def test_slow_is_not_stuck(trainer):
    class Slow(Validated):
        def training_step(self, batch, batch_idx):
            time.sleep(0.2)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            time.sleep(0.2)

    made = trainer(hang_timeout=2.0, accumulate_grad_batches=12, num_sanity_val_steps=0)
    made.fit(Slow(), make_loader(48), make_loader(48))
    assert made.global_step == 1


# --- without hang_timeout ---------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_report_comes_by_default_and_the_run_goes_on(trainer, capfd):
    class Slow(Tiny):
        def __setstate__(self, state):  # in the workers, before the run begins
            hang.REPORT_SECONDS = 1.0
            super().__setstate__(state)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_rank == 1 and batch_idx == 3:
                time.sleep(4)  # the line that is named

    made = trainer(devices=2, strategy="ddp", logger=True)
    made.fit(Slow(), make_loader(48))
    output = capfd.readouterr().err
    assert made.global_step == 6
    assert "The run continues" in output
    line = line_of(Slow.on_train_batch_end, "the line that is named")
    reports = re.findall(rf"rank 1 is in test_hangs\.py:{line} \(on_train_batch_end\) for \d+ s, at step", output)
    assert 1 <= len(reports) <= 3, output  # after 1 s, then after twice as many
    assert "The others are waiting for rank 1." in output
    assert f"line {line} in on_train_batch_end" in stacks(made, 1)


def compile_slowly(folder):
    hang.REPORT_SECONDS = 0.5

    def slow_backend(graph, inputs):
        time.sleep(3)
        return graph.forward

    class Compiled(Tiny):
        def training_step(self, batch, batch_idx):
            if batch_idx == 0:
                self.net = [torch.compile(self.model, backend=slow_backend)]
            return nn.functional.mse_loss(self.net[0](batch[0]), batch[1])

    make_trainer(folder, hang_timeout=30.0).fit(Compiled(), make_loader())


@pytest.mark.slow
def test_a_compilation_is_called_that(tmp_path):
    done = completed(compile_slowly, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The process is compiling for torch.compile, called in test_hangs.py:" in done.stderr
    assert "(slow_backend)" not in done.stderr


@pytest.mark.slow
def test_the_longest_step_counts(trainer, caplog, monkeypatch):
    monkeypatch.setattr(hang, "REPORT_SECONDS", 0.2)

    class Slow(Tiny):
        def training_step(self, batch, batch_idx):
            time.sleep(0.5)
            return super().training_step(batch, batch_idx)

        def on_train_end(self):
            time.sleep(1.5)

    made = trainer()
    made.fit(Slow(), make_loader(32))
    assert made.global_step == 8
    steps = {int(step) for step in re.findall(r"The process is in .* at step (\d+)", caplog.text)}
    assert 1 in steps  # until it is known how long a step takes
    assert max(steps) <= 3
    assert "on_train_end" not in caplog.text


@pytest.mark.slow
def test_loaders_of_different_lengths_are_refused(trainer):
    class Uneven(Tiny):
        def train_dataloader(self):
            return DataLoader(Subset(make_data(48), range(32 if self.trainer.global_rank else 48)), 4)

    with pytest.raises(DataError, match=r"Rank 0 and rank 1 have data of different lengths .*training: 48 and 32"):
        trainer(devices=2, strategy="ddp").fit(Uneven())


class Rows(IterableDataset):
    def __init__(self, rows, first=0):
        self.rows = range(first, first + rows)

    def __iter__(self):
        return iter([make_data(96)[row] for row in self.rows])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "output"),
    [
        ((48, 32), r"rank 0: more \(rank 0 is waiting in .*\); rank 1: 8 batches, 32 samples read"),
        ((32, 48), r"rank 0: 8 batches, 32 samples read; rank 1: more \("),
        ((32, 28), r"rank 0: 8 batches, 32 samples read; rank 1: 7 batches, 28 samples read"),
        ((32, 31), r"rank 0: 8 batches, 32 samples read; rank 1: 8 batches, 31 samples read"),
    ],
)
def test_streams_of_different_lengths(trainer, rows, output):
    """Detected at their ends within seconds, even if the ranks take equally many steps."""

    class Uneven(Tiny):
        def train_dataloader(self):
            return DataLoader(Rows(rows[self.trainer.global_rank]), 4)

    with pytest.raises(DisagreementError, match=f"different lengths on different ranks in epoch 0: {output}"):
        trainer(devices=2, strategy="ddp").fit(Uneven())


@pytest.mark.slow
def test_streams_of_one_length(trainer):
    """Also for a second run in the same processes."""

    def work():
        steps = []
        for rows in (30, 28):
            made = trainer(devices=2, strategy="ddp", max_epochs=3)
            made.fit(Tiny(), DataLoader(Rows(rows), 4))
            steps.append(made.global_step)
        return steps

    assert run_workers(work, 2) == [12, 12]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stream", "map"])
def test_own_shares_of_different_lengths(trainer, kind):
    """The run trains to the end of the longest share."""

    class Uneven(Validated):
        def loader(self, rows):
            return DataLoader(Rows(rows, 48 * self.trainer.global_rank), 4) if kind == "stream" else make_loader(rows)

        def train_dataloader(self):
            return self.loader(16 if self.trainer.global_rank else 48)

        def val_dataloader(self):
            return self.loader(48 if self.trainer.global_rank else 16)

    made = trainer(devices=2, strategy="ddp", use_distributed_sampler=False, max_epochs=2)
    made.fit(Uneven())
    assert made.global_step == 24


SILENT = """
import os, socket, sys
sys.path.insert(0, {tests!r})
from tiny import Tiny, make_loader, make_trainer
from legato.trainer.processes import hang
hang.REPORT_SECONDS = 1.0
silent = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(silent.getsockname()[1]))
make_trainer({folder!r}, strategy="ddp", devices=2).fit(Tiny(), make_loader())
"""


@pytest.mark.slow
def test_a_start_up_in_which_nobody_answers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SILENT.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path)))
    process = Forked(run_script, script)
    errors = process.folder / "stderr"
    try:
        assert wait_until(lambda: errors.exists() and "rendezvous" in errors.read_text(), 60)
        os.kill(process.pid, signal.SIGTERM)  # it is deaf no longer, either
        output = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode in (75, 128 + signal.SIGTERM)
    assert re.search(r"rank 1 is waiting for the other processes to join it \(.*rendezvous.* at startup", output), (
        output
    )


LATE = """
import os
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


@pytest.mark.slow
def test_a_rank_ends_though_the_one_with_the_store_has_ended_before(tmp_path):
    source = LATE.format(folder=str(tmp_path), port=str(free_port()))
    first = Forked(run_source, source, env=os.environ | {"RANK": "0"})
    late = Forked(run_source, source, env=os.environ | {"RANK": "1", "FIRST": str(first.pid)})
    try:
        for process in (first, late):
            errors = process.communicate(60)[1]
            assert process.returncode == 0, errors
    finally:
        first.kill()
        late.kill()


@pytest.mark.slow
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
    with pytest.raises(DisagreementError, match=r"returned -1 on rank 1 at step 3 .*but rank 0 continued"):
        made.fit(Leaves(), make_loader(48))


class Surplus(Tiny):
    """Rank 1 calls a collective of `size` numbers one more time; with `regular` both ranks call it in each step."""

    def __init__(self, size, regular=False):
        super().__init__()
        self.size, self.regular = size, regular

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            distributed.all_reduce(torch.ones(self.size))  # surplus
        if self.regular:
            distributed.all_reduce(torch.ones(1))  # regular


@pytest.mark.slow
@pytest.mark.parametrize("reproducible", ["order", "bitwise"])
def test_a_surplus_collective_pairs_with_nothing_of_legatos(trainer, reproducible):
    made = trainer(**TWO, reproducible=reproducible)
    output = hanging(made, Surplus(1), make_loader(32))
    line = line_of(Surplus.on_train_batch_end, "# surplus")
    assert f"rank 1 is waiting in all_reduce, called in test_hangs.py:{line} (on_train_batch_end)" in output
    assert "rank 0 is waiting in " in output
    assert "All ranks are waiting for each other" in output
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in output


@pytest.mark.slow
def test_ranks_that_all_wait_are_reported_early(trainer, capfd):
    class Impatient(Surplus):
        def on_train_start(self):
            hang.DEADLOCKED = 1.0  # of this worker

    with pytest.raises(HangError):
        trainer(devices=2, strategy="ddp", hang_timeout=6.0).fit(Impatient(1), make_loader(32))
    assert "The run continues; set trainer.hang_timeout to end such a run" in capfd.readouterr().err


@pytest.mark.slow
def test_a_collective_in_a_step_that_has_no_batch_for_a_rank(trainer):
    class Gathers(Tiny):
        def training_step(self, batch, batch_idx):
            distributed.barrier()
            return super().training_step(batch, batch_idx)

    output = hanging(trainer(**TWO), Gathers(), make_loader(10))
    assert re.search(r"this step has no batch for rank 1, .*\. Set drop_last=True", output)


@pytest.mark.slow
def test_a_surplus_collective_at_the_end(trainer):
    """Rank 1 has finished while rank 0 waits for it."""

    class Late(Tiny):
        def teardown(self, stage):
            if self.global_rank == 0:
                distributed.barrier()  # surplus

    with pytest.raises(DisagreementError) as caught:
        trainer(devices=2, strategy="ddp").fit(Late(), make_loader(32))
    assert re.search(r"rank 0 is waiting in barrier, called in test_hangs\.py:\d+ \(teardown\)", str(caught.value))
    assert "rank 1 has finished its work" in str(caught.value)


@pytest.mark.slow
def test_collectives_of_the_script_that_are_unlike(trainer):
    """gloo aborts a process in which different collectives meet, without a call to Python."""
    with pytest.raises(WorkerError, match=r"of 2 was killed by SIGABRT.* different collectives"):
        trainer(devices=2, strategy="ddp", hang_timeout=60).fit(Surplus(100, regular=True), make_loader(32))


SCRIPT = """
import time
from tiny import Tiny, make_loader, make_trainer

class Sleeps(Tiny):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            time.sleep(600)
        return super().training_step(batch, batch_idx)

make_trainer({folder!r}, hang_timeout=2.0, logger=True, log_every_n_steps=1).fit(Sleeps(), make_loader(num_workers=2))
"""


@pytest.mark.slow
def test_a_single_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path)))
    done = completed(run_script, script)
    assert done.returncode == 1
    assert done.stderr.startswith("HangError: No progress for 2 s")
    assert re.search(r"The process is in script\.py:8 \(training_step\) for \d+ s, at step 3\.?\n", done.stderr)
    assert "Traceback" not in done.stderr
    assert "script.py" in (tmp_path / "default/version_0/hang/rank-0.txt").read_text()


@pytest.mark.parametrize("value", [0, -1.0, True, "60"])
def test_what_is_no_time_is_refused(trainer, value):
    with pytest.raises(ConfigError, match=r"trainer\.hang_timeout"):
        trainer(hang_timeout=value)
