"""A run is complete when it is built; what changes afterwards is a small loop state."""

from dataclasses import fields

import pytest
from tiny import Validated, make_loader

import legato as lg
from legato.trainer.run import LoopState, RunData

HOOKS = [
    "on_fit_start",
    "on_train_start",
    "on_train_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_fit_end",
]


class Watching(lg.Callback):
    """Compares the attributes of the run at each hook with those at the first one."""

    def __init__(self):
        self.first, self.seen = {}, []


def look(name):
    def hook(self, trainer, *others):
        self.seen.append(name)
        now = {key: id(value) for key, value in vars(trainer.current_run).items()}
        self.first = self.first or now
        assert now == self.first

    return hook


for name in HOOKS:
    setattr(Watching, name, look(name))


@pytest.mark.parametrize("options", [{}, {"reload_dataloaders_every_n_epochs": 1, "replicas": 2, "nan": "skip"}])
def test_a_run_does_not_change_once_it_is_built(trainer, options):
    watching, task = Watching(), Validated()
    made = trainer(max_epochs=2, callbacks=[watching], **options)
    made.fit(task, make_loader(18), make_loader(18))
    assert set(watching.seen) == set(HOOKS)
    with pytest.raises(AttributeError, match=r"Run\.arity does not change once the run is built"):
        made.current_run.arity = 3


def test_the_loop_state_is_small():
    assert len(fields(LoopState)) + len(fields(RunData)) <= 15
