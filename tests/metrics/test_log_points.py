"""Logged values under ddp: a logging point is one collective, and a value logged once by a hook counts once."""

import pytest
from collectives import count_collectives
from ddp_cases import QUIET
from tiny import Tiny, make_loader

import legato as lg
from legato.base.errors import DisagreementError, NonFiniteError
from legato.trainer.processes.launch import run_workers

pytestmark = pytest.mark.slow


COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "gather")


class Counts(Tiny):
    """Logs a hundred values a step; counts the collectives of each point."""

    def __init__(self, bad_step=-1, odd_step=-1):
        super().__init__()
        self.bad_step, self.odd_step, self.points = bad_step, odd_step, []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log_dict({f"value/{index}": loss * index for index in range(99)})
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.global_step == self.odd_step and self.global_rank == 1:
            self.log("odd", 1.0)
        return loss * float("nan") if self.global_step == self.bad_step and self.global_rank == 1 else loss

    def on_fit_start(self):
        trainer, write = self.trainer, self.trainer.log_step
        trainer.current_run.drift.next_time = float("inf")  # weights are compared at some points, by the time it takes

        def log_step():
            _, counts = count_collectives(COLLECTIVES, write)
            if sum(counts.values()):  # the last step, which is a point in any case, may have been one before
                self.points.append(sum(counts.values()))

        trainer.log_step = log_step


def train(task, epochs=2):
    trainer = lg.Trainer(**{**QUIET, "strategy": "ddp", "devices": 2, "max_epochs": epochs, "log_every_n_steps": 1})
    try:
        trainer.fit(task, make_loader(40))
    except (DisagreementError, NonFiniteError) as error:
        return f"{type(error).__name__}: {error}"
    return task.points, {name: float(value) for name, value in trainer.callback_metrics.items()}


def cases():
    return train(Counts()), train(Counts(bad_step=3)), train(Counts(odd_step=2))


@pytest.fixture(scope="module")
def results():
    """What rank 0 of two saw: of a whole run each point's collectives and the last values; of two others the errors."""
    return run_workers(cases, 2)


def test_a_point_of_the_log_is_one_collective(results):
    points, values = results[0]
    assert points == [3, *[1] * 9]  # before the first one ranks agree on what the numbers stand for
    assert values["value/98"] == pytest.approx(values["loss_step"] * 98, rel=1e-6)


def test_it_also_finds_the_loss_of_another_rank_that_is_not_finite(results):
    assert "NonFiniteError: The loss of step 4 is not finite on another rank" in results[1]


def test_it_also_finds_names_that_differ(results):
    assert "DisagreementError: The ranks logged different names in train at step" in results[2]
    assert "rank 1 also logged ['odd']" in results[2]


class Sums(Tiny):
    """Logs sums in hooks that run once per step or epoch, on each process."""

    def __init__(self, own_part=1.0, **options):
        super().__init__()
        self.own_part, self.options = own_part, {"reduce_fx": "sum", "on_epoch": True, **options}

    def say(self, name, value=1.0):
        if self.trainer.training:
            self.log(name, value, **self.options)

    def on_train_epoch_start(self):
        self.say("epoch_start")

    def on_before_optimizer_step(self, optimizer):
        self.say("optimizer_step")
        self.say("not_finite", float("nan"))

    def on_train_epoch_end(self):
        self.say("epoch_end")

    def validation_step(self, batch, batch_idx):
        self.log("batches", 1.0, reduce_fx="sum")

    def on_validation_epoch_end(self):
        self.log("validation_end", self.own_part if self.global_rank else 1.0, **self.options)


def sums(task=None, steps=-1, folder=None, resume=None, **options):
    made = lg.Trainer(**{**QUIET, "max_epochs": 1, "max_steps": steps, "log_every_n_steps": 1, **options})
    try:
        made.fit(task or Sums(), make_loader(40), make_loader(8), ckpt_path=resume)
    except DisagreementError as error:
        return str(error)
    if folder is not None:
        made.save_checkpoint(folder)
    return {name: float(value) for name, value in made.callback_metrics.items()}


def test_a_sum_that_a_hook_logs_once_counts_once(tmp_path):
    two = {"strategy": "ddp", "devices": 2}
    alone, replicas = sums(replicas=1), sums(replicas=2)
    equal, synced, parts, differing, half = run_workers(
        lambda: (
            sums(**two),
            sums(Sums(sync_dist=True), **two),
            sums(Sums(5.0, sync_dist=True), **two),
            sums(Sums(5.0), **two),
            sums(steps=3, folder=tmp_path / "half", **two),
        ),
        2,
    )
    assert equal == pytest.approx(replicas, nan_ok=True)
    assert (alone["optimizer_step"], equal["optimizer_step"]) == (10.0, 5.0)
    assert equal["epoch_start"] == equal["epoch_end"] == equal["validation_end"] == 1.0
    assert synced["validation_end"] == 2.0
    assert parts["validation_end"] == 6.0
    assert "log('validation_end', reduce_fx='sum') was called in a hook of" in differing
    assert "[1.0, 5.0]" in differing
    assert "sync_dist=True" in differing
    assert half["optimizer_step"] == 3.0
    resumed = sums(resume=tmp_path / "half", replicas=2)
    assert resumed == pytest.approx(replicas, nan_ok=True)


class Shown(Tiny):
    """Records the progress bar's values after each batch and at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.shown = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("most", loss, prog_bar=True, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.shown.append(self.trainer.metrics.running_values())

    def on_train_epoch_end(self):
        self.shown.append(self.trainer.metrics.running_values())


def shown(**options):
    task = Shown()
    trainer = lg.Trainer(**{**QUIET, "max_epochs": 2, "log_every_n_steps": 2, **options})
    trainer.fit(task, make_loader(40))
    return task.shown


def test_the_bar_shows_means_that_one_process_has_and_else_the_newest_values():
    alone = shown(replicas=2)
    assert [point.keys() for point in alone] == [{"loss", "most"}] * 22
    assert run_workers(lambda: shown(strategy="ddp", devices=2), 2) == [{}] * 12
