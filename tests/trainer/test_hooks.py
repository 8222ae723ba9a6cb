"""Hooks fire in the order drawn in callbacks/callback.py, and only if they are overridden."""

import re
from dataclasses import dataclass, field

import pytest
import torch
from recorder import LateRecorder, Recorder, RecordingTask, make_recorder
from tiny import Tiny, Validated, make_loader

import legato as lg
from legato.base.errors import TaskError
from legato.callbacks import callback as drawing_module
from legato.tasks.data_hooks import DataHooks
from legato.trainer.hooks import CALLBACK_HOOKS, TASK_HOOKS

TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


# --- the drawing ------------------------------------------------------------------------------------------------------
@dataclass
class Block:
    """A part of the drawing: hooks (name, who has it) and blocks within, in order."""

    title: str
    items: list = field(default_factory=list)


def read_drawing():
    """Parse the drawing in the docstring of callbacks/callback.py."""
    root = Block("run")
    open_blocks = [root]
    for line in drawing_module.__doc__.splitlines():
        match = re.fullmatch(r"    ((?:\|   )*)(\+-- )?(?:    )?(.+)", line)
        if match is None:
            continue
        bars, opens, text = match.groups()
        depth = bars.count("|") + 1
        del open_blocks[depth:]
        if opens:
            block = Block(text)
            open_blocks[-1].items.append(block)
            open_blocks.append(block)
            continue
        hook = re.fullmatch(r"(\w+) +(C?) ?(T?)(?: {2,}.*)?", text)
        aside = re.fullmatch(r"\((\w+), as (?:above|below)\)", text)
        if hook and (hook[2] or hook[3]):
            open_blocks[-1].items.append((hook[1], hook[2] + hook[3]))
        else:
            assert aside, f"cannot read the line {line!r} of the drawing"
            open_blocks[-1].items.append(Block(aside[1]))
    return root


def hooks_in(block):
    for item in block.items:
        if isinstance(item, Block):
            yield from hooks_in(item)
        else:
            yield item


def block_named(block, title):
    """Return the first block that is drawn under this title."""
    for item in block.items:
        if isinstance(item, Block) and item.items:
            inner = item if item.title.startswith(title) else block_named(item, title)
            if inner:
                return inner
    return None


def for_stage(name, word):
    return name.replace("validation", word)


def test_every_hook_in_the_drawing_exists_and_every_hook_that_exists_is_drawn():
    drawn = list(hooks_in(read_drawing()))
    of_callbacks = {name for name, who in drawn if "C" in who}
    of_tasks = {name for name, who in drawn if "T" in who}
    stages = ("test", "predict")
    assert of_callbacks | {for_stage(name, word) for name in of_callbacks for word in stages} == set(CALLBACK_HOOKS)
    hooks = {name for name in of_tasks if name in TASK_HOOKS}
    assert hooks | {for_stage(name, word) for name in hooks for word in stages} == set(TASK_HOOKS)
    methods = of_tasks - hooks
    assert all(hasattr(lg.Task, name) for name in methods)
    loaders = {"train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"}
    assert {name for name in vars(DataHooks) if not name.startswith("_")} <= methods | loaders
    assert {"training_step", "validation_step", "backward", "optimizer_step", "lr_scheduler_step"} <= methods


def test_tasks_and_callbacks_agree_on_the_hooks_they_share():
    only_callbacks = {"on_sanity_check_start", "on_sanity_check_end"}
    assert set(TASK_HOOKS) == set(CALLBACK_HOOKS) - only_callbacks


# --- a run that records -----------------------------------------------------------------------------------------------
def play(block, counts, title=None):
    """Return the calls that the drawing promises; `counts`: how often each kind of block runs."""
    calls = []
    for item in block.items:
        if not isinstance(item, Block):
            calls += [(item[0], who) for who in item[1]]
        elif item.title == "validation":
            calls.append("SANITY")
        elif item.title == "transfer":
            calls += [(name, "T") for name in TRANSFER]
        elif item.title.startswith("validation, when it is due"):
            calls.append("VALIDATION")
        else:
            for turn in range(counts[item.title]):
                inner = play(item, counts)
                if item.title.startswith("for each batch of a local replica") and turn + 1 == counts[item.title]:
                    inner = [call for call in inner if call[0] != "on_train_batch_end"]
                if item.title == "for each optimizer step" and turn + 1 < counts[item.title]:
                    by_epochs = max(place for place, call in enumerate(inner) if call[0] == "lr_scheduler_step")
                    del inner[by_epochs]
                if turn and item.title.startswith("for each batch of a local replica"):  # cleared once a step
                    inner = [call for call in inner if "zero_grad" not in call[0]]
                calls += inner
    return calls


def promised_validation(batches, word="validation"):
    block = block_named(read_drawing(), "validation, when it is due")
    calls = play(block, {"for each batch": batches})
    return [(for_stage(name, word), who) for name, who in calls]


