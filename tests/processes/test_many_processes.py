"""More processes than cores: 32 start, train, log, save, lose a rank and resume; a process's traffic is counted."""

import json
import resource
import time
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import legato as lg
from legato.trainer.processes.agreement import Agreement

scale = pytest.importorskip("benchmarks.scale")  # not part of an installed package

MANY = 32


class Limited(scale.Tiny):
    """Lowers a worker's limit of open files before the rendezvous."""

    def __setstate__(self, state):
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        super().__setstate__(state)


@pytest.mark.slow
def test_a_run_that_logs_saves_and_loses_a_process(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "Tiny", Limited)  # gloo's connections to 31 others in two groups do not fit into 64
    _, sizes = scale.kill_one(MANY, tmp_path, rounds=5)
    assert sizes == [MANY, MANY - 1]
    assert json.loads((tmp_path / "saved" / "state.json").read_text())["global_step"] == 2
    points = lg.runs.open(next(tmp_path.rglob("metrics.jsonl"))).metrics
    assert [step for step in points["step"] if step < 5] == [2, 4]


class Alike:
    """A group in which all ranks have this rank's values."""

    def __init__(self, size):
        self.size = size

    def all_reduce(self, tensor, operation):
        return tensor


@pytest.mark.parametrize(("ranks", "seconds"), [(2, 1), (100, 1), (1024, 10.24)])
def test_agreements_come_rarer_among_many(ranks, seconds, monkeypatch):
    """For a run with 100 steps per second."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    agreement, met = Agreement(Alike(ranks), 0, 0.0), []
    for step in range(1, 10_000):
        now[0] += 0.01
        if step >= agreement.next_step:
            agreement.agree(step, wants_stop=False)
            met.append(step)
    assert met[-1] - met[-2] == pytest.approx(100 * seconds, abs=2)


# --- the counts of benchmarks/scale.py --------------------------------------------------------------------------------
FRAME = 48
"""Bytes that gloo writes before each message, and for each that only says that a peer is ready."""


class Written(lg.Callback):
    """Writes the bytes that rank 0 sends in a logging point and in an agreement to a file."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            sent = [self.count(trainer, call) for call in (trainer.log_step, trainer.current_run.agree_on_stop)]
            if trainer.is_global_zero:
                self.path.write_text(json.dumps(sent))

    def count(self, trainer, call):
        trainer.strategy.collectives.barrier()
        before = self.written()
        call()
        after = self.written()
        return after["wchar:"] - before["wchar:"] - FRAME * (after["syscw:"] - before["syscw:"])

    def written(self):
        counts, before = self.counters(), None
        while counts != before:  # gloo's thread may still tell peers that it is ready
            time.sleep(0.2)
            counts, before = self.counters(), counts
        return counts

    def counters(self):
        lines = Path("/proc/self/io").read_text().splitlines()
        return {name: int(number) for name, number in map(str.split, lines) if name in ("wchar:", "syscw:")}


@pytest.mark.slow
def test_the_counted_bytes_are_those_that_are_sent(tmp_path):
    """Compares a simulation of 4 processes with 4 real processes."""
    path, ranks, values = tmp_path / "sent", 4, 5
    options = {"devices": ranks, "strategy": "ddp", "logger": False, "callbacks": [Written(path)]}
    scale.make_trainer(tmp_path, 3, **options).fit(scale.Tiny(values), DataLoader(scale.Vectors(), 4))
    counted = scale.simulate(ranks, 96, values)
    for event, sent in zip(("logging point", "agreement"), json.loads(path.read_text()), strict=True):
        expected = sum(scale.messages(name, *counts, ranks)[1] for name, counts in counted[event].items())
        assert sent == pytest.approx(expected, abs=16), event  # a ring's pieces are whole numbers of 8 bytes
