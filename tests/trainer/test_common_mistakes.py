"""The commonest mistakes in Python, YAML and overrides: each message has the wrong and the right line."""

import pytest
import torch
from tiny import Tiny, Validated, make_data, make_loader
from torch import nn
from torch.optim.lr_scheduler import StepLR

import legato as lg
from legato.base.errors import ConfigError, LegatoError
from legato.callbacks import EarlyStopping
from legato.cli.config.check import load_config
from legato.cli.main import command_parser


def lines_of(error):
    """Return the wrong and the right line of an error's message."""
    lines = [line.strip() for line in str(error.value).splitlines()]
    wrong = [line.removesuffix("# incorrect").rstrip() for line in lines if line.endswith("  # incorrect")]
    right = [line.removesuffix("# correct").rstrip() for line in lines if line.endswith("  # correct")]
    return wrong, right


# --- Python -----------------------------------------------------------------------------------------------------------
def step(function):
    """Return a task whose training_step is `function`."""
    return type("Mine", (Tiny,), {"training_step": function})


def hook(name, function):
    """Return a task with a method."""
    return type("Mine", (Tiny,), {name: function})


def call_backward(task, batch, batch_idx):
    loss = task.loss(batch)
    loss.backward()
    return loss


def log_values(task, batch, batch_idx):
    task.log("loss", batch[0])
    return task.loss(batch)


def log_in_reverse(task, batch, batch_idx):
    loss = task.loss(batch)
    task.log(loss, "loss")
    return loss


def make_on_another_device(task, batch, batch_idx):
    return torch.cat([task.loss(batch)[None], torch.zeros(8, device="meta")]).sum()


def return_pair(task):
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    return optimizer, StepLR(optimizer, 1)