def promised_fit(epochs, steps, accumulate, batches, sanity):
    counts = {
        "for each epoch": epochs,
        "for each optimizer step": steps,
        "for each batch of a local replica": accumulate,
    }
    calls = play(read_drawing(), counts)
    out, steps_seen = [], 0
    for call in calls:
        if call == "SANITY":
            out += promised_validation(sanity)
        elif call == "VALIDATION":
            steps_seen += 1
            if steps_seen % steps == 0:
                out += promised_validation(batches)
        elif call[0] not in ("on_load_checkpoint", "on_save_checkpoint", "on_processes_changed", "on_exception"):
            out.append(call)
    return out


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_fit_is_as_drawn(trainer, accumulate):
    record = []
    task = RecordingTask(record)
    loaders = make_loader(8 * accumulate), make_loader(12)
    kinds = {"train_dataloader": loaders[0], "val_dataloader": loaders[1]}
    for name, loader in kinds.items():
        setattr(task, name, lambda name=name, loader=loader: record.append((name, "T")) or loader)
    made = trainer(
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        callbacks=make_recorder(Recorder, record),
        num_sanity_val_steps=1,
    )
    made.fit(task)
    promised = promised_fit(epochs=2, steps=2, accumulate=accumulate, batches=3, sanity=1)
    assert record == promised


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_is_as_drawn(trainer, stage):
    word = {"validate": "validation"}.get(stage, stage)
    record = []
    task = RecordingTask(record)
    made = trainer(callbacks=make_recorder(Recorder, record))
    getattr(made, stage)(task, make_loader(12))
    before = [("prepare_data", "T"), ("setup", "C"), ("setup", "T"), ("configure_model", "T")]
    assert record == [*before, *promised_validation(3, word), ("teardown", "C"), ("teardown", "T")]


def test_callbacks_that_come_last_see_what_the_others_did(trainer):
    record = []
    early, late = make_recorder(Recorder, []), make_recorder(LateRecorder, [])
    for name, callback in (("early", early), ("late", late)):
        callback.record = type(
            "Log", (list,), {"append": lambda self, call, name=name: record.append((call[0], name))}
        )()
    task = RecordingTask(type("Log", (list,), {"append": lambda self, call: record.append((call[0], "task"))})())
    trainer(callbacks=[late, early]).fit(task, make_loader(8), make_loader(8))
    shared = set(CALLBACK_HOOKS) & set(TASK_HOOKS) & {name for name, _ in record}
    for name in shared - {"setup", "teardown"}:  # there the data module has its place
        assert [who for hook, who in record if hook == name][:3] == ["early", "task", "late"], name
    names = [call for call in record if call[0] in ("on_train_epoch_end", "lr_scheduler_step")]
    assert names[-4:] == [
        ("lr_scheduler_step", "task"),
        ("on_train_epoch_end", "early"),
        ("on_train_epoch_end", "task"),
        ("on_train_epoch_end", "late"),
    ]


def test_saving_and_resuming_fire_their_hooks(trainer, tmp_path):
    record = []
    task = RecordingTask(record)
    trainer(callbacks=[lg.callbacks.Checkpoint(), make_recorder(Recorder, record)], enable_checkpointing=True).fit(
        task, make_loader(8)
    )
    names = [call for call in record if call[0] == "on_save_checkpoint"]
    assert names == [("on_save_checkpoint", "C"), ("on_save_checkpoint", "T")]
    record.clear()
    resumed = trainer(
        max_epochs=2, callbacks=[lg.callbacks.Checkpoint(), make_recorder(Recorder, record)], enable_checkpointing=True
    )
    resumed.fit(task, make_loader(8), resume="auto")
    names = [name for name, _ in record]
    drawn = [name for name, _ in hooks_in(read_drawing())]
    seen = ["configure_model", "on_load_checkpoint", "configure_optimizers", "on_fit_start", "on_train_start"]
    assert sorted(seen, key=names.index) == sorted(seen, key=drawn.index) == seen
    assert "on_sanity_check_start" not in names


