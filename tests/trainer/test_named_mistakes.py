"""Mistakes in tasks that raised another library's error, or none: each has an error that names the remedy."""

import pdb
from dataclasses import dataclass

import pytest
import torch
from tiny import Tiny, Validated, make_loader
from torch.utils.data import DataLoader

import legato as lg
from legato.base.errors import DataError, DisagreementError, TaskError

TWO = {"strategy": "ddp", "devices": 2}


# --- debuggers ------------------------------------------------------------------------------------------------------
class Stops(Tiny):
    def __init__(self, stop):
        super().__init__()
        self.stop = stop

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            self.stop()
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [breakpoint, pdb.set_trace, lambda: pdb.Pdb().set_trace()])
def test_a_debugger_in_a_worker_process_is_told_what_to_do(trainer, stop):
    with pytest.raises(TaskError) as caught:
        trainer(**TWO).fit(Stops(stop), make_loader())
    message = str(caught.value)
    assert "rank 1" in message
    assert "trainer.devices=1" in message
    assert "test_named_mistakes.py" in message


# --- what is None ---------------------------------------------------------------------------------------------------
def test_a_step_that_was_set_to_none_is_none(trainer, refused):
    task = Validated()
    task.validation_step = None
    message = refused(TaskError, task, make_loader(), make_loader())
    assert "Validated.validation_step is None" in message
    task.val_dataloader = make_loader
    trainer().fit(task, make_loader())  # switched off, as Lightning has it
    task = Tiny()
    task.training_step = None
    assert "Tiny.training_step is None, which fit requires" in refused(TaskError, task)
    task = Tiny()
    task.predict_step = None
    assert "Tiny.predict_step is None, which predict requires" in refused(TaskError, task, stage="predict")


def test_none_for_what_is_called_is_named(refused, trainer):
    task = Tiny()
    task.configure_model = None
    assert "Tiny.configure_model is None, but Legato calls it" in refused(TaskError, task)
    task = Tiny()
    task.configure_optimizers = None
    assert refused(TaskError, task) == "Tiny.configure_optimizers is None, which fit requires. Define it."
    task = Tiny()
    task.train_dataloader = task.val_dataloader = None
    trainer().fit(task, make_loader())


class NoEnd(Validated):
    on_train_epoch_end = None
    on_validation_batch_end = None
    transfer_batch_to_device = None


def test_a_hook_that_is_none_is_not_called(trainer):
    task = NoEnd()
    task.on_train_start = None
    trainer().fit(task, make_loader(), make_loader())


# --- logging --------------------------------------------------------------------------------------------------------
class Logs(Validated):
    def __init__(self, step=None, end=None, **options):
        super().__init__()
        self.step, self.end, self.options = step, end, options

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.step is not None:
            self.step(self, loss)
        return loss

    def on_train_epoch_end(self):
        if self.end is not None:
            self.log(self.end, 1.0)


@pytest.mark.parametrize("options", [{}, {"on_epoch": True}, {"add_dataloader_idx": False}])
def test_the_name_and_the_value_of_log_in_the_wrong_order(play, options):
    with pytest.raises(TaskError, match=r"log\(\) expects a name followed by a value, as in log\('loss', loss\)"):
        play(Logs(lambda task, loss: task.log(loss, "loss", **options)))
    with pytest.raises(TaskError, match=r"log\(\) expects a name.*got 1\.0\.\n"):
        play(Logs(lambda task, loss: task.log(1.0, loss)))


@pytest.mark.slow
def test_names_that_differ_in_the_sanity_check_are_said_to_do_so_there(trainer):
    class Differs(Tiny):
        def validation_step(self, batch, batch_idx):
            self.log(f"value_{self.global_rank}", 1.0)

    with pytest.raises(DisagreementError) as caught:
        trainer(num_sanity_val_steps=2, **TWO).fit(Differs(), make_loader(16), make_loader(16))
    assert "different names in the sanity check:" in str(caught.value)
    assert "-2" not in str(caught.value)
    with pytest.raises(DisagreementError, match="different names in validation at step 2:"):
        trainer(num_sanity_val_steps=0, **TWO).fit(Differs(), make_loader(16), make_loader(16))


def test_a_complex_number_is_no_value_to_log(play):
    with pytest.raises(TaskError, match=r"log\('x'\) expects a number.*got a .*complex64 tensor of shape \(\)"):
        play(Logs(lambda task, loss: task.log("x", torch.tensor(1j))))


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_run_within_a_run_of_the_same_trainer_is_refused(play, stage):
    task = Logs(lambda task, loss: getattr(task.trainer, stage)(task, make_loader()))
    with pytest.raises(TaskError, match=f"{stage} was called while the same Trainer was running fit"):
        play(task)
    play(Validated())


# --- names and arguments --------------------------------------------------------------------------------------------
class OfIterator(Tiny):
    def training_step(self, dataloader_iter, batch_idx):
        return self.loss(next(dataloader_iter))


