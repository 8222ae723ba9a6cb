"""Validation and limits: when a run validates, on how many batches, and which state stays unchanged."""

import pytest
import torch
from tiny import Tiny, Validated, Watched, assert_same_bits, make_data, make_loader
from torch import nn

import legato as lg


# --- when to validate -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [5, 10, 15, 20]),
        ({"check_val_every_n_epoch": 2}, [10, 20]),
        ({"check_val_every_n_epoch": 3}, [15]),
        ({"val_check_interval": 2}, [2, 4, 7, 9, 12, 14, 17, 19]),
        ({"val_check_interval": 0.5}, [2, 4, 7, 9, 12, 14, 17, 19]),
        ({"val_check_interval": 5}, [5, 10, 15, 20]),
        ({"val_check_interval": 2, "check_val_every_n_epoch": 2}, [7, 9, 17, 19]),
        ({"val_check_interval": 7, "check_val_every_n_epoch": None}, [7, 14]),
        ({"val_check_interval": 3, "accumulate_grad_batches": 2}, [2, 5, 8, 11]),
        ({"val_check_interval": 3, "accumulate_grad_batches": 4}, [1, 3, 5, 7]),
        ({"val_check_interval": {"seconds": 0}, "check_val_every_n_epoch": 4}, [16, 17, 18, 19, 20]),
        ({"val_check_interval": "01:00:00:00"}, []),
        ({"limit_val_batches": 0}, []),
    ],
)
def test_validation_comes_when_it_is_due(trainer, options, steps):
    task = Watched()
    trainer(max_epochs=4, num_sanity_val_steps=0, **options).fit(task, make_loader(), make_loader(8))
    assert task.at == steps


def test_a_short_window_validates_once(trainer):
    """Ten batches in windows of four; the seventh is passed by the second step, and not by the third."""
    task = Watched()
    options = {"accumulate_grad_batches": 4, "val_check_interval": 7, "num_sanity_val_steps": 0}
    trainer(**options).fit(task, make_loader(40), make_loader(8))
    assert task.at == [2]


@pytest.mark.parametrize(("steps", "batches"), [(0, 0), (1, 1), (2, 2), (-1, 3)])
def test_sanity_steps(trainer, steps, batches):
    task = Watched()
    trainer(max_epochs=0, num_sanity_val_steps=steps).fit(task, make_loader(), make_loader(12))
    assert task.batches == batches


def test_the_sanity_check_stays_within_the_limit(trainer):
    task = Watched()
    trainer(max_epochs=0, limit_val_batches=1).fit(task, make_loader(), make_loader(12))
    assert task.batches == 1


def test_the_sanity_check_leaves_no_trace(trainer):
    class Dropped(Validated):
        def __init__(self):
            super().__init__()
            self.model.append(nn.Dropout(0.3))

    tasks = [Dropped(), Dropped()]
    for task, steps in zip(tasks, (0, 2), strict=True):
        made = trainer(max_epochs=0, num_sanity_val_steps=steps)
        made.fit(task, make_loader(), make_loader())
        assert made.callback_metrics == made.logged_metrics == {}
        trainer(max_epochs=2, num_sanity_val_steps=steps).fit(task, make_loader(shuffle=True), make_loader())
    assert_same_bits(*tasks)


