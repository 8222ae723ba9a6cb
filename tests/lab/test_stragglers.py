"""Slow ranks: how long others wait for them, phase by phase, and what the monitor says of them."""

import tempfile
import time

import pytest
import torch
from collectives import count_collectives
from ddp_cases import QUIET, Net, fit, loader
from tiny import Memory

import legato as lg
from legato.base.errors import ConfigError, HangError
from legato.lab import StragglerMonitor
from legato.trainer.optimization import drift
from legato.trainer.processes import agreement
from legato.trainer.processes.launch import run_workers
from legato.trainer.processes.ranks import Timeouts

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object")


# --- timeouts ---------------------------------------------------------------------------------------------------------
class Slow(Net):
    """One rank or the other is slow in every phase; in the phase `step` longer than is allowed."""

    def on_fit_start(self):
        time.sleep(2.0 * self.trainer.global_rank)

    def on_save_checkpoint(self, checkpoint):
        time.sleep(0.0 if self.trainer.global_rank else 2.0)
        print("a checkpoint is written", flush=True)

    def training_step(self, batch, batch_idx):
        if self.global_step == 4 and self.trainer.global_rank == 1:
            time.sleep(60)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == 2:
            self.trainer.save_checkpoint(self.folder / "checkpoint")


@pytest.mark.slow
def test_each_phase_has_its_own_limit(tmp_path, capfd):
    task = Slow()
    task.folder = tmp_path
    strategy = {"name": "ddp", "timeout": {"startup": 60, "step": 4, "checkpoint": 60}}
    with pytest.raises(HangError, match=r"has waited 4 s \(trainer.strategy.timeout.step\)") as caught:
        fit(task, samples=40, batch_size=2, devices=3, strategy=strategy, threads=1, num_sanity_val_steps=0)
    captured = capfd.readouterr()
    assert captured.out.count("a checkpoint is written") == 3
    assert "rank 1 is in test_stragglers.py" in str(caught.value)
    # ranks 0 and 2 reach the limit at once: each reads the board for its message while the other writes where it was
    assert "The others are waiting for rank 1." in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (0, "timeout=0: expected a positive number"),
        ({"step": -1}, "timeout.step=-1: expected a positive number"),
        ({"stpe": 1}, "timeout has no phase 'stpe'.* Did you mean 'step'"),
    ],
)
def test_limits_that_are_none(wanted, message):
    with pytest.raises(ConfigError, match=message):
        Timeouts(wanted)


def test_a_phase_that_is_not_named_has_torchs_limit():
    timeouts = Timeouts({"step": 30})
    assert [timeouts.limits[phase].total_seconds() for phase in ("startup", "step", "checkpoint")] == [1800, 30, 1800]


# --- the monitor ------------------------------------------------------------------------------------------------------
class Straggler(Net):
    """Rank `slow` needs `seconds` more for each forward."""

    def __init__(self, slow, seconds):
        super().__init__()
        self.slow, self.seconds = slow, seconds

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == self.slow:
            time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)


def watch(slow, monitor=True, seconds=0.06, **options):
    """Train for 16 steps; return what was logged, and the hooks that are left on parameters."""
    memory = Memory()
    arguments = {**QUIET, "log_every_n_steps": 4, "max_epochs": 4, "strategy": "ddp", "devices": 2, **options}
    arguments["default_root_dir"] = tempfile.gettempdir()  # a run with a logger has a folder
    watcher = StragglerMonitor(threshold=0.1)
    trainer = lg.Trainer(**{**arguments, "logger": [memory], "callbacks": [watcher] if monitor else []})
    task = Straggler(slow, seconds)
    trainer.fit(task, loader(32))
    left = [parameter._post_accumulate_grad_hooks for parameter in task.parameters()]
    names = ("straggler/slowest_rank", "straggler/wait_seconds", "straggler/wait_share")
    return [memory.of(name) for name in names], watcher, sum(bool(hooks) for hooks in left)


def cases():
    """Everything that needs two processes, in the two of one start."""
    torch.set_num_threads(1)
    agreement.SECONDS_BETWEEN = 1e6  # so that ranks meet at logging steps only, and the counts can be compared
    drift.PAUSE_PER_SECOND = 1e9  # how often weights are compared depends on the time that it takes
    results = {}
    for name, slow, options in (
        ("first", 0, {}),
        ("second", 1, {"accumulate_grad_batches": 2, "max_epochs": 8}),
        ("bitwise", 1, {"reproducible": "bitwise"}),
        ("validating", 1, {"val_check_interval": 2}),
    ):
        logged, watcher, left = watch(slow, **options)
        results[name] = logged, watcher.slowest, watcher.wait_seconds, watcher.wait_share, left
    _, results["with"] = count_collectives(COLLECTIVES, lambda: watch(-1))
    _, results["without"] = count_collectives(COLLECTIVES, lambda: watch(-1, monitor=False))
    return results


@pytest.fixture(scope="module")
def results():
    return run_workers(cases, 2, threads=1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank"), [("first", 0), ("second", 1), ("bitwise", 1), ("validating", 1)])
def test_the_slowest_rank_and_the_wait_for_it(results, name, rank):
    (ranks, seconds, shares), slowest, wait, share, left = results[name]
    assert slowest == rank
    assert [step for step, _ in ranks][-3:] == [8, 12, 16]  # what the meeting before has told
    assert {value for _, value in ranks} == {float(rank)}
    turns = 2 if name == "second" else 1
    assert wait > 0.02 * turns  # of the 0.06 s that it sleeps in each turn; a busy machine keeps the other one, too
    assert 0.1 < share < 1.0
    assert all(value > 0.01 for _, value in seconds)
    assert all(0.1 < value < 1.0 for _, value in shares)
    assert left == 0


@pytest.mark.slow
def test_it_costs_no_collective_of_its_own(results):
    assert results["with"] == results["without"]
    assert results["with"]["all_reduce"] > 4


@pytest.mark.slow
def test_it_warns_with_the_ranks_name(capfd):
    def work():
        agreement.SECONDS_BETWEEN = 1e6
        watch(1)

    run_workers(work, 2, threads=1)
    errors = capfd.readouterr().err
    assert errors.count("Rank 1 is the slowest: it works for 0.") == 1
    assert " s per step, while the others wait " in errors
    assert " s on average (" in errors


def test_one_process_has_nobody_to_wait_for(trainer):
    memory = Memory()
    lg_trainer = trainer(callbacks=[StragglerMonitor()], logger=memory, log_every_n_steps=1)
    lg_trainer.fit(Net(), loader(8))
    assert not memory.of("straggler/slowest_rank")


@pytest.mark.slow
def test_bad_thresholds_and_elastic_runs_are_refused():
    with pytest.raises(ConfigError, match="threshold must be a fraction of a step"):
        StragglerMonitor(threshold=2)
    elastic = {"strategy": {"name": "ddp", "elastic": True}, "devices": 2, "threads": 1}
    with pytest.raises(ConfigError, match="compares ranks, which change in an elastic run"):
        lg.Trainer(**{**QUIET, **elastic, "callbacks": [StragglerMonitor()]}).fit(Net(), loader(16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_clock_of_a_stream():
    from legato.lab.straggler_monitor import DeviceClock

    clock = DeviceClock(torch.device("cuda", 0))
    begin = clock.stamp()
    torch.cuda._sleep(20_000_000)  # cycles
    end = clock.stamp()
    torch.cuda.synchronize()
    assert clock.seconds(begin, end) > 0.005
