"""Mistakes raise the right error before the first step: what was expected, what came and what to do."""

import re
from typing import Protocol

import pytest
import torch
from tiny import Tiny, Validated, assert_same_bits, make_data, make_loader
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import legato as lg
from legato.base.errors import ConfigError, DataError, TaskError
from legato.trainer.data.sampling import Layout


# --- the task ---------------------------------------------------------------------------------------------------------
class Half(lg.Task):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, batch):
        return self.layer(batch[0]).mean()


class NoStep(Half):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NoOptimizers(Half):
    def training_step(self, batch, batch_idx):
        return self(batch)


@pytest.mark.parametrize(("task", "name"), [(NoStep, "training_step"), (NoOptimizers, "configure_optimizers")])
def test_a_method_that_fit_needs(refused, task, name):
    assert f"{task.__name__} has no {name}, which fit requires" in refused(TaskError, task())


def test_a_mistake_of_a_task_that_derives_from_a_protocol(refused):
    for _ in range(2):  # asked for its subclasses, a protocol that is made after the first question raises

        class Named(Protocol): ...

        class Short(lg.Task, Named): ...

        assert "Short has no training_step" in refused(TaskError, Short())


@pytest.mark.parametrize(("stage", "name"), [("validate", "validation_step"), ("test", "test_step")])
def test_a_step_that_an_evaluation_needs(refused, stage, name):
    assert f"Tiny has no {name}, which {stage} requires" in refused(TaskError, Tiny(), stage=stage)


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_what_is_no_task(refused, stage):
    message = refused(TaskError, nn.Linear(3, 1), stage=stage)
    assert f"{stage} expects a Legato Task, got Linear" in message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("validaton_step", "validation_step"),
        ("trainning_step", "training_step"),
        ("on_train_epoch_ends", "on_train_epoch_end"),
        ("on_validation_batch_stop", "on_validation_batch_start"),
        ("on_before_optimiser_step", "on_before_optimizer_step"),
        ("configure_optimisers", "configure_optimizers"),
        ("val_dataloaders", "val_dataloader"),
        ("prepare_dat", "prepare_data"),
        ("training_epoch_end", "on_train_epoch_end"),
        ("validation_epoch_end", "on_validation_epoch_end"),
        ("on_epoch_end", "on_train_epoch_end"),
    ],
)
def test_a_misspelt_hook_of_the_task(refused, name, meant):
    task = type("Misspelt", (Tiny,), {name: lambda self, *arguments: None})()
    message = refused(TaskError, task)
    assert f"Misspelt.{name} is named like a hook" in message
    assert f"Did you mean {meant!r}?" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["_training_step", "train_step", "step", "loss_function", "encode", "shared_step", "on", "_on_train_end"]
)
def test_other_names_are_ones_own(trainer, name):
    task = type("Own", (Tiny,), {name: lambda self, *arguments: None})()
    trainer(fast_dev_run=True).fit(task, make_loader())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("on_train_epoch_ends", "on_train_epoch_end"),
        ("on_train_bach_end", "on_train_batch_end"),
        ("on_batch_end", "on_train_batch_end"),
    ],
)
def test_a_misspelt_hook_of_a_callback(refused, name, meant):
    callback = type("Watcher", (lg.Callback,), {name: lambda self, *arguments: None})()
    message = refused(TaskError, Tiny(), callbacks=callback)
    assert f"Watcher.{name} is named like a hook" in message
    assert f"Did you mean {meant!r}?" in message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("train_dataloaders", "train_dataloader"),
        ("on_after_batch_transfers", "on_after_batch_transfer"),
        ("on_exeption", "on_exception"),
        ("prepare_datas", "prepare_data"),
    ],
)
def test_a_misspelt_hook_of_a_data_module(refused, name, meant):
    data = type("Data", (lg.DataModule,), {name: lambda self, *arguments: None})()
    message = refused(TaskError, Tiny(), data)
    assert f"Data.{name} is named like a hook" in message
    assert f"Did you mean {meant!r}?" in message


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda self: None, "it accepts no batch"),
        (lambda self, batch, batch_idx, extra: None, "it requires extra"),
        (lambda self, batch, *, extra: None, "it requires extra"),
    ],
)
def test_a_step_that_cannot_be_called(refused, step, message):
    task = type("Wrong", (Tiny,), {"training_step": step})()
    error = refused(TaskError, task)
    assert "Wrong.training_step" in error
    assert "(batch, batch_idx)" in error
    assert message in error


def test_validation_loaders_without_a_validation_step(refused):
    message = refused(TaskError, Tiny(), make_loader(), make_loader())
    assert "Tiny has no validation_step" in message


# --- the loss ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda loss: loss.detach(), "without a graph.*detached.*frozen"),
        (lambda loss: torch.stack([loss, loss]), r"scalar loss.*shape \(2,\).*losses.mean\(\)"),
        (lambda loss: loss.item(), "must return a scalar loss tensor.*it returned float"),
        (lambda loss: "low", "it returned str"),
        (lambda loss: {"losses": loss}, r"returned a dict without 'loss'; its keys are \['losses'\]"),
        (lambda loss: {"loss": loss.item()}, "it returned float"),
        (lambda loss: [loss, loss], "2 losses for 1 optimizers"),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_none(trainer, change, message, accumulate):
    class Wrong(Tiny):
        def training_step(self, batch, batch_idx):
            return change(self.loss(batch))

    task, made = Wrong(), trainer(accumulate_grad_batches=accumulate)
    with pytest.raises(TaskError, match=re.compile(message, re.DOTALL)):
        made.fit(task, make_loader())
    assert made.global_step == 0
    assert_same_bits(task, Tiny())