class ListOfModules(lg.Task):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(3, 1)]

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers[0](batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


IN_STEP = {
    "number": (lambda task, batch, batch_idx: task.loss(batch).item(), "return loss.item()", "return loss"),
    "detached": (lambda task, batch, batch_idx: task.loss(batch).detach(), "return loss.detach()", "return loss"),
    "losses": (lambda task, batch, batch_idx: task(batch[0]), "return losses", "return losses.mean()"),
    "key": (lambda task, batch, batch_idx: {"l": task.loss(batch)}, 'return {"losses": loss}', 'return {"loss": loss}'),
    "backward": (call_backward, "loss.backward()", "return loss"),
    "values": (log_values, 'self.log("loss", values)', 'self.log("loss", values.mean())'),
    "reversed": (log_in_reverse, 'self.log(loss, "loss")', 'self.log("loss", loss)'),
    "device": (make_on_another_device, "noise = torch.zeros(8)", "noise = torch.zeros(8, device=self.device)"),
}
ADAM = ("return torch.optim.Adam", "return torch.optim.Adam(self.parameters(), lr=1e-3)")
PAIR = ("return optimizer, scheduler", "return [optimizer], [scheduler]")
BEFORE = {
    "task class": (lambda: Tiny, "trainer.fit(Tiny)", "trainer.fit(Tiny())"),
    "module": (lambda: nn.Linear(3, 1), "class Linear(nn.Module):", "class Linear(lg.Task):"),
    "optimizer class": (hook("configure_optimizers", lambda task: torch.optim.Adam), *ADAM),
    "scheduler": (hook("configure_optimizers", return_pair), *PAIR),
    "arguments of a hook": (
        hook("on_train_batch_end", lambda self, result: None),
        "def on_train_batch_end(self, result):",
        "def on_train_batch_end(self, outputs, batch, batch_idx):",
    ),
    "name of a hook": (
        hook("on_training_epoch_end", lambda task: None),
        "def on_training_epoch_end(self, ...):",
        "def on_train_epoch_end(self, ...):",
    ),
    "list of modules": (
        ListOfModules,
        "self.layers = [nn.Linear(8, 8)]",
        "self.layers = nn.ModuleList([nn.Linear(8, 8)])",
    ),
}


@pytest.mark.parametrize("mistake", IN_STEP)
def test_a_mistake_in_a_step_ends_the_first_step(trainer, mistake):
    function, wrong, right = IN_STEP[mistake]
    run = trainer()
    with pytest.raises(LegatoError) as error:
        run.fit(step(function)(), make_loader())
    assert lines_of(error) == ([wrong], [right])
    assert run.global_step == 0


@pytest.mark.parametrize("mistake", BEFORE)
def test_a_mistake_in_a_task_ends_the_run_before_a_step(trainer, mistake):
    make, wrong, right = BEFORE[mistake]
    run, task = trainer(), make()
    with pytest.raises(LegatoError) as error:
        run.fit(task, make_loader())
    assert lines_of(error) == ([wrong], [right])
    assert run.global_step == 0
    assert not getattr(task, "seen", [])


@pytest.mark.parametrize(
    ("loaders", "wrong", "right"),
    [
        ([], "trainer.fit(task)", "trainer.fit(task, train_loader)"),
        ([make_data()], "trainer.fit(task, dataset)", "trainer.fit(task, DataLoader(dataset, batch_size=32))"),
    ],
)
def test_a_mistake_in_the_data_ends_the_run_before_a_step(trainer, loaders, wrong, right):
    task = Tiny()
    with pytest.raises(LegatoError) as error:
        trainer().fit(task, *loaders)
    assert lines_of(error) == ([wrong], [right])
    assert not task.seen


def test_a_class_for_a_callback_is_refused_by_the_trainer(trainer):
    with pytest.raises(ConfigError) as error:
        trainer(callbacks=[EarlyStopping])
    assert lines_of(error) == (["callbacks=[EarlyStopping]"], ["callbacks=[EarlyStopping()]"])


def test_a_mistake_that_an_epoch_shows_ends_the_run_after_it(trainer):
    with pytest.raises(LegatoError) as error:
        trainer().fit(step(lambda task, batch, batch_idx: None)(), make_loader())
    assert lines_of(error) == (["loss = mse_loss(outputs, targets)"], ["return mse_loss(outputs, targets)"])
    with pytest.raises(ConfigError) as error:
        trainer(callbacks=[EarlyStopping("val_los")]).fit(Validated(), make_loader(), make_loader())
    assert lines_of(error) == (['monitor="val_los"'], ['monitor="val_loss"'])


# --- YAML and command line --------------------------------------------------------------------------------------------
DIGITS = "legato.tasks.Digits"
TASK = f"task: {{_target_: {DIGITS}}}"
FILES = {
    "name of an argument": (f"{TASK}\ntrainer: {{max_epoch: 3}}", "max_epoch: 3", "max_epochs: 3"),
    "section": (f"{TASK}\nmax_epochs: 3", "max_epochs: 3", "trainer: {max_epochs: 3}"),
    "name of the target": (f"task: {{_target: {DIGITS}}}", f"_target: {DIGITS}", f"_target_: {DIGITS}"),
    "no target": (f"task: {DIGITS}", f"task: {DIGITS}", f"task: {{_target_: {DIGITS}}}"),
    "list": (
        f"{TASK}\ncallbacks: [{{_target_: legato.callbacks.Timer}}]",
        "callbacks: [{_target_: ...}]",
        "callbacks: {my_name: {_target_: ...}}",
    ),
    "capitals": (f"{TASK}\ntrainer: {{strategy: DDP}}", "strategy: DDP", "strategy: ddp"),
    "quoted number": (f"task: {{_target_: {DIGITS}, lr: '0.1'}}", "lr: '0.1'", "lr: 0.1"),
    "yes": (f"{TASK}\ntrainer: {{inference_mode: yes}}", "inference_mode: yes", "inference_mode: true"),
    "None": (f"{TASK}\ntrainer: {{max_epochs: None}}", "max_epochs: None", "max_epochs: null"),
}


@pytest.mark.parametrize("mistake", FILES)
def test_a_mistake_in_a_file(tmp_path, mistake):
    text, wrong, right = FILES[mistake]
    file = tmp_path / "mistake.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config([str(file)])
    assert lines_of(error) == ([wrong], [right])


@pytest.mark.parametrize(
    ("word", "wrong", "right"),
    [
        ("trainer.max_epoch=3", "trainer.max_epoch=3", "trainer.max_epochs=3"),
        ("trainer.max_epochs='3'", "trainer.max_epochs='3'", "trainer.max_epochs=3"),
        ("trainer.max_epochs", "--trainer.max_epochs 3", "trainer.max_epochs=3"),
    ],
)
def test_a_mistake_in_an_override(tmp_path, word, wrong, right):
    file = tmp_path / "right.yaml"
    file.write_text(TASK)
    with pytest.raises(ConfigError) as error:
        load_config([str(file), word])
    assert lines_of(error) == ([wrong], [right])


def test_an_override_with_dashes():
    with pytest.raises(ConfigError) as error:
        command_parser("fit").parse(["digits.yaml", "--trainer.max_epochs", "3"])
    assert lines_of(error) == (["--trainer.max_epochs VALUE"], ["trainer.max_epochs=VALUE"])


def test_the_value_of_a_secret_is_not_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hunter2")
    file = tmp_path / "secret.yaml"
    file.write_text(f"task: {{_target_: {DIGITS}, dropot: '${{env:API_TOKEN}}'}}")
    with pytest.raises(ConfigError, match="Did you mean 'dropout'") as error:
        load_config([str(file)])
    assert "hunter2" not in str(error.value)
