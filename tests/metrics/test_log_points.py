"""A point of the log under ddp: one collective for values, names, losses and what the ranks agree on."""

import pytest
from collectives import count_collectives
from ddp_cases import QUIET
from tiny import Tiny, make_loader

import legato as lg
from legato.trainer.errors import DisagreementError, NonFiniteError
from legato.trainer.processes.environment import run_workers

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

        def log_step():
            _, counts = count_collectives(COLLECTIVES, write)
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
def found():
    """What rank 0 of two saw: of a whole run each point's collectives and the last values; of two others the errors."""
    return run_workers(cases, 2)


def test_a_point_of_the_log_is_one_collective(found):
    points, values = found[0]
    assert points == [2, *[1] * 9]  # the first one also says what the numbers stand for
    assert values["value/98"] == pytest.approx(values["loss_step"] * 98, rel=1e-6)


def test_it_also_finds_the_loss_of_another_rank_that_is_not_finite(found):
    assert "NonFiniteError: The loss of step 4 is not finite on another rank" in found[1]


def test_it_also_finds_names_that_differ(found):
    assert "DisagreementError: The ranks logged different names in train at step" in found[2]
    assert "rank 1 also logged ['odd']" in found[2]
