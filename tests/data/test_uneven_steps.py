"""The last step of an epoch when a process has no batch: hooks, callbacks and metrics match the other ranks.

18 samples in batches of 4 are five batches: in the third round of two replicas rank 1 has none.
"""

import pytest
import torch
from ddp_cases import QUIET, TWO, Net, fit, flat, loader

import legato as lg
from legato.callbacks import ExponentialMovingAverage
from legato.trainer.processes.launch import run_workers

pytestmark = pytest.mark.slow


class Decay(lg.callbacks.MonitoringCallback):
    """Sets the learning rate after each step, as a function of the step."""

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 * 0.5**trainer.global_step


class Saves(lg.callbacks.MonitoringCallback):
    """Saves after the step for which rank 1 has no batch, which every process must do."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == 3 and batch_idx == 2:
            trainer.save_checkpoint(self.path)


class Logs(lg.callbacks.MonitoringCallback):
    """Logs from a hook, also where there is no batch for which that could count."""

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        task.log("hooked", float(trainer.global_step), on_step=False, on_epoch=True)


CASES = {
    "a learning rate": lambda folder: {"callbacks": [Decay()]},
    "an average of weights": lambda folder: {"callbacks": [ExponentialMovingAverage(0.5)]},
    "an average of buffers": lambda folder: {"callbacks": [ExponentialMovingAverage(0.5, use_buffers=True)]},
    "a save": lambda folder: {"callbacks": [Saves(folder / "saved")]},
    "a validation after it": lambda folder: {"val_check_interval": 3, "log_every_n_steps": 2},
    "a value of a hook": lambda folder: {"callbacks": [Logs()]},
}
LAYOUTS = {"ddp": TWO, "fsdp": {"devices": 2, "strategy": "fsdp"}}


def outcome(options):
    task = Net(norm=True)
    trainer = fit(task, samples=18, **options)
    return flat(task), {name: float(value) for name, value in trainer.callback_metrics.items()}, trainer.global_step


def in_two(folder):
    outcomes = {}
    for layout, of_layout in LAYOUTS.items():
        (folder / layout).mkdir(exist_ok=True)
        for name, case in CASES.items():
            outcomes[layout, name] = outcome({**of_layout, **case(folder / layout)})
    return outcomes


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return run_workers(lambda: in_two(folder), 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_a_process_without_a_batch_does_as_the_others(two, tmp_path, layout, name):
    weights, metrics, steps = outcome({"strategy": "single", "replicas": 2, **CASES[name](tmp_path)})
    ours, theirs, theirs_steps = two[layout, name]
    assert steps == theirs_steps
    torch.testing.assert_close(ours, weights, rtol=0, atol=1e-6)
    if name != "a value of a hook":  # on two processes it is called for two batches of a step once each
        assert theirs == pytest.approx(metrics, abs=1e-5)
    else:
        assert theirs.keys() == metrics.keys()


class Notes(lg.Callback):
    """Records the calls of its hooks."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self.seen.append((batch_idx, batch is None, outputs is None))


class LateNotes(Notes, lg.callbacks.MonitoringCallback):
    """Records the hook calls of a MonitoringCallback."""


def test_what_judges_is_called_there_with_none():
    """And the round is the index; other hooks may rely on a batch, and are not called."""

    def work():
        plain, every = Notes(), LateNotes()
        trainer = lg.Trainer(**{**QUIET, **TWO, "max_epochs": 1}, callbacks=[plain, every])
        trainer.fit(Net(), loader(18))
        return trainer.strategy.collectives.gather_objects((plain.seen, every.seen))

    (plain, every), (plain_of_one, every_of_one) = run_workers(work, 2)
    assert plain == every == [(0, False, False), (1, False, False), (2, False, False)]
    assert plain_of_one == plain[:2]
    assert every_of_one == [*plain[:2], (2, True, True)]