def test_what_hooks_add_to_a_checkpoint_comes_back(trainer):
    class Keeps(Tiny):
        restored = None

        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = {"numbers": torch.arange(3), "word": "yes"}

        def on_load_checkpoint(self, checkpoint):
            self.restored = checkpoint["mine"]

    options = {"callbacks": lg.callbacks.Checkpoint(), "enable_checkpointing": True}
    trainer(**options).fit(Keeps(), make_loader(8))
    task = Keeps()
    trainer(max_epochs=2, **options).fit(task, make_loader(8), resume="auto")
    assert task.restored["word"] == "yes"
    assert task.restored["numbers"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_an_exception_reaches_everyone_and_everything_is_torn_down(trainer, stage):
    calls = []

    class Fails(Validated):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError("now")

        validation_step = training_step

        def on_exception(self, exception):
            calls.append(("task", str(exception)))

        def teardown(self, stage):
            calls.append(("task teardown", stage))

    class Watches(lg.Callback):
        def on_exception(self, trainer, task, exception):
            calls.append(("callback", str(exception)))

        def teardown(self, trainer, task, stage):
            calls.append(("callback teardown", stage))

    class Data(lg.DataModule):
        def train_dataloader(self):
            return make_loader()

        val_dataloader = train_dataloader

        def on_exception(self, exception):
            calls.append(("data", str(exception)))

        def teardown(self, stage):
            calls.append(("data teardown", stage))

    made = trainer(callbacks=Watches(), num_sanity_val_steps=0)
    with pytest.raises(ZeroDivisionError):
        getattr(made, stage)(Fails(), datamodule=Data())
    exceptions = [("callback", "now"), ("task", "now"), ("data", "now")]
    assert calls == [*exceptions, ("data teardown", stage), ("callback teardown", stage), ("task teardown", stage)]
    assert not made.running


# --- arguments --------------------------------------------------------------------------------------------------------
class OldEpochEnd(lg.Task):
    def training_step(self, batch):
        return None

    def on_train_epoch_end(self, outputs):
        """As in Lightning 1."""


class OldBefore(lg.Callback):
    def on_before_optimizer_step(self, trainer, task, optimizer, optimizer_idx):
        """As in Lightning 1."""


class Lenient(lg.Callback):
    def on_train_batch_end(self, *arguments):
        """Takes whatever comes."""

    def on_validation_batch_start(self, trainer, task, batch, batch_idx):
        """Without the loader's number, which a caller may leave out."""


def test_hooks_that_cannot_be_called_are_refused_before_the_run(refused):
    message = refused(TaskError, OldEpochEnd())
    assert message.startswith("OldEpochEnd.on_train_epoch_end(outputs) must accept the arguments ().\n")
    message = refused(TaskError, Tiny(), callbacks=[OldBefore()])
    assert "must accept the arguments (trainer, task, optimizer).\n" in message


def test_hooks_with_looser_arguments_are_not(trainer):
    trainer(callbacks=[Lenient()], max_epochs=1).fit(Validated(), make_loader(), make_loader())


class Forgets(Tiny):
    """Returns no loss, but in the first epochs."""

    def __init__(self, epochs=0):
        super().__init__()
        self.epochs = epochs

    def training_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))
        return self.loss(batch) if self.current_epoch < self.epochs else None


def test_a_forgotten_return_ends_the_run_after_its_first_epoch(trainer, caplog):

    class Sometimes(Tiny):
        def training_step(self, batch, batch_idx):
            return None if batch_idx else self.loss(batch)

    trainer(max_epochs=1).fit(Sometimes(), make_loader())
    assert "returned None" not in caplog.text
    made = trainer(max_epochs=3)
    with pytest.raises(TaskError, match="returned None for every batch of epoch 0, so nothing was trained"):
        made.fit(Forgets(), make_loader())
    assert made.global_step == 5
    trainer(max_epochs=2).fit(Forgets(epochs=1), make_loader())
    assert "training_step returned None for every batch of epoch 1, so nothing was trained" in caplog.text


@pytest.mark.slow
def test_a_rank_without_a_loss_does_not_end_the_run_of_another(trainer, caplog):
    """Of two batches the first has no loss on rank 0, and the second has one on rank 1."""

    class Either(Tiny):
        def training_step(self, batch, batch_idx):
            return None if self.trainer.global_rank == 0 else self.loss(batch)

    made = trainer(devices=2, strategy="ddp", max_epochs=2)
    made.fit(Either(), make_loader(8))
    assert made.global_step == 2
    with pytest.raises(TaskError, match="returned None for every batch of epoch 0"):
        trainer(devices=2, strategy="ddp").fit(Forgets(), make_loader(8))


def test_an_epoch_of_which_no_batch_was_left_blames_no_return(trainer, tmp_path, caplog):
    """A finished run that is resumed, one resumed at the end of an epoch, and one whose epoch a hook skips."""
    saved = {}

    class Saves(lg.Callback):
        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            saved["last step"] = tmp_path / "last step"
            trainer.save_checkpoint(saved["last step"])

        def on_train_end(self, trainer, task):
            saved["end"] = tmp_path / "end"
            trainer.save_checkpoint(saved["end"])

    class Leaves(Tiny):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 0 else None

    trainer(max_epochs=1, callbacks=[Saves()]).fit(Tiny(), make_loader())
    for path in saved.values():
        trainer(max_epochs=1).fit(Tiny(), make_loader(), resume=path)
        trainer(max_steps=1).fit(Tiny(), make_loader(), resume=path)
    trainer(max_epochs=1).fit(Leaves(), make_loader())
    assert "returned None" not in caplog.text
