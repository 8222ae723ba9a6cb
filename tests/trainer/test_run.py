"""A run is complete when it is made; only a small loop state changes afterwards."""

from dataclasses import FrozenInstanceError, fields

import pytest
from tiny import Validated, make_loader

import legato as lg
from legato.base.errors import TaskError
from legato.trainer.run import Call, LoopState, Run, RunData

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
    def hook(self, trainer, *arguments):
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
    with pytest.raises(FrozenInstanceError, match="arity"):
        made.current_run.arity = 3


def test_the_loop_state_is_small():
    assert len(fields(LoopState)) + len(fields(RunData)) <= 22


class SetUp(Validated):
    """Notes at each setup hook which phase the run has reached, and what can be read of it."""

    def __init__(self):
        super().__init__()
        self.phases = {}

    def note(self, name):
        run = self.trainer.current_run
        assert (run.task, run.stage, self.trainer.stage) == (self, "fit", "fit")
        assert self.trainer.optimizers == self.trainer.lr_scheduler_configs == []
        with pytest.raises(TaskError, match="outside any step"):
            self.log("early", 1.0)
        self.phases[name] = type(run)

    def configure_callbacks(self):
        self.note("configure_callbacks")
        return []

    def prepare_data(self):
        self.note("prepare_data")

    def setup(self, stage):
        self.note("setup")

    def configure_model(self):
        self.note("configure_model")

    def train_dataloader(self):
        self.note("train_dataloader")
        return make_loader(4)

    def configure_optimizers(self):
        self.note("configure_optimizers")
        assert self.trainer.num_training_batches == 1
        self.trainer.save_checkpoint(self.trainer.default_root_dir / "early.weights", weights_only=True)
        with pytest.raises(TaskError, match="called during setup"):
            self.trainer.save_checkpoint(self.trainer.default_root_dir / "early")
        return super().configure_optimizers()

    def on_fit_start(self):
        self.phases["on_fit_start"] = type(self.trainer.current_run)


def test_the_phases_of_a_run_are_there_for_the_hooks_of_its_set_up(trainer):
    task = SetUp()
    trainer(max_epochs=1, limit_val_batches=0).fit(task)
    assert task.phases.pop("on_fit_start") is Run
    assert set(task.phases.values()) == {Call}
    assert len(task.phases) == 6
