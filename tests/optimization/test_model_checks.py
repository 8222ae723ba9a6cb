"""Models and calls for which torch or Python raises an unclear or late error."""

import subprocess
import sys

import pytest
import torch
from tiny import Tiny, assert_close, make_loader
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import legato as lg
from legato.base.errors import ConfigError, TaskError, did_you_mean

TWO = {"devices": 2, "max_steps": 1}


class Layers(Tiny):
    """Keeps its layers in a Python list, where torch does not see them."""

    def __init__(self):
        super().__init__()
        del self.model
        self.layers = [nn.Linear(3, 1)]


class Sparse(lg.Task):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 2, sparse=True)

    def training_step(self, batch, batch_idx):
        return self.table(batch[0].abs().long().clamp(max=9)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scaled(Tiny):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def loss(self, batch):
        return self.scale * super().loss(batch)


class Spectral(Tiny):
    def __init__(self):
        super().__init__()
        self.model[0] = spectral_norm(self.model[0])


class CallsBackward(Tiny):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.backward()
        return loss


def test_a_class_where_an_object_is_needed_is_named(trainer):
    with pytest.raises(TaskError, match=r"got the class Tiny: write Tiny\(\)"):
        trainer().fit(Tiny, make_loader())
    with pytest.raises(ConfigError, match=r"got the class EarlyStopping: write EarlyStopping\(\)"):
        trainer(callbacks=[lg.callbacks.EarlyStopping])
    with pytest.raises(ConfigError, match=r"got the class CSVLogger: write CSVLogger\(\)"):
        trainer(logger=[lg.loggers.CSVLogger])


def test_layers_in_a_list_are_named_where_the_task_has_no_parameters(trainer):
    with pytest.raises(TaskError, match=r"Layers has no parameters.* nn\.ModuleList or nn\.ModuleDict"):
        trainer().fit(Layers(), make_loader())


def test_a_second_backward_is_explained(trainer):
    with pytest.raises(TaskError, match=r"CallsBackward\.training_step also calls it, just return the loss") as caught:
        trainer().fit(CallsBackward(), make_loader())
    assert "backward through the graph a second time" in str(caught.value.__cause__)


def test_names_of_others_are_answered(trainer):
    with pytest.raises(AttributeError, match=r"its name here is legato\.Task$"):
        _ = lg.LightningModule
    with pytest.raises(ConfigError, match="Did you mean '16-mixed'"):
        trainer(precision="fp16")
    with pytest.raises(ConfigError, match=r"outputs are gathered on the first of trainer\.devices"):
        trainer(strategy={"name": "data_parallel", "output_device": 0})
    with pytest.raises(ConfigError, match="scattered along their first dimension"):
        trainer(strategy={"name": "data_parallel", "dim": 1})
    with pytest.raises(ConfigError, match=r"Call torch\.distributed\.init_process_group before fit"):
        trainer(strategy={"name": "ddp", "process_group": None})


def test_a_script_is_no_config(tmp_path):
    script = tmp_path / "sensors.py"
    script.write_text("print('hello')\n")
    command = [sys.executable, "-m", "legato", "fit", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2
    assert "sensors.py is a Python script, not a YAML config. Run it with `python sensors.py`" in ended.stderr


@pytest.mark.parametrize(("word", "names", "nearest"), [("dropout", ["root"], ""), ("dpp", ["ddp"], "ddp")])
def test_a_suggestion_is_near(word, names, nearest):
    assert did_you_mean(word, names) == (f" Did you mean {nearest!r}?" if nearest else "")


@pytest.mark.parametrize("layout", [{}, {"strategy": "ddp", "devices": 2}], ids=["single", "ddp"])
@pytest.mark.parametrize("options", [{"reproducible": "bitwise"}, {"gradient_clip_val": 1.0}], ids=str)
def test_sparse_gradients_are_refused_alike_on_any_number_of_processes(trainer, layout, options):
    with pytest.raises(ConfigError, match=r"cannot be used with the sparse gradients of table\. Create the layer with"):
        trainer(**layout, **options).fit(Sparse(), make_loader())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "strategy", "message"),
    [
        (Sparse, "fsdp", "strategy=fsdp cannot be used with the sparse gradients of table"),
        (Scaled, "fsdp", "shards parameters along their first dimension, but scale has no dimension"),
        (Spectral, "ddp", r"Spectral\.model\.0 is parametrized \(by spectral_norm"),
    ],
)
def test_modules_that_a_layout_cannot_take_are_named(trainer, task, strategy, message):
    with pytest.raises((TaskError, ConfigError), match=message):
        trainer(strategy=strategy, **TWO).fit(task(), make_loader())


@pytest.mark.slow
def test_what_one_process_or_replicated_weights_can_take_is_trained(trainer):
    trainer(max_steps=1).fit(Spectral(), make_loader())
    trainer(max_steps=1).fit(Sparse(), make_loader())
    trainer(strategy="ddp", **TWO).fit(Sparse(), make_loader())
    trainer(strategy="ddp", **TWO).fit(Scaled(), make_loader())


def test_a_misspelt_argument_of_fit_is_suggested(trainer):
    with pytest.raises(TypeError, match="Did you mean 'train_dataloaders'"):
        trainer().fit(Tiny(), train_loader=make_loader())


def test_too_many_processes_for_the_replicas_are_refused_before_they_start(trainer, capfd):
    with pytest.raises(ConfigError, match="more processes than replicas"):
        trainer(strategy="ddp", devices=4, replicas=2).fit(Tiny(), make_loader())
    assert "processes on 1 node" not in capfd.readouterr().err


class Table(Tiny):
    """An embedding with sparse gradients beside the dense layers; by a function no module tells of it."""

    def __init__(self, by_function=False):
        super().__init__()
        self.table, self.by_function = nn.Embedding(8, 1, sparse=True), by_function
        self.table.weight.data = torch.linspace(-1, 1, 8).unsqueeze(1)
        if by_function:
            self.rows = self.table.weight
            del self.table

    def loss(self, batch):
        rows = (batch[0][:, 0].abs() * 3).long().clamp(max=7)
        looked_up = nn.functional.embedding(rows, self.rows, sparse=True) if self.by_function else self.table(rows)
        return nn.functional.mse_loss(self(batch[0]) + looked_up, batch[1])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_sparse_gradients_on_two_processes_of_which_one_has_no_last_batch(trainer, strategy):
    alone, two = Table(), Table()
    trainer(replicas=2).fit(alone, make_loader(18))  # five batches
    trainer(devices=2, strategy=strategy).fit(two, make_loader(18))
    assert_close(alone, two)


@pytest.mark.parametrize("options", [{}, {"replicas": 2}, {"nan": "skip"}], ids=str)
def test_a_sparse_gradient_that_no_embedding_tells_of_is_refused_on_one_process_too(trainer, options):
    task = Table(by_function=True)
    before = task.rows.detach().clone()
    with pytest.raises(TaskError, match=r"Table\.rows has a sparse gradient but is not in an Embedding\(sparse=True\)"):
        trainer(**options).fit(task, make_loader())
    assert torch.equal(task.rows.detach(), before)


@pytest.mark.slow
def test_a_sparse_gradient_that_no_embedding_tells_of_is_named_under_ddp(refused):
    message = refused(TaskError, Table(by_function=True), devices=2, strategy="ddp")
    assert message.startswith("A parameter has a sparse gradient but is not in an Embedding(sparse=True)")
