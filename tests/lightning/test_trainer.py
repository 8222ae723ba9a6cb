"""Trainer with Lightning's arguments, defaults, attributes and exceptions."""

import inspect
import json
import os
from datetime import timedelta

import lightning.pytorch as real
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.utils.data import DataLoader, IterableDataset

import legato.compat.lightning.pytorch as pl
from legato.base.errors import ConfigError, TaskError
from legato.compat.lightning.placeholders import UnsupportedError
from legato.compat.lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
SILENT = {**QUIET, "logger": False, "enable_checkpointing": False}


class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch).mean())

    def predict_step(self, batch, batch_idx):
        return self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(count=8):
    return DataLoader(torch.arange(2.0 * count).reshape(count, 2) / count, batch_size=2)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Run in the temporary folder of the test, to which Lightning writes."""
    monkeypatch.chdir(tmp_path)


def course(package, prepare=lambda trainer: None, **arguments):
    """Return the observations of a fit of 5 batches per epoch with these arguments."""
    seen = []

    class Told(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def setup(self, stage):
            seen.append(("setup", stage == self.trainer.state.fn, stage == "fit"))

        def teardown(self, stage):
            seen.append(("teardown", stage == self.trainer.state.fn, stage == "fit"))

        def training_step(self, batch, batch_idx):
            seen.append("train")
            return self.layer(batch).square().mean()

        def validation_step(self, batch, batch_idx):
            seen.append(("validate", self.trainer.sanity_checking, self.trainer.evaluating, self.trainer.global_step))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    for hook in ("on_train_start", "on_train_epoch_end", "on_train_end", "on_fit_end"):
        setattr(Told, hook, lambda self, hook=hook: seen.append(hook))
    trainer = package.Trainer(**(SILENT | {"max_epochs": 2} | arguments))
    prepare(trainer)
    trainer.fit(Told(), loader(10), loader(10))
    shown = ("max_epochs", "max_steps", "limit_train_batches", "limit_val_batches", "global_step", "current_epoch")
    return seen, [getattr(trainer, name) for name in shown]


FORMS = [
    {"limit_train_batches": 0},
    {"limit_train_batches": True},
    {"limit_train_batches": 3.0},
    {"max_epochs": None, "max_steps": 3},
    {"max_steps": 3.0},
    {"accumulate_grad_batches": 2.0},
    {"overfit_batches": 2},
    {"overfit_batches": 0.4},
    {"val_check_interval": 2.0},
    {"check_val_every_n_epoch": None},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arguments", FORMS, ids=str)
def test_forms_of_arguments_mean_what_they_mean_to_lightning(arguments):
    assert course(pl, **arguments) == course(real, **arguments)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arguments", [{"max_epochs": 0}, {"max_epochs": None, "max_steps": 0}], ids=str)
def test_a_fit_with_nothing_to_train_calls_the_hooks_around_training(arguments):
    (seen, shown), (wanted, expected) = course(pl, **arguments), course(real, **arguments)
    assert [hook for hook in seen if hook not in ("on_train_start", "on_train_end")] == wanted
    assert shown == expected


def test_a_limit_that_leaves_no_batch_is_refused():
    with pytest.raises(
        ConfigError, match=r"limit_val_batches=0\.1 of 5 batches is less than one batch\. Use 0 or at least 0\.2"
    ):
        course(pl, limit_val_batches=0.1)


def test_the_check_of_when_to_validate_cannot_be_replaced():
    def prepare(trainer):
        trainer.fit_loop.epoch_loop._should_check_val_fx = lambda data_fetcher: True

    with pytest.raises(NotImplementedError, match="val_check_interval"):
        course(pl, prepare)


# --- arguments --------------------------------------------------------------------------------------------------------
def signature_of(function):
    """Return the names, kinds and defaults of arguments."""
    return [(item.name, item.kind, item.default) for item in inspect.signature(function).parameters.values()]


def test_arguments_and_defaults_are_lightnings():
    assert signature_of(pl.Trainer.__init__) == signature_of(real.Trainer.__init__)
    for name in ("fit", "validate", "test", "predict", "init_module"):
        assert signature_of(getattr(pl.Trainer, name)) == signature_of(getattr(real.Trainer, name)), name


@pytest.mark.parametrize("name", ["DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy"])
def test_strategies_take_lightnings_arguments(name):
    ours, theirs = (signature_of(getattr(module.strategies, name).__init__) for module in (pl, real))
    assert [item[:2] for item in ours] == [item[:2] for item in theirs]


def test_modules_have_lightnings_arguments():
    for ours, theirs in (
        (pl.LightningModule, real.LightningModule),
        (pl.LightningDataModule, real.LightningDataModule),
    ):
        names = {name for name in dir(theirs) if not name.startswith("_")} - {*dir(torch.nn.Module)}
        names.remove("configure_sharded_model") if ours is pl.LightningModule else None  # an error in Lightning
        for name in names:
            assert hasattr(ours, name) or name == "example_input_array", name  # `__init__` sets it
            there = inspect.getattr_static(theirs, name)
            if callable(getattr(theirs, name)) and not isinstance(there, property):
                wanted, here = ([item[0] for item in signature_of(getattr(of, name))] for of in (theirs, ours))
                wanted = [item for item in wanted if item not in ("self", "cls")]
                assert [item for item in here if item not in ("self", "cls")][: len(wanted)] == wanted, name


@pytest.mark.parametrize(
    ("arguments", "attributes"),
    [
        ({"precision": "bf16"}, {"precision": "bf16-mixed"}),
        ({"devices": "1"}, {"num_devices": 1, "device_ids": [0]}),
        ({"devices": [0]}, {"num_devices": 1}),
        ({"max_time": {"hours": 1}}, {}),
        ({"max_time": timedelta(hours=1)}, {}),
        ({"strategy": SingleDeviceStrategy()}, {"world_size": 1}),
        ({"plugins": [pl.plugins.HalfPrecision("bf16-true")]}, {"precision": "bf16-true"}),
        ({"plugins": [pl.plugins.TorchSyncBatchNorm()]}, {"sync_batchnorm": True}),
        ({"accelerator": pl.accelerators.CPUAccelerator()}, {"num_devices": 1}),
        ({"max_epochs": -1}, {"max_epochs": -1}),
        ({"max_steps": 4}, {"max_epochs": None, "max_steps": 4}),
        ({}, {"max_epochs": None}),
        ({"limit_val_batches": 3, "gradient_clip_algorithm": "value"}, {"limit_val_batches": 3}),
        ({"barebones": True, "logger": None, "enable_checkpointing": None}, {"loggers": [], "barebones": True}),
        ({"fast_dev_run": 2}, {"max_steps": 2, "num_sanity_val_steps": 0}),
    ],
)
def test_arguments_have_their_effect(arguments, attributes):
    quiet = {} if "barebones" in arguments else SILENT
    trainer = pl.Trainer(**{**quiet, **arguments})
    assert {name: getattr(trainer, name) for name in attributes} == attributes


@pytest.mark.parametrize("word", [16, "16-mixed"])
def test_half_precision_on_the_cpu_is_the_one_that_has_kernels_there(word):
    with pytest.warns(UserWarning, match="on the CPU uses 'bf16-mixed'"):
        assert pl.Trainer(**SILENT, precision=word).precision == "bf16-mixed"
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu")
    assert pl.Trainer(**SILENT, plugins=plugin).precision == "16-mixed"


def test_callbacks_of_installed_packages_are_in_every_trainer(tmp_path, monkeypatch):
    folder = tmp_path / "wanted-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: wanted\nVersion: 1.0\n")
    names = "one = wanted_callbacks:one\nmore = wanted_callbacks:more\n"
    (folder / "entry_points.txt").write_text(f"[lightning.pytorch.callbacks_factory]\n{names}")
    lines = "import legato.compat.lightning.pytorch as pl", "one = pl.callbacks.LearningRateMonitor"
    (tmp_path / "wanted_callbacks.py").write_text("\n".join((*lines, "def more(): return [pl.callbacks.Timer()]")))
    monkeypatch.syspath_prepend(tmp_path)
    names = [type(callback).__name__ for callback in pl.Trainer(**SILENT, callbacks=pl.Callback()).callbacks]
    assert sorted(names) == ["Callback", "LearningRateMonitor", "Timer"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("ddp", {}),
        ("ddp_spawn", {}),
        ("ddp_notebook", {}),
        ("ddp_fork", {}),
        ("auto", {}),
        ("ddp_find_unused_parameters_true", {"find_unused_parameters": True}),
    ],
)
def test_words_of_strategies(word, expected):
    trainer = pl.Trainer(**SILENT, strategy=word, devices=2)
    assert isinstance(trainer.strategy, DDPStrategy)
    assert trainer.strategy.finds_unused is expected.get("find_unused_parameters", False)
    assert isinstance(pl.strategies.StrategyRegistry.get("fsdp"), FSDPStrategy)


class Own(pl.strategies.Strategy):
    """A custom strategy."""


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"strategy": "deepspeed_stage_3"}, UnsupportedError, "strategy='fsdp'"),
        ({"strategy": "dp"}, UnsupportedError, "'ddp'"),
        ({"strategy": "ddpp"}, ValueError, "Did you mean 'ddp'"),
        ({"strategy": Own()}, UnsupportedError, "custom strategy"),
        ({"strategy": 3}, ValueError, "a name or a Strategy"),
        ({"accelerator": "tpu"}, UnsupportedError, "CPU, CUDA and MPS"),
        ({"accelerator": "what"}, ValueError, "expected one of auto"),
        ({"precision": "12"}, ValueError, "precision"),
        ({"gradient_clip_val": "1"}, TypeError, "gradient_clip_val"),
        ({"gradient_clip_algorithm": "nom"}, ConfigError, "norm"),
        ({"val_check_interval": "soon"}, ConfigError, "a time"),
        ({"model_registry": "name"}, UnsupportedError, "after_save_checkpoint"),
        ({"plugins": [object()]}, UnsupportedError, "object"),
        ({"fast_dev_run": -1}, ConfigError, "fast_dev_run"),
        ({"barebones": True, "detect_anomaly": True}, ValueError, "detect_anomaly"),
        ({"max_epoch": 1}, TypeError, "max_epoch"),
    ],
)
def test_what_cannot_be_is_refused(arguments, error, message):
    quiet = {} if "barebones" in arguments else SILENT
    with pytest.raises(error, match=message):
        pl.Trainer(**{**quiet, **arguments})


# --- attributes -------------------------------------------------------------------------------------------------------
NOT_THE_SAME = {
    *("accelerator", "strategy", "precision_plugin", "state", "logger", "loggers", "callbacks", "profiler", "log_dir"),
    *("fit_loop", "validate_loop", "test_loop", "predict_loop", "checkpoint_callback", "checkpoint_callbacks"),
    *("train_dataloader", "val_dataloaders", "lightning_module", "model", "optimizers"),
}
"""Objects that are not equal between the packages."""


def attributes_of(trainer):
    """Return the public attributes with plain values."""
    results = {}
    for name in dir(real.Trainer):
        value = inspect.getattr_static(real.Trainer, name)
        if isinstance(value, property) and not name.startswith("_"):
            results[name] = getattr(trainer, name)
    return results


def both():
    """Return a trainer of each package, with its module."""
    torch.manual_seed(0)
    module = Small()
    reference = type("Other", (real.LightningModule,), {name: vars(Small)[name] for name in STEPS})()
    reference.layer = torch.nn.Linear(2, 1)
    reference.load_state_dict(module.state_dict())
    options = {**QUIET, "max_epochs": 2, "limit_train_batches": 3, "enable_checkpointing": False, "logger": False}
    return (pl.Trainer(**options), module), (real.Trainer(**options), reference)


STEPS = ("training_step", "validation_step", "predict_step", "configure_optimizers")


def compare(ours, theirs):
    """Return the differing attributes, with both values."""
    left, right = attributes_of(ours), attributes_of(theirs)
    return {name: (left[name], right[name]) for name in right if name not in NOT_THE_SAME and left[name] != right[name]}


@pytest.mark.filterwarnings("ignore")
def test_attributes_answer_before_and_after_a_run_as_lightnings_do():
    (ours, module), (reference, other_module) = both()
    assert compare(ours, reference) == {}
    assert (ours.lightning_module, ours.model, ours.train_dataloader, ours.val_dataloaders) == (None,) * 4
    assert (ours.optimizers, ours.state.fn, ours.state.stage, ours.state.finished) == ([], None, None, False)
    ours.fit(module, loader(), loader())
    reference.fit(other_module, loader(), loader())
    assert compare(ours, reference) == {}
    assert ours.lightning_module is ours.model is module
    assert ours.state.fn == TrainerFn.FITTING.value == "fit"
    assert ours.state.status.value == TrainerStatus.FINISHED.value
    assert ours.state.finished
    for name in ("max_epochs", "batch_idx", "total_batch_idx", "max_batches", "done"):
        assert getattr(ours.fit_loop, name) == getattr(reference.fit_loop, name), name
    for tracker in ("total", "current"):
        mine, theirs = (getattr(trainer.fit_loop.epoch_loop.batch_progress, tracker) for trainer in (ours, reference))
        assert (mine.ready, mine.completed) == (theirs.ready, theirs.completed)
    assert ours.fit_loop.epoch_progress.current.completed == reference.fit_loop.epoch_progress.current.completed


def test_a_second_fit_goes_on_from_the_first():
    trainer, model = pl.Trainer(**SILENT, max_epochs=1), Small()
    trainer.fit(model, loader())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, loader())
    assert (trainer.current_epoch, trainer.global_step) == (3, 12)
    trainer.fit(model, loader())
    assert trainer.global_step == 12


def test_what_hooks_read():
    seen = []

    class Reads(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert trainer.state.stage.value == "train"
            assert trainer.fit_loop.epoch_loop.batch_idx == batch_idx
            assert trainer.callback_metrics["loss"] == outputs["loss"]  # changes with every batch
            assert isinstance(trainer.logged_metrics["loss"], torch.Tensor)
            assert trainer.progress_bar_metrics["loss"] == pytest.approx(outputs["loss"].item())
            seen.append(trainer.global_step)

        def on_validation_start(self, trainer, pl_module):
            assert trainer.state.stage.value == ("sanity_check" if trainer.sanity_checking else "validate")

    pl.Trainer(**SILENT, max_epochs=1, callbacks=Reads()).fit(Small(), loader(), loader())
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize("bar", [True, False])
def test_a_batch_that_begins_reads_the_values_of_the_step_before(bar):
    seen, logged = [], []

    class Reads(Small):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            logged.append(loss.item())
            return loss

        def on_train_batch_start(self, batch, batch_idx):
            if self.trainer.global_step == 1:  # not later: the first access must not affect the second
                seen.extend([self.trainer.logged_metrics["loss"].item(), self.trainer.callback_metrics["loss"].item()])

    options = {**SILENT, "enable_progress_bar": bar}
    pl.Trainer(**options, max_steps=3).fit(Reads(), loader())
    assert seen == pytest.approx([logged[0]] * 2)


def test_a_validation_of_a_fit_can_turn_gradients_on():
    results = []

    class Physics(Small):
        def validation_step(self, batch, batch_idx):
            with torch.enable_grad():
                results.append(self.layer(batch).requires_grad)

    trainer = pl.Trainer(**SILENT, max_epochs=1, limit_val_batches=1, num_sanity_val_steps=0)
    trainer.fit(Physics(), loader(), loader())
    trainer.validate(Physics(), loader())
    assert results == [True, False]  # outside a fit, it runs in inference mode


def test_an_error_leaves_the_trainer_interrupted():
    class Fails(Small):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("broken")

    trainer = pl.Trainer(**SILENT, max_epochs=1)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Fails(), loader())
    assert trainer.interrupted
    assert trainer.state.stopped
    assert not trainer.state.finished


def test_stepping_batches_are_known_in_setup():
    class Asks(Small):
        def setup(self, stage):
            self.total = self.trainer.estimated_stepping_batches

    model = Asks()
    pl.Trainer(**SILENT, max_epochs=3, accumulate_grad_batches=3).fit(model, loader())
    assert model.total == 6


def test_predictions():
    trainer, model = pl.Trainer(**SILENT), Small()
    predictions = trainer.predict(model, loader())
    assert [tuple(item.shape) for item in predictions] == [(2, 1)] * 4
    assert trainer.predict_loop.predictions is predictions
    assert trainer.predict(model, loader(), return_predictions=False) is None


def test_where_files_go(tmp_path):
    trainer = pl.Trainer(**QUIET, max_epochs=1)
    trainer.fit(Small(), loader())
    assert os.listdir() == ["lightning_logs"]
    assert os.path.isdir("lightning_logs/version_0/checkpoints")
    assert trainer.default_root_dir == str(tmp_path)


@pytest.mark.slow
def test_a_compiled_module_is_trained():
    model = Small()
    compiled = torch.compile(model, backend="eager")
    before = model.layer.weight.detach().clone()
    trainer = pl.Trainer(**SILENT, max_epochs=1)
    trainer.fit(compiled, loader())
    assert trainer.lightning_module is model
    assert not torch.equal(before, model.layer.weight)


def test_a_stream_of_batches_whose_tensors_differ_in_length_is_trained_on():
    class Uneven(IterableDataset):
        def __iter__(self):
            return iter([(torch.ones(1, 2), torch.ones(3, 2)), (torch.ones(1, 2), torch.ones(5, 2))])

    class Sums(Small):
        def training_step(self, batch, batch_idx):
            return sum(self.layer(rows).mean() for rows in batch)

    trainer = pl.Trainer(**SILENT, max_epochs=1)
    trainer.fit(Sums(), DataLoader(Uneven(), batch_size=None))
    assert trainer.global_step == 2


def test_loaders_without_a_step_are_left_out():
    class Trains(Small):
        validation_step = None

    pl.Trainer(**SILENT, max_epochs=1).fit(Trains(), loader(), loader())


def test_a_method_named_almost_like_a_hook_is_left_alone(caplog):
    class Old(Small):
        def on_train_epoch_begin(self):
            raise AssertionError

    pl.Trainer(**SILENT, max_epochs=1).fit(Old(), loader())
    assert "on_train_epoch_begin is named like a hook" in caplog.text


@pytest.mark.slow
def test_two_processes():
    torch.manual_seed(0)
    model = Small()
    trainer = pl.Trainer(**SILENT, max_epochs=2, devices=2, strategy="ddp_spawn")
    trainer.fit(model, loader(), loader())
    assert (trainer.global_step, trainer.current_epoch, trainer.world_size) == (4, 2, 2)
    assert trainer.state.finished
    assert {"loss", "val"} <= trainer.callback_metrics.keys()


def test_a_step_that_is_not_called_may_take_anything():
    class Unfinished(Small):
        def test_step():
            pass

        def predict_step(self):
            pass

    trainer, loader = pl.Trainer(**SILENT, max_steps=1), DataLoader(torch.randn(4, 2))
    trainer.fit(Unfinished(), loader)
    with pytest.raises(TaskError, match=r"test_step\(\).* it accepts no batch"):
        trainer.test(Unfinished(), loader)


@pytest.mark.parametrize("method", ["fit", "test"])
def test_an_empty_path_is_no_checkpoint(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an empty path would be the current folder
    trainer = pl.Trainer(**SILENT, max_steps=1)
    with pytest.raises(ConfigError, match="ckpt_path='' is not a checkpoint"):
        getattr(trainer, method)(Small(), DataLoader(torch.randn(4, 2)), ckpt_path="")


class LogsOnItsRank(Small):
    """Records, after each batch, the values in callback_metrics that differ between ranks."""

    def training_step(self, batch, batch_idx):
        value = 10.0 * self.global_rank + batch_idx
        self.log("own", value)
        self.log("synced", value, sync_dist=True)
        self.log("alone", value, rank_zero_only=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        trainer = self.trainer
        names = {"own", "synced", "alone"}
        metrics = [trainer.callback_metrics, trainer.agreed_metrics]
        with open(f"seen-{trainer.global_rank}", "a") as file:
            print(json.dumps([{name: float(row[name]) for name in names & row.keys()} for row in metrics]), file=file)


@pytest.mark.slow
def test_between_logging_points_a_process_reads_its_own_values_and_decisions_those_of_all(tmp_path):
    trainer = pl.Trainer(**SILENT, max_epochs=1, devices=2, strategy="ddp_spawn", log_every_n_steps=2)
    trainer.fit(LogsOnItsRank(), loader(16))
    seen = [list(map(json.loads, (tmp_path / f"seen-{rank}").read_text().splitlines())) for rank in range(2)]
    assert seen == [
        [
            [{"own": 0, "alone": 0}, {}],
            [{"own": 1, "alone": 1}, {}],
            [{"own": 2, "alone": 2, "synced": 6}, {"own": 6, "synced": 6}],  # the mean over ranks at the second step
            [{"own": 3, "alone": 3, "synced": 6}, {"own": 6, "synced": 6}],
        ],
        [
            [{"own": 10}, {}],
            [{"own": 11}, {}],
            [{"own": 12, "synced": 6}, {"own": 6, "synced": 6}],
            [{"own": 13, "synced": 6}, {"own": 6, "synced": 6}],
        ],
    ]


class PutsItsOwn(LogsOnItsRank):
    """Sets values in callback_metrics between two logging points, one of them over a logged value."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        metrics = self.trainer.callback_metrics
        if batch_idx == 2:
            metrics.update(own=torch.tensor(7.0))
            metrics["other"] = torch.tensor(8.0)
        super().on_train_batch_end(outputs, batch, batch_idx)
        metrics = [self.trainer.callback_metrics, self.trainer.agreed_metrics]
        with open(f"other-{self.trainer.global_rank}", "a") as file:
            print(json.dumps([float(row.get("other", 0)) for row in metrics]), file=file)


