"""Methods that a subclass of the Trainer, a task, a data module or a logger overrides."""

import logging

import pytest
from tiny import Memory, Says, Tiny, logs, make_loader, make_trainer

import legato as lg
from legato.base.errors import TaskError


class Misspelt(Tiny):
    def on_train_epoch_ends(self):
        """Would never be called."""


class Lenient(lg.Trainer):
    def check(self, *owners):
        try:
            super().check(*owners)
        except TaskError as error:
            logging.getLogger("mine").warning("%s", error)


def test_a_trainer_may_take_another_view_of_misnomers(tmp_path, caplog):
    with pytest.raises(TaskError, match=r"on_train_epoch_ends.*Did you mean 'on_train_epoch_end'"):
        make_trainer(tmp_path).fit(Misspelt(), make_loader())
    Lenient(default_root_dir=tmp_path, max_epochs=1, logger=False, enable_progress_bar=False).fit(
        Misspelt(), make_loader()
    )
    assert "on_train_epoch_ends" in caplog.text


def test_what_loggers_are_given_of_a_task_is_the_tasks_own_choice(tmp_path):
    class Secret(Tiny):
        def __init__(self, lr=0.1, token="mine"):
            super().__init__(lr)
            self.save_hyperparameters()

        def logged_hyperparameters(self):
            return {"lr": self.lr}

    class Told(Memory):
        def log_hyperparams(self, params, metrics=None):
            self.params = params

    logger = Told()
    make_trainer(tmp_path, logger=logger).fit(Secret(), make_loader())
    assert logger.params["lr"] == 0.1
    assert "token" not in logger.params


def test_a_logger_may_place_points_otherwise(tmp_path):
    class FromZero(Memory):
        def log_point(self, values, step):
            super().log_point(values, step - 1)

    plain, shifted = Memory(), FromZero()
    make_trainer(tmp_path, logger=[plain, shifted], log_every_n_steps=1).fit(Says(logs()), make_loader())
    assert [step - 1 for step, _ in plain.of("x")] == [step for step, _ in shifted.of("x")] != []
