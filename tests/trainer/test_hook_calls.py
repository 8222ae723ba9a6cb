"""The objects whose hooks are called, the hooks' arguments, and the life cycle of a data module."""

import pytest
import torch
from recorder import Recorder, RecordingTask, make_recorder
from tiny import Tiny, Validated, make_loader

import legato as lg
from legato.tasks.task_hooks import TaskHooks
from legato.trainer.hooks import CALLBACK_HOOKS, TASK_HOOKS, Hooks


# --- who is called ----------------------------------------------------------------------------------------------------
def test_hooks_that_nobody_overrides_cost_nothing(trainer):
    class One(lg.Callback):
        def on_train_start(self, trainer, task):
            pass

    made = trainer(callbacks=One())
    made.fit(Tiny(), make_loader())
    hooks = made.current_run.hooks
    always = {name for name in TASK_HOOKS if name.endswith(("_model_eval", "_model_train"))}
    assert {name for name, calls in hooks.items() if calls} == {"on_train_start"} | always
    assert set(hooks) == set(CALLBACK_HOOKS) | set(TASK_HOOKS)


def test_a_hook_may_be_set_on_an_object(trainer):
    task, calls = Tiny(), []
    task.on_train_start = lambda: calls.append("task")
    callback = lg.Callback()
    callback.on_train_start = lambda trainer, task: calls.append("callback")
    trainer(callbacks=callback).fit(task, make_loader())
    assert calls == ["callback", "task"]


def test_inherited_hooks_are_called():
    class Base(lg.Callback):
        def on_fit_end(self, trainer, task):
            pass

    class Derived(Base):
        pass

    hooks = Hooks(None, Tiny(), [Derived()])
    assert len(hooks["on_fit_end"]) == 1
    assert hooks["on_fit_start"] == ()


def test_training_hooks_get_what_their_signatures_say(trainer):
    class Checks(Validated):
        def on_train_batch_start(self, batch, batch_idx):
            assert (len(batch), batch_idx) == (2, self.global_step)

        def on_before_backward(self, loss):
            assert loss.requires_grad

        def on_before_optimizer_step(self, optimizer):
            assert all(parameter.grad is not None for parameter in self.parameters())

        def on_before_zero_grad(self, optimizer):
            assert optimizer is self.trainer.optimizers[0]

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert batch_idx + 1 == self.global_step
            assert not outputs["loss"].requires_grad

        def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx):
            assert (outputs, dataloader_idx) == (7, 0)

        def validation_step(self, batch):
            return 7

    trainer().fit(Checks(), make_loader(), make_loader())


def test_an_evaluation_hook_may_do_without_the_loader(trainer):
    class Short(Validated, lg.Task):
        batches = ()

        def on_validation_batch_start(self, batch, batch_idx):
            self.batches += (batch_idx,)

        def on_validation_batch_end(self, outputs, batch, batch_idx):
            self.batches += (batch_idx,)

    class ShortCallback(lg.Callback):
        batches = 0

        def on_validation_batch_end(self, trainer, task, outputs, batch, batch_idx):
            self.batches += 1

    task, callback = Short(), ShortCallback()
    trainer(callbacks=callback).validate(task, make_loader(8))
    assert (task.batches, callback.batches) == ((0, 0, 1, 1), 2)


def test_callbacks_of_the_task_take_the_place_of_the_same_kind(trainer):
    class Marked(lg.Callback):
        def __init__(self, mark):
            self.mark = mark

        def on_train_start(self, trainer, task):
            marks.append(self.mark)

    class Brings(Tiny):
        def configure_callbacks(self):
            return [Marked("task's")]

    class Other(Marked):
        pass

    marks = []
    made = trainer(callbacks=[Marked("trainer's"), Other("other's")])
    for _ in range(2):
        made.fit(Brings(), make_loader())
    assert marks == ["other's", "task's"] * 2


# --- data modules -----------------------------------------------------------------------------------------------------
class Data(lg.DataModule):
    """Records its calls."""

    def __init__(self, record):
        super().__init__()
        self.record = record

    def prepare_data(self):
        self.record.append(("prepare_data", self.trainer is not None))

    def setup(self, stage):
        self.record.append(("setup", stage))

    def teardown(self, stage):
        self.record.append(("teardown", stage))

    def train_dataloader(self):
        self.record.append(("train_dataloader", self.trainer.current_epoch))
        return make_loader(8)

    def val_dataloader(self):
        self.record.append(("val_dataloader", self.trainer.current_epoch))
        return make_loader(8)

    test_dataloader = predict_dataloader = val_dataloader


@pytest.mark.parametrize("position", ["keyword", "first"])
def test_the_life_of_a_data_module(trainer, position):
    record = []
    task, data, made = RecordingTask([]), Data(record), trainer()
    arguments = ((task,), {"datamodule": data}) if position == "keyword" else ((task, data), {})
    made.fit(*arguments[0], **arguments[1])
    assert record == [
        ("prepare_data", True),
        ("setup", "fit"),
        ("train_dataloader", 0),
        ("val_dataloader", 0),
        ("teardown", "fit"),
    ]
    assert made.datamodule is data
    for stage in ("validate", "test", "predict"):
        record.clear()
        getattr(made, stage)(*arguments[0], **arguments[1])
        assert [name for name, _ in record] == ["prepare_data", "setup", "val_dataloader", "teardown"]
        assert record[1] == ("setup", stage)


def test_the_data_module_comes_before_the_task(trainer):
    record = []

    class Own(RecordingTask):
        def train_dataloader(self):
            raise AssertionError("the data module has one")

    class Part(lg.DataModule):
        def prepare_data(self):
            record.append(("prepare_data", "D"))

        def setup(self, stage):
            record.append(("setup", "D"))

        def train_dataloader(self):
            return make_loader(8)

    task = Own(record)
    trainer(callbacks=make_recorder(Recorder, record)).fit(task, datamodule=Part())
    for name, who in (("prepare_data", "DT"), ("setup", "DCT")):
        assert [by for hook, by in record if hook == name] == list(who)
    assert ("val_dataloader", "T") in record  # which the data module does not have


def test_transfer_hooks_are_the_data_modules_or_else_the_tasks(trainer):
    calls = []

    def hook(name, change):
        def method(self, batch, *arguments):
            calls.append((type(self).__name__, name, arguments[-1]))
            return change(batch)

        return method

    def add(amount):
        return lambda batch: [batch[0] + amount, batch[1]]

    class Moved(Tiny):
        on_before_batch_transfer = hook("before", add(1))
        transfer_batch_to_device = hook("move", add(10))

    class Part(lg.DataModule):
        transfer_batch_to_device = hook("move", add(100))
        on_after_batch_transfer = hook("after", add(1000))

        def train_dataloader(self):
            return make_loader(4)

    task = Moved()
    trainer().fit(task, datamodule=Part())
    assert calls == [("Moved", "before", 0), ("Part", "move", 0), ("Part", "after", 0)]
    assert torch.equal(task.seen[0], next(iter(make_loader(4)))[0] + 1 + 100 + 1000)


def test_transfer_hooks_know_the_loader(trainer):
    seen = []

    class Moved(Validated):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            seen.append(dataloader_idx)
            return batch

    trainer().validate(Moved(), [make_loader(8), make_loader(4)])
    assert seen == [0, 0, 1]


def test_every_task_hook_is_documented_where_it_stands():
    for name in TASK_HOOKS:
        assert getattr(TaskHooks, name).__doc__, name
    for name in CALLBACK_HOOKS:
        assert getattr(lg.Callback, name).__doc__, name