@pytest.mark.slow
def test_what_a_program_puts_into_callback_metrics_counts_for_decisions(tmp_path):
    trainer = pl.Trainer(**SILENT, max_epochs=1, devices=2, strategy="ddp_spawn", log_every_n_steps=2)
    trainer.fit(PutsItsOwn(), loader(16))
    for rank in range(2):
        seen = list(map(json.loads, (tmp_path / f"seen-{rank}").read_text().splitlines()))
        owned = [[item["own"] for item in pair] for pair in seen[2:]]
        assert owned == [[2 + 10 * rank, 7], [3 + 10 * rank, 7]]
        rows = list(map(json.loads, (tmp_path / f"other-{rank}").read_text().splitlines()))
        assert rows == [[0, 0], [0, 0], [8, 8], [8, 8]]
    assert trainer.callback_metrics["other"] == 8


def test_a_value_of_rank_zero_alone_is_in_callback_metrics():
    seen = []

    class Logs(Small):
        def training_step(self, batch, batch_idx):
            self.log("alone", 1.0 * batch_idx, rank_zero_only=True)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(float(self.trainer.callback_metrics["alone"]))

    trainer = pl.Trainer(**SILENT, max_epochs=1)
    trainer.fit(Logs(), loader())
    assert seen == [0, 1, 2, 3]
    assert trainer.callback_metrics["alone"] == 3