class Loaded(Validated):
    """A model whose parts come in evaluation mode: one is frozen, one is trained."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).requires_grad_(False).eval()
        self.trained = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Sequential(nn.Tanh())).eval()
        self.dropout = nn.Dropout(0.5).eval()

    def training_step(self, batch, batch_idx):
        assert self.training
        assert all(module.training for module in (*self.trained.modules(), *self.model.modules()))
        assert not any(module.training for module in (*self.frozen.modules(), self.dropout))
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        assert not any(module.training for module in self.modules())


@pytest.mark.parametrize("steps", [0, 2])
def test_what_is_trained_goes_to_training_mode(trainer, caplog, steps):
    caplog.set_level("INFO")
    task = Loaded()
    for _ in range(2):
        trainer(num_sanity_val_steps=steps, val_check_interval=2).fit(task, make_loader(), make_loader())
    messages = [record.message for record in caplog.records if "evaluation mode" in record.message]
    assert messages == [
        "trained started in evaluation mode and is now in training mode, so dropout is active. To keep "
        "evaluation mode, call .eval() in on_train_epoch_start."
    ]


def test_a_task_chooses_evaluation_mode_when_an_epoch_starts(trainer):
    class Chooses(Validated):
        def on_train_epoch_start(self):
            self.model.eval()

        def training_step(self, batch, batch_idx):
            assert not self.model.training
            return self.loss(batch)

    trainer(max_epochs=2, val_check_interval=2).fit(Chooses(), make_loader(), make_loader())


@pytest.mark.parametrize("steps", [0, 2])
def test_a_task_in_evaluation_mode_is_trained_in_training_mode(trainer, steps):
    class Checked(Validated):
        def training_step(self, batch, batch_idx):
            assert all(module.training for module in self.modules())
            return self.loss(batch)

    task = Checked().eval()
    trainer(num_sanity_val_steps=steps).fit(task, make_loader(), make_loader())


@pytest.mark.parametrize("steps", [0, 2])
def test_a_task_with_a_way_of_its_own_to_evaluate_is_trained_as_before(trainer, steps):
    class Own(Validated):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Dropout()

        def on_validation_model_eval(self):
            self.eval()
            self.layer.train()

        def validation_step(self, batch, batch_idx):
            assert self.layer.training
            assert not self.training
            return super().validation_step(batch, batch_idx)

        def training_step(self, batch, batch_idx):
            assert all(module.training for module in self.modules())
            return self.loss(batch)

    trainer(max_epochs=2, num_sanity_val_steps=steps).fit(Own(), make_loader(), make_loader())


# --- what may be asked ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "batches", "steps", "planned"),
    [
        ({"max_epochs": 3}, 5, 5, 15),
        ({"max_epochs": 3, "accumulate_grad_batches": 2}, 5, 3, 9),
        ({"max_epochs": 3, "replicas": 2}, 3, 3, 9),
        ({"max_epochs": 3, "limit_train_batches": 2}, 2, 2, 6),
        ({"max_epochs": 3, "max_steps": 4}, 5, 5, 4),
        ({"max_epochs": -1, "max_steps": 4}, 5, 5, 4),
    ],
)
def test_a_task_can_ask_how_much_there_is_to_do(trainer, options, batches, steps, planned):
    class Asks(Validated):
        def configure_optimizers(self):
            made = self.trainer
            assert (made.num_training_batches, made.steps_per_epoch) == (batches, steps)
            assert made.estimated_stepping_batches == planned
            assert made.num_val_batches == ([1, 2] if "replicas" in options else [2, 3])
            return super().configure_optimizers()

    made = trainer(**options)
    made.fit(Asks(), make_loader(), [make_loader(8), make_loader(12)])
    assert made.global_step == planned


def test_the_trainer_says_what_it_is_doing(trainer):
    states = []

    class Asks(Validated):
        def say(self):
            made = self.trainer
            words = ("sanity_checking", "training", "validating", "testing", "predicting", "evaluating", "running")
            states.append((made.stage, *(word for word in words if getattr(made, word))))

        def training_step(self, batch, batch_idx):
            self.say()
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            self.say()

        test_step = predict_step = validation_step

    task, made = Asks(), trainer()
    made.fit(task, make_loader(4), make_loader(4))
    made.validate(task, make_loader(4))
    made.test(task, make_loader(4))
    made.predict(task, make_loader(4))
    assert states == [
        ("fit", "sanity_checking", "running"),
        ("fit", "training", "running"),
        ("fit", "validating", "evaluating", "running"),
        ("validate", "validating", "evaluating", "running"),
        ("test", "testing", "evaluating", "running"),
        ("predict", "predicting", "running"),
    ]
    assert made.stage is None


# --- how much ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("limit", "batches"), [(1.0, 5), (1, 1), (3, 3), (100, 5), (0.5, 2), (0.99, 4)])
def test_limit_train_batches(trainer, limit, batches):
    task, made = Tiny(), trainer(max_epochs=2, limit_train_batches=limit)
    made.fit(task, make_loader())
    assert len(task.seen) == made.global_step == 2 * batches


def test_limits_count_the_batches_of_a_replica_in_training(trainer):
    task, made = Tiny(), trainer(limit_train_batches=2, replicas=3)
    made.fit(task, make_loader(48))
    assert (made.global_step, len(task.seen)) == (2, 6)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("limit", "batches"), [(2, 2), (0.4, 2)])
def test_overfit_batches_limits_both_loaders(trainer, limit, batches, shuffle):
    class Same(Validated):
        def __init__(self):
            super().__init__()
            self.validated = []

        def validation_step(self, batch, batch_idx):
            self.validated.append(batch[0].clone())

    task = Same()
    made = trainer(max_epochs=2, overfit_batches=limit, num_sanity_val_steps=0)
    made.fit(task, make_loader(shuffle=shuffle), make_loader(20))
    assert len(task.seen) == 2 * batches
    assert torch.equal(torch.cat(task.seen), make_data().tensors[0][: 4 * batches].repeat(2, 1))
    assert torch.equal(torch.cat(task.validated), torch.cat(task.seen)[: 4 * batches].repeat(2, 1))


@pytest.mark.parametrize(("limit", "batches"), [(True, 1), (2, 2)])
def test_fast_dev_run(trainer, tmp_path, limit, batches):
    class Counts(Watched):
        def test_step(self, batch):
            self.batches += 1

    options = {"logger": True, "enable_checkpointing": True, "callbacks": lg.callbacks.EarlyStopping("val_loss")}
    task, made = Counts(), trainer(max_epochs=9, fast_dev_run=limit, **options)
    made.fit(task, make_loader(), make_loader())
    assert (made.global_step, task.batches, task.at) == (batches, batches, [batches])
    made.test(task, make_loader())
    assert task.batches == 2 * batches
    assert list(tmp_path.iterdir()) == []


def test_drop_last(trainer):
    task = Tiny()
    trainer(max_epochs=2).fit(task, make_loader(18, drop_last=True))
    assert [len(batch) for batch in task.seen] == [4] * 8


def test_drop_last_with_replicas_drops_the_round_that_is_not_full(trainer):
    task = Tiny()
    trainer(replicas=3).fit(task, make_loader(30, drop_last=True))
    assert [len(batch) for batch in task.seen] == [4] * 6