def test_a_step_that_wants_the_iterator_is_told_that_it_gets_a_batch(refused):
    message = refused(TaskError, OfIterator())
    assert "OfIterator.training_step(dataloader_iter" in message
    assert "Use a `batch` argument instead; the trainer iterates over the loader" in message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("validate_step", "validation_step"),
        ("val_step", "validation_step"),
        ("prediction_step", "predict_step"),
        ("testing_step", "test_step"),
        ("validation_dataloader", "val_dataloader"),
    ],
)
def test_a_word_beside_lightnings_is_refused_where_the_right_one_is_missing(refused, trainer, name, meant):
    kind = type("Words", (Tiny,), {name: lambda self, *arguments: None})
    assert f"Words.{name}" in (message := refused(TaskError, kind()))
    assert f"Did you mean '{meant}'?" in message
    mixed = type("Both", (Validated,), {"validate_step": lambda self, *arguments: None})
    trainer().fit(mixed(), make_loader())


def test_a_missing_training_step_names_the_one_that_is_nearly_it(refused):
    kind = type("Words", (lg.Task,), {"train_step": Tiny.training_step})
    assert "Words has no training_step, which fit requires. Define it. Did you mean 'train_step'" in refused(
        TaskError, kind()
    )


# --- hyperparameters ------------------------------------------------------------------------------------------------
class Hidden(Tiny):
    """Trains a module that is not registered: in a plain list."""

    def __init__(self):
        super().__init__()
        self.heads = [torch.nn.Linear(3, 1)]

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), *self.heads[0].parameters()], lr=0.1)


def test_parameters_that_are_not_the_tasks_are_refused(refused):
    """A resumed run would begin them again, and each process would train its own."""
    message = refused(TaskError, Hidden())
    assert "shapes: (1, 3), (1,)). They would not be moved to the device, averaged" in message
    assert "nn.ModuleList" in message


class Empty(Tiny):
    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.head = torch.nn.Linear(1, 1)


def test_a_parameter_without_values_is_named(trainer):
    with pytest.raises(TaskError, match=r"head\.weight of Empty has no values: it is on the meta device"):
        trainer().fit(Empty(), make_loader())


class Base(Tiny):
    def __init__(self, width=3, net=None, lr=0.1):
        super().__init__(lr)
        self.save_hyperparameters(ignore=["net"])


class Narrow(Base):
    def __init__(self, width=4, secret=None, lr=0.2, **kwargs):
        super().__init__(width=width, lr=lr, **kwargs)
        self.save_hyperparameters(ignore=["secret", "width"])


def test_what_a_subclass_ignores_is_taken_back():
    assert dict(Narrow().hparams) == {"lr": 0.2}
    assert dict(Base(net=5).hparams) == {"width": 3, "lr": 0.1}


class OfModule(Base):
    def __init__(self, net, width=4):
        super().__init__(net=net, width=width)
        self.save_hyperparameters(ignore="net")


def test_an_ignored_module_is_not_kept_although_the_base_had_another_name_for_it():
    assert dict(OfModule(torch.nn.Linear(1, 1)).hparams) == {"width": 4, "lr": 0.1}


class KeepsAll(Tiny):
    def __init__(self, lr=0.1):
        super().__init__(lr)
        self.keep()

    def keep(self):
        self.save_hyperparameters()


class WithNet(KeepsAll):
    def __init__(self, net, ignore):
        super().__init__(lr=0.3)
        if ignore:
            self.save_hyperparameters(ignore=["net", "ignore"])


def test_what_only_a_subclass_cannot_keep_is_its_own_to_leave_out(trainer, refused):
    """The base also sees the subclass's arguments, before the subclass can exclude some."""
    task = WithNet(torch.nn.Linear(1, 1), True)
    assert dict(task.hparams) == {"lr": 0.3}
    trainer().fit(task, make_loader())
    assert set(WithNet(torch.nn.Linear(1, 1), False).hparams) == {"lr", "net", "ignore"}


@dataclass(eq=False)
class Fields(lg.Task):
    width: int = 3
    lr: float = 0.1
    name: str = "x"

    def __post_init__(self):
        super().__init__()
        self.save_hyperparameters(ignore="name")
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@dataclass(eq=False)
class MoreFields(Fields):
    depth: int = 2

    def __post_init__(self):
        super().__post_init__()
        self.save_hyperparameters()


def test_a_dataclass_task_has_its_fields_as_hyperparameters(trainer, tmp_path):
    assert dict(Fields(width=5).hparams) == {"width": 5, "lr": 0.1}
    made = trainer(max_epochs=1)
    task = Fields(lr=0.5)
    made.fit(task, make_loader())
    made.save_checkpoint(tmp_path / "saved")
    again = Fields.load_from_checkpoint(tmp_path / "saved")
    assert dict(again.hparams) == {"width": 3, "lr": 0.5}
    assert torch.equal(again.layer.weight, task.layer.weight)
    assert dict(MoreFields(depth=7).hparams) == {"width": 3, "lr": 0.1, "name": "x", "depth": 7}


def test_a_class_is_no_loader(refused):
    assert "another iterable of batches, got the class DataLoader." in refused(DataError, Tiny(), DataLoader)