def test_a_module_is_saved_before_a_run(tmp_path):
    start = tmp_path / "folder" / "start.ckpt"
    model, trainer = Small(), pl.Trainer(max_epochs=2, default_root_dir=tmp_path, **SILENT)
    with pytest.raises(AttributeError, match="needs a module"):
        trainer.save_checkpoint(start)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(start)
    assert torch.equal(Small.load_from_checkpoint(start).layer.weight, model.layer.weight)


def test_what_is_printed_of_hyperparameters_and_of_a_data_module():
    class Data(pl.LightningDataModule):
        def __init__(self, rate=0.5, b=1):
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self):
            return DataLoader(torch.zeros(3, 1))

        def val_dataloader(self):
            return [DataLoader(torch.zeros(2, 1)), DataLoader(torch.zeros(4, 1))]

    data = Data()
    assert str(data.hparams) == '"b":    1\n"rate": 0.5'
    assert str(data).splitlines() == [
        "{Train dataloader: size=3}",
        "{Validation dataloader: 1. size=2 ; 2. size=4}",
        "{Test dataloader: None}",
        "{Predict dataloader: None}",
    ]


class Hidden(Small):
    """Trains a parameter that is not registered, as Lightning allows."""

    def __init__(self):
        super().__init__()
        self.scales = [torch.nn.Parameter(torch.ones(2))]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch * self.scales[0], batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), *self.scales], lr=0.1)