def test_a_frozen_task(trainer):
    task = Tiny()
    task.requires_grad_(False)
    with pytest.raises(TaskError, match="without a graph"):
        trainer().fit(task, make_loader())


# --- the data ---------------------------------------------------------------------------------------------------------
class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(TensorDataset(torch.zeros(0, 3), torch.zeros(0, 1)), 4),
        make_loader(3, batch_size=4, drop_last=True),
        [],
        (),
    ],
    ids=["no samples", "drop_last", "list", "tuple"],
)
def test_an_empty_loader(refused, loader):
    assert "The training loader is empty: it yields no batch" in refused(DataError, Tiny(), loader)


@pytest.mark.parametrize("stage", ["validate", "test", "predict", "fit"])
def test_an_empty_evaluation_loader_is_skipped(trainer, caplog, stage):
    class All(Validated):
        test_step = Validated.validation_step

        def predict_step(self, batch, batch_idx):
            return batch[1]

    empty = DataLoader(TensorDataset(torch.zeros(0, 3), torch.zeros(0, 1)), 4)
    loaders = (make_loader(), empty) if stage == "fit" else ([make_loader(), empty],)
    getattr(trainer(), stage)(All(), *loaders)
    messages = [
        record.getMessage() for record in caplog.records if "is empty: it yields no batch" in record.getMessage()
    ]
    assert len(messages) == 1
    assert "It is skipped." in messages[0]


def test_a_stream_without_anything(refused):
    assert "yielded no batches in epoch 0" in refused(DataError, Tiny(), DataLoader(Nothing(), 4))


def test_a_limit_that_leaves_nothing(refused):
    message = refused(DataError, Tiny(), limit_train_batches=0.1)
    assert "There is too little training data for a step: 5 batches with limit_train_batches=0.1" in message


def test_a_limit_of_zero_trains_nothing(trainer):
    made = trainer(limit_train_batches=0)
    made.fit(Tiny(), make_loader())
    assert made.global_step == 0


def test_too_few_samples_for_every_replica_with_drop_last(refused):
    message = refused(DataError, Tiny(), make_loader(18, drop_last=True), replicas=8)
    assert "8 replicas" in message
    assert "every replica needs a full batch" in message


@pytest.mark.parametrize("loader", [3, "data", object(), make_data, torch.ones(4, 3)])
def test_what_is_no_loader(refused, loader):
    message = refused(DataError, Tiny(), loader)
    assert "must be a DataLoader or another iterable of batches" in message
    assert type(loader).__name__ in message


@pytest.mark.parametrize(("loaders", "place"), [({"a": make_loader(), "b": 3}, "b"), ([make_loader(), [3]], "1.0")])
def test_several_training_loaders_of_which_one_is_none(refused, loaders, place):
    message = refused(DataError, Tiny(), loaders)
    assert f"The combined loader '{place}' must be a DataLoader or another iterable of batches, got int" in message


def test_a_dataset_in_the_place_of_a_loader(refused):
    message = refused(DataError, Tiny(), make_data())
    assert "DataLoader(dataset" in message


def test_no_data_at_all(refused):
    assert "fit needs training data" in refused(DataError, Tiny(), None)


def test_loaders_and_a_data_module(trainer):
    with pytest.raises(ConfigError, match=r"loaders and a data module\. Pass only one of them"):
        trainer().fit(Tiny(), make_loader(), datamodule=lg.DataModule())


def test_more_processes_than_replicas():
    with pytest.raises(ConfigError, match=r"more processes than replicas.*replicas=2, but 4 processes.*replicas=4"):
        Layout(replicas=2, processes=4)


def test_a_validation_that_would_never_come(refused):
    message = refused(ConfigError, Validated(), make_loader(), make_loader(), val_check_interval=6)
    assert "6 batches is more than the 5 batches in an epoch" in message


def test_a_fraction_of_an_epoch_of_unknown_length(refused):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from make_data()

    message = refused(ConfigError, Validated(), DataLoader(Stream(), 4), make_loader(), val_check_interval=0.5)
    assert "but the training loader has no length" in message


def test_validation_over_epochs_needs_a_count(refused):
    message = refused(ConfigError, Validated(), make_loader(), make_loader(), check_val_every_n_epoch=None)
    assert "val_check_interval to be a number" in message


# --- monitored metrics ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [lg.callbacks.Checkpoint, lg.callbacks.EarlyStopping])
def test_a_monitored_metric_that_is_never_logged(trainer, tmp_path, kind):
    class Logs(Validated):
        def training_step(self, batch, batch_idx):
            self.log("train_loss", 1.0)
            return super().training_step(batch, batch_idx)

    saves = kind is lg.callbacks.Checkpoint
    made = trainer(max_epochs=3, callbacks=kind(monitor="val_los"), enable_checkpointing=saves, log_every_n_steps=1)
    with pytest.raises(ConfigError) as caught:
        made.fit(Logs(), make_loader(), make_loader())
    message = str(caught.value)
    assert f"{kind.__name__} monitors 'val_los', but nothing logged it" in message
    assert "Did you mean 'val_loss'?" in message
    assert "Logged: train_loss, val_loss" in message
    assert made.global_step <= 5  # found when the first validation is over
    if saves:  # what was trained until then is kept
        assert [path.name for path in tmp_path.rglob("step-*")] == ["step-00000005"]