def test_an_optimizer_of_parameters_that_are_not_the_modules_is_warned_of():
    module = Hidden()
    with pytest.warns(UserWarning, match="shapes: \\(2,\\)\\). They would not be moved"):
        pl.Trainer(max_steps=1, **SILENT).fit(module, DataLoader(torch.ones(4, 2)))
    assert not torch.equal(module.scales[0].detach(), torch.ones(2))


def test_loaders_that_were_combined_are_shown_as_they_were_given():
    from legato.compat.lightning.pytorch.utilities import CombinedLoader

    class Two(Small):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"], batch_idx)

    loaders = {"a": DataLoader(torch.randn(4, 2)), "b": DataLoader(torch.randn(2, 2))}
    trainer = pl.Trainer(**SILENT, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(Two(), CombinedLoader(loaders, "min_size"))
    assert trainer.train_dataloader["b"].dataset is loaders["b"].dataset
    assert trainer.fit_loop._combined_loader.mode == "min_size"
    assert trainer.global_step == 2


def test_a_checkpoint_that_is_not_there_is_a_file_not_found(tmp_path):
    missing = tmp_path / "none.ckpt"
    for load in (
        lambda: pl.Trainer(**SILENT).fit(Small(), DataLoader(torch.randn(4, 2)), ckpt_path=missing),
        lambda: Small.load_from_checkpoint(missing),
        lambda: pl.LightningDataModule.load_from_checkpoint(missing),
    ):
        with pytest.raises(FileNotFoundError, match="There is no checkpoint at"):
            load()


def test_a_data_module_is_loaded_with_its_state(tmp_path):
    class Counted(pl.LightningDataModule):
        made = 0

        def __init__(self, size=4):
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self):
            self.made += 1
            return DataLoader(torch.randn(self.hparams.size, 2))

        def state_dict(self):
            return {"made": self.made}

        def load_state_dict(self, state_dict):
            self.made = state_dict["made"]

    trainer = pl.Trainer(**SILENT, max_steps=1)
    trainer.fit(Small(), datamodule=Counted(6))
    trainer.save_checkpoint(tmp_path / "kept.ckpt")
    loaded = Counted.load_from_checkpoint(tmp_path / "kept.ckpt")
    assert (loaded.made, loaded.hparams.size) == (1, 6)


@pytest.mark.parametrize("batches", [2, 0])
def test_modules_keep_the_mode_that_they_came_in(caplog, batches):
    caplog.set_level("INFO")

    class Watches(Small):
        modes = ()

        def __init__(self):
            super().__init__()
            self.layer.eval()

        def on_train_start(self):
            self.modes = self.training, self.layer.training

    module = Watches()
    pl.Trainer(**SILENT, max_epochs=1, limit_train_batches=batches).fit(module, loader(), loader())
    assert module.modes == ((True, False) if batches else ())
    assert (module.training, module.layer.training) == (True, False)
    assert "evaluation mode" not in caplog.text


def test_a_weight_beside_the_loss_is_the_programs_own():
    class Returns(Small):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "weight": batch_idx if batch_idx % 2 else self.layer}

    modules = []
    for kind in (Small, Returns):
        torch.manual_seed(0)
        modules.append(kind())
        pl.Trainer(**SILENT, max_epochs=1, accumulate_grad_batches=2).fit(modules[-1], loader())
    assert torch.equal(modules[0].layer.weight, modules[1].layer.weight)
