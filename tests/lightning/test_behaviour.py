"""Observations of a run, compared with Lightning: points of evaluations, names logged twice, hyperparameters."""

import os
import signal
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as real
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

import legato as lg
import legato.compat.lightning.pytorch as room
from legato.base.errors import CheckpointError, ConfigError, DataError
from legato.compat.lightning.convert import convert_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's warnings

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def loader(count=8, batch_size=2):
    return DataLoader(torch.arange(2.0 * count).reshape(count, 2) / count, batch_size=batch_size)


def memory(package):
    """Return a logger that stores its points."""

    class Memory(package.loggers.Logger):
        def __init__(self):
            super().__init__()
            self.points, self.hparams = [], []

        name, version, save_dir = "memory", 0, None

        def log_hyperparams(self, params, *args, **kwargs):
            self.hparams.append(dict(params))

        def log_metrics(self, metrics, step=None):
            self.points.append((step, {name: round(float(value), 4) for name, value in sorted(metrics.items())}))

    return Memory()


def small(package, **methods):
    """Return a module of a package with additional methods."""

    class Small(package.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return type("Small", (Small,), methods)()


def fitted(package, module, validation=None, **options):
    """Train, and return the trainer and the points of its logger."""
    logger = memory(package)
    defaults = {"logger": logger, "enable_checkpointing": False, "max_epochs": 2, "log_every_n_steps": 1}
    trainer = package.Trainer(**{**QUIET, **defaults, **options})
    trainer.fit(module, loader(), validation)
    return trainer, logger


def numbers(metrics):
    return {name: round(float(value), 4) for name, value in metrics.items()}


# --- values of steps --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("loaders", [1, 2])
@pytest.mark.parametrize("options", [{"on_step": True, "on_epoch": True}, {"on_step": True}, {}], ids=str)
def test_an_evaluation_writes_a_point_for_each_batch_that_logs_on_step(options, loaders):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", self.layer(batch).mean(), prog_bar=True, **options)

    methods = {"validation_step": validation_step, "test_step": validation_step}
    seen = []
    for package in (real, room):
        passed = [loader(6), loader(4)][:loaders]
        module = small(package, **methods)
        trainer, logger = fitted(package, module, passed if loaders > 1 else passed[0])
        after_fit = (
            numbers(trainer.callback_metrics),
            set(trainer.logged_metrics),
            numbers(trainer.progress_bar_metrics),
        )
        trainer.test(module, passed, verbose=False)
        trainer.validate(module, passed, verbose=False)
        seen.append((logger.points, after_fit, numbers(trainer.callback_metrics)))
    assert seen[0] == seen[1]
    assert len(seen[0][0]) > 2


def test_a_name_may_be_logged_in_steps_and_when_an_epoch_ends():
    def training_step(self, batch, batch_idx):
        self.log("both", float(batch_idx))
        self.log("mean", float(batch_idx), on_epoch=True)
        return self.layer(batch).pow(2).mean()

    def on_train_epoch_start(self):
        self.log("mean", 9.0)

    def on_train_epoch_end(self):
        self.log("both", 7.0)

    def validation_step(self, batch, batch_idx):
        self.log("val", float(batch_idx))

    def on_validation_epoch_end(self):
        self.log("val", 5.0)

    methods = {key: value for key, value in locals().items() if callable(value)}
    seen = []
    for package in (real, room):
        module = small(package, **methods)
        trainer, logger = fitted(package, module, loader(4))
        seen.append(
            (logger.points, numbers(trainer.callback_metrics), trainer.validate(module, loader(4), verbose=False))
        )
    assert seen[0] == seen[1]
    assert seen[0][1]["val"] == 5.0


def test_an_argument_of_a_step_keeps_its_default():
    seen = []

    def validation_step(self, batch, batch_idx, scale=3.0):
        seen.append(scale)

    for package in (real, room):
        fitted(package, small(package, validation_step=validation_step), loader(2), max_epochs=1)
    assert set(seen) == {3.0}


# --- validation by time -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("interval", ["00:00:00:30", {"seconds": 30}, timedelta(seconds=30)])
def test_validation_comes_by_time(interval, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def training_step(self, batch, batch_idx):
        clock[0] += 12.0
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.validated = [*getattr(self, "validated", []), self.global_step]

    results = []
    for package in (real, room):
        clock[0], module = 0.0, small(package, training_step=training_step, validation_step=validation_step)
        options = {"val_check_interval": interval, "num_sanity_val_steps": 0, "max_epochs": 3}
        trainer, _ = fitted(package, module, loader(2), **options)
        results.append((module.validated, trainer.val_check_batch))
    assert results[0] == results[1] == ([3, 6, 9, 12], None)


def test_a_time_that_is_none_is_refused():
    for package in (real, room):
        with pytest.raises((ConfigError, package.utilities.exceptions.MisconfigurationException, ValueError)):
            package.Trainer(val_check_interval="soon", **QUIET)


# --- hyperparameters --------------------------------------------------------------------------------------------------
def with_hyperparameters(package):
    class Module(type(small(package))):
        def __init__(self, width=2, logger=True, change=False):
            super().__init__()
            self.save_hyperparameters("width", logger=logger)
            if change:
                self.hparams.width = 7

    class Data(package.LightningDataModule):
        def __init__(self, width=2, depth=1, logger=True):
            super().__init__()
            self.save_hyperparameters("width", "depth", logger=logger)

        def train_dataloader(self):
            return loader()

    return Module, Data


@pytest.mark.parametrize(
    ("module", "data"),
    [
        ({}, {}),
        ({"width": 3}, {"logger": False}),
        ({"logger": False}, {"depth": 4}),
        ({"change": True}, {"logger": False}),
        ({"logger": False}, {"logger": False}),
    ],
)
def test_loggers_are_given_the_hyperparameters_as_they_were_saved(module, data):
    seen = []
    for package in (real, room):
        kinds, logger = with_hyperparameters(package), memory(package)
        trainer = package.Trainer(**QUIET, logger=logger, max_epochs=1, enable_checkpointing=False)
        trainer.fit(kinds[0](**module), datamodule=kinds[1](**data))
        seen.append(logger.hparams)
    assert seen[0] == seen[1]


def test_module_and_data_module_may_not_differ_in_a_hyperparameter():
    for package in (real, room):
        module, data = with_hyperparameters(package)
        trainer = package.Trainer(**QUIET, logger=memory(package), max_epochs=1, enable_checkpointing=False)
        with pytest.raises(RuntimeError, match="'width'"):
            trainer.fit(module(width=5), datamodule=data())


def test_hyperparameters_that_were_not_saved_are_not_logged():
    for package in (real, room):
        module = small(package)
        module.hparams.update(a=1)
        assert fitted(package, module)[1].hparams == []


# --- stochastic weight averaging --------------------------------------------------------------------------------------
def test_the_averaging_function_of_a_subclass_counts():
    class Newest(room.callbacks.StochasticWeightAveraging):
        @staticmethod
        def avg_fn(averages, weights, count):
            return weights

    module, callback = small(room), Newest(swa_lrs=0.1, swa_epoch_start=1)
    trainer = room.Trainer(**QUIET, logger=False, max_epochs=3, enable_checkpointing=False, callbacks=[callback])
    trainer.fit(module, loader())
    assert (callback.updates, callback.swa_start) == (3, 0)


# --- checkpoints of the core ------------------------------------------------------------------------------------------
class Falling:
    """A rate that decreases with each epoch, and a checkpoint at the end of the second epoch's validation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.rates = nn.Linear(2, 1), []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch).mean())

    def on_validation_end(self):
        if self.current_epoch == 1 and not self.trainer.sanity_checking:
            self.trainer.save_checkpoint("here")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@pytest.mark.parametrize("order", ["core, room", "room, room", "core, core"])
def test_an_epochs_schedulers_step_once_whoever_goes_on(order, tmp_path):
    kinds = {
        "core": (type("OfCore", (Falling, lg.Task), {}), lg.Trainer),
        "room": (type("OfRoom", (Falling, room.LightningModule), {}), room.Trainer),
    }
    first, second = (kinds[name] for name in order.split(", "))
    options = {**QUIET, "logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    first[1](**options, max_epochs=2).fit(first[0](), loader(), loader(2))
    start = Path("here")
    if start.is_dir() and second is kinds["room"]:  # it reads files
        with pytest.raises(CheckpointError, match="legato convert here"):
            second[1](**options).fit(second[0](), loader(), ckpt_path=start)
        start = start.with_suffix(".ckpt")
        convert_checkpoint(Path("here"), start)
    resumed = second[0]()
    second[1](**options, max_epochs=4).fit(resumed, loader(), loader(2), ckpt_path=start)
    assert resumed.rates == [0.25] * 4 + [0.125] * 4


# --- what fit leaves alone --------------------------------------------------------------------------------------------
def test_fit_keeps_a_module_in_the_mode_that_it_is_in():
    def training_step(self, batch, batch_idx):
        self.modes = {*getattr(self, "modes", ()), self.training, self.layer.training}
        return self.layer(batch).pow(2).mean()

    for package in (real, room):
        for training in (True, False):
            module = small(package, training_step=training_step).train(training)
            fitted(package, module, max_epochs=1)
            assert module.modes == {training}


def test_without_loggers_nothing_is_written_but_checkpoints(tmp_path):
    for package in (real, room):
        folder = tmp_path / package.__name__.partition(".")[0]
        callback = package.callbacks.ModelCheckpoint(dirpath=folder / "kept")
        options = {"logger": False, "enable_checkpointing": True, "default_root_dir": folder, "callbacks": [callback]}
        fitted(package, small(package), **options)
        assert [item.name for item in folder.iterdir()] == ["kept"]
        assert not (tmp_path / "lightning_logs").exists()


class Marked:
    """A mixin of a callback."""

    def __init__(self):
        super().__init__()
        self.mark = "set"


def test_callbacks_begin_what_is_mixed_into_them():
    for package in (real, room):
        for name, arguments in (("EarlyStopping", {"monitor": "val"}), ("ModelCheckpoint", {})):
            kind = type("Mixed", (getattr(package.callbacks, name), Marked), {})
            assert kind(**arguments).mark == "set"


# --- mistakes that a script makes, and Lightning tells -------------------------------------------------
@pytest.mark.parametrize("package", [real, room])
def test_a_value_that_is_kept_nowhere_is_refused(package):
    def training_step(self, batch, batch_idx):
        self.log("x", 1.0, on_step=False, on_epoch=False)

    with pytest.raises(package.utilities.exceptions.MisconfigurationException, match="is not useful"):
        fitted(package, small(package, training_step=training_step))


@pytest.mark.parametrize("package", [real, room])
def test_unknown_keys_of_a_scheduler_are_warned_of(package):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "foo": 1},
            "bar": 2,
        }

    with pytest.warns(RuntimeWarning, match="unsupported keys") as warned:
        fitted(package, small(package, configure_optimizers=configure_optimizers))
    assert {"foo", "bar"} == {str(item.message).split("'")[1] for item in warned if "unsupported" in str(item.message)}
    with pytest.warns(UserWarning, match="no optimizer"):
        fitted(package, small(package, configure_optimizers=lambda self: None))


@pytest.mark.parametrize("package", [real, room])
def test_results_of_a_test_have_the_names_of_loggers(package):
    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("loss", batch.mean(), on_step=True, on_epoch=True)
        self.log("other", batch.mean())
        self.log("sum", 1.0, reduce_fx="SUM")

    trainer = package.Trainer(**QUIET, logger=False)
    suffixes = ["/dataloader_idx_0", "/dataloader_idx_1"]
    for loaders, ends in ((loader(), [""]), ([loader(), loader()], suffixes)):
        results = trainer.test(small(package, test_step=test_step), loaders, verbose=False)
        assert [sorted(item) for item in results] == [[f"loss_epoch{end}", f"other{end}", f"sum{end}"] for end in ends]


@pytest.mark.parametrize("package", [real, room])
def test_a_trainer_says_what_one_means(package, caplog):
    with caplog.at_level("INFO"):
        package.Trainer(**QUIET, limit_train_batches=1, val_check_interval=1.0, logger=False)
    assert "`Trainer(limit_train_batches=1)` was configured so 1 batch" in caplog.text
    assert "`Trainer(val_check_interval=1.0)` was configured so validation will run" in caplog.text
    assert "limit_val_batches" not in caplog.text
    with pytest.raises(package.utilities.exceptions.MisconfigurationException, match="should be an integer"):
        package.Trainer(**QUIET, val_check_interval=0.5, check_val_every_n_epoch=None, logger=False)
    assert package.Trainer(**QUIET, limit_test_batches=10.0, logger=False).limit_test_batches == 10
    state, status = package.trainer.states.TrainerState, package.trainer.states.TrainerStatus
    assert package.Trainer(**QUIET, logger=False).state == state(status=status.INITIALIZING, fn=None, stage=None)


@pytest.mark.parametrize("package", [real, room])
def test_momentum_that_no_optimizer_has_is_warned_of(package):
    def configure_optimizers(self):
        return torch.optim.ASGD(self.parameters())

    rates = package.callbacks.LearningRateMonitor(log_momentum=True)
    with pytest.warns(RuntimeWarning, match="do not have momentum"):
        fitted(package, small(package, configure_optimizers=configure_optimizers), callbacks=[rates])


@pytest.mark.parametrize("package", [real, room])
def test_a_subclass_may_have_its_example_as_a_property(package):
    module = small(package, example_input_array=property(lambda self: torch.ones(1, 2)))
    assert module.example_input_array.shape == (1, 2)
    assert small(package).example_input_array is None
    fitted(package, module, max_epochs=1)


@pytest.mark.parametrize("package", [real, room])
def test_a_module_is_traced_before_and_after_a_run(package):
    module = small(package, forward=lambda self, inputs: self.layer(inputs))
    module.submodule = small(package)
    for _ in range(2):
        traced = module.to_torchscript(method="trace", example_inputs=torch.ones(1, 2))
        assert torch.equal(traced(torch.ones(3, 2)), module(torch.ones(3, 2)))
        fitted(package, module, max_epochs=1)
    with pytest.raises(RuntimeError, match="not attached"):
        small(package).trainer  # noqa: B018


# --- learning rates, the sanity check, and how a run ends -------------------------------------------------------------
@pytest.mark.parametrize("interval", ["step", "epoch", None])
@pytest.mark.parametrize("scheduled", ["step", "epoch", None])
def test_learning_rates_are_logged_before_the_step_that_they_are_for(interval, scheduled):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if scheduled is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": scheduled}}

    seen = []
    for package in (real, room):
        rates = package.callbacks.LearningRateMonitor(interval)
        module = small(package, configure_optimizers=configure_optimizers)
        _, logger = fitted(package, module, callbacks=[rates], log_every_n_steps=2)
        points = [(step, values) for step, values in logger.points if "lr-SGD" in values]
        seen.append((points, rates.lrs))
    assert seen[0] == seen[1]
    assert seen[0][0]


def test_the_sanity_check_shows_its_values_until_it_ends():
    def validation_step(self, batch, batch_idx):
        self.log("val", float(self.trainer.sanity_checking))

    seen = []
    for package in (real, room):
        shown = []

        class Watch(package.Callback):
            def see(self, trainer, module, shown=shown):
                shown.append((numbers(trainer.logged_metrics), numbers(trainer.callback_metrics)))

            on_validation_end = on_sanity_check_end = on_train_start = see

        _, logger = fitted(package, small(package, validation_step=validation_step), loader(4), callbacks=[Watch()])
        seen.append((shown, [point for point in logger.points if "val" in point[1]]))
    assert seen[0] == seen[1]
    assert seen[0][0][:3] == [({"val": 1.0}, {"val": 1.0})] * 2 + [({}, {})]


def test_an_epoch_whose_first_hook_stops_the_run_has_no_step():
    seen = []
    for package in (real, room):
        calls = []

        class Stop(package.Callback):
            def on_train_epoch_start(self, trainer, module, calls=calls):
                trainer.should_stop = trainer.current_epoch == 1
                calls.append("start")

            def on_train_epoch_end(self, trainer, module, calls=calls):
                calls.append("end")

            def on_validation_end(self, trainer, module, calls=calls):
                calls.append("validated")

        module = small(package, validation_step=lambda self, batch, batch_idx: None)
        trainer, _ = fitted(package, module, loader(4), callbacks=[Stop()], max_epochs=5, num_sanity_val_steps=0)
        seen.append((calls, trainer.global_step, trainer.current_epoch))
    assert seen[0] == seen[1] == (["start", "validated", "end", "start", "end"], 4, 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("package", [real, room])
def test_a_module_is_scripted_before_and_after_a_run(package, tmp_path):
    class Scripted(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(2, 1)

        @property
        def shift(self) -> int:
            return 1

        def forward(self, inputs):
            return self.layer(inputs) + self.shift

        def training_step(self, batch, batch_idx):
            return self(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Scripted()
    for _ in range(2):
        scripted = module.to_torchscript(tmp_path / "scripted.pt")
        assert torch.equal(scripted(torch.ones(3, 2)), module(torch.ones(3, 2)))
        assert (tmp_path / "scripted.pt").stat().st_size
        fitted(package, module, max_epochs=1)


# --- loaders without a batch ------------------------------------------------------------------------------------------
EMPTY = DataLoader(torch.ones(0, 2), batch_size=2)
STEPS = {
    "validation_step": lambda self, batch, batch_idx, dataloader_idx=0: self.log("value", float(batch_idx)),
    "test_step": lambda self, batch, batch_idx, dataloader_idx=0: self.log("value", float(batch_idx)),
    "predict_step": lambda self, batch, batch_idx, dataloader_idx=0: batch_idx,
}
HOOKS = ("setup", "on_fit_start", "on_validation_start", "on_test_start", "on_predict_start", "on_train_start")
HOOKS += ("on_train_epoch_start", "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown")


def noting(package):
    """Return a callback with the names of the hooks that ran."""
    called = []
    hooks = {name: lambda self, *_, _name=name, **__: called.append(_name) for name in HOOKS}
    callback = type("Notes", (package.Callback,), hooks)()
    callback.called = called
    return callback


@pytest.mark.parametrize(
    ("stage", "data", "options"),
    [
        ("fit", [loader()], {"limit_train_batches": 0}),
        ("fit", [loader(), EMPTY], {}),
        ("fit", [loader(), [EMPTY, loader()]], {}),
        ("validate", [EMPTY], {}),
        ("validate", [[EMPTY, loader()]], {}),
        ("test", [EMPTY], {}),
        ("test", [[]], {}),
        ("test", [loader()], {"limit_test_batches": 0}),
        ("predict", [EMPTY], {}),
        ("predict", [[EMPTY, loader()]], {}),
    ],
)
def test_loaders_without_a_batch_are_skipped(stage, data, options):
    results = []
    for package in (real, room):
        notes, module = noting(package), small(package, **STEPS)
        trainer = package.Trainer(
            **QUIET, logger=False, enable_checkpointing=False, max_epochs=1, callbacks=[notes], **options
        )
        result = getattr(trainer, stage)(module, *data)
        values, counts = numbers(trainer.callback_metrics), trainer.num_val_batches
        results.append((result, notes.called, values, counts, trainer.current_epoch, trainer.global_step))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "data",
    [
        lambda: EMPTY,
        lambda: DataLoader(torch.ones(1, 2), batch_size=2, drop_last=True),
        lambda: (torch.ones(2, 2) for _ in range(3)),  # exhausted after an epoch
    ],
)
def test_a_training_loader_without_a_batch_is_refused(data):
    trainer = room.Trainer(**QUIET, logger=False, enable_checkpointing=False, max_epochs=3)
    with pytest.raises(DataError, match="no batch"):
        trainer.fit(small(room), data())


# --- metrics ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("on_step", [True, False])
def test_one_metric_object_for_training_and_validation(forward, on_step):
    def training_step(self, batch, batch_idx):
        (self.mean if forward else self.mean.update)(torch.tensor(float(batch_idx)))
        self.log("trained", self.mean, on_step=on_step, on_epoch=True)
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.mean.update(torch.tensor(10.0 + batch_idx))
        self.log("validated", self.mean)

    results = []
    for package in (real, room):
        module = small(package, training_step=training_step, validation_step=validation_step)
        module.mean = MeanMetric()
        trainer, _ = fitted(package, module, loader(4), num_sanity_val_steps=0)
        results.append({name: str(value) for name, value in numbers(trainer.callback_metrics).items()})
    assert results[0] == results[1]
    assert results[0]["trained"] == "nan"  # its samples were discarded with those of the validation


# --- what callbacks and loggers are given -----------------------------------------------------------------------------
def test_a_validation_within_an_epoch_ends_with_the_newest_training_values():
    def training_step(self, batch, batch_idx):
        self.log("train", 10.0 - batch_idx)
        return self.layer(batch).pow(2).mean()

    seen = []
    for package in (real, room):
        saver = package.callbacks.ModelCheckpoint(f"{package.__name__}", "{step}-{train}", "train", save_top_k=2)
        module = small(package, training_step=training_step, validation_step=lambda self, batch, batch_idx: None)
        options = {"callbacks": [saver], "enable_checkpointing": True, "log_every_n_steps": 50}
        fitted(package, module, loader(2), val_check_interval=2, max_epochs=1, **options)
        seen.append({Path(path).name: float(value) for path, value in saver.best_k_models.items()})
    assert seen[0] == seen[1] == {"step=2-train=9.0.ckpt": 9.0, "step=4-train=7.0.ckpt": 7.0}


@pytest.mark.parametrize("shown", [True, False])
def test_a_module_prints_by_the_progress_bar(shown, capsys):
    def training_step(self, batch, batch_idx):
        self.print("here", batch_idx, end="|")
        return self.layer(batch).pow(2).mean()

    for package in (real, room):
        lines = []

        class Bar(package.callbacks.TQDMProgressBar):
            def print(self, *arguments, **options):
                lines.append((arguments, options))  # noqa: B023

        bar = Bar()
        if not shown:
            bar.disable()
        module = small(package, training_step=training_step)
        fitted(package, module, callbacks=[bar], limit_train_batches=1, max_epochs=1, enable_progress_bar=True)
        assert lines == [(("here", 0), {"end": "|"})] * shown
        assert ("here 0|" in capsys.readouterr().out) is not shown


def test_averages_of_weights_begin_after_the_first_step_of_accumulated_batches():
    seen = []
    for package in (real, room):
        averaging = package.callbacks.EMAWeightAveraging(decay=0.5)
        module = small(package)
        fitted(package, module, callbacks=[averaging], accumulate_grad_batches=2)
        seen.append(numbers({name: value.sum() for name, value in module.state_dict().items()}))
    assert seen[0] == seen[1]


# --- checkpoints ------------------------------------------------------------------------------------------------------
def test_the_module_looks_at_a_checkpoint_before_callbacks_do(tmp_path):
    def on_load_checkpoint(self, checkpoint):
        checkpoint["seen"] = ["module"]

    results = []
    for package in (real, room):

        class Looks(package.Callback):
            def on_load_checkpoint(self, trainer, pl_module, checkpoint):
                results.append(checkpoint["seen"])

        saved = tmp_path / f"{package.__name__}.ckpt"
        first, _ = fitted(package, small(package, on_load_checkpoint=on_load_checkpoint))
        first.save_checkpoint(saved)
        trainer = package.Trainer(**QUIET, logger=False, enable_checkpointing=False, max_epochs=3, callbacks=[Looks()])
        trainer.fit(small(package, on_load_checkpoint=on_load_checkpoint), loader(), ckpt_path=saved)
    assert results == [["module"]] * 2


def test_a_plateau_that_a_saving_hook_went_before_is_stepped_by_a_resume(tmp_path):
    class Falling(room.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.5)
            by_steps = {"scheduler": plateau, "monitor": "loss", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": by_steps}

    batches = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))

    def run(folder, **options):
        saving = room.callbacks.ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = room.Trainer(max_epochs=2, callbacks=[saving], logger=False, **QUIET)
        module = Falling()
        trainer.fit(module, DataLoader(batches, batch_size=2), **options)
        return module.layer.weight.detach(), trainer.optimizers[0].param_groups[0]["lr"]

    full, rate = run(tmp_path / "whole")
    assert rate < 0.5
    for step in (1, 3, 4, 6):
        again, again_rate = run(tmp_path / str(step), ckpt_path=tmp_path / "whole" / f"step={step}.ckpt")
        assert again_rate == rate
        assert torch.equal(again, full)


class Stream(IterableDataset):
    """Samples of a stream without a length."""

    def __iter__(self):
        return iter(torch.randn(10, 2, generator=torch.Generator().manual_seed(1)))


def streamed(package, folder, **options):
    """Fit on a stream; return observations of its last batches and rates, and the final weights."""
    seen = []

    class Streamed(package.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.drop = nn.Linear(2, 1), nn.Dropout(0.5 if package is room else 0.0)

        def training_step(self, batch, batch_idx):
            seen.append((batch_idx, self.trainer.is_last_batch))
            return self.drop(self.layer(batch)).square().mean()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append((self.trainer.is_last_batch, self.trainer.optimizers[0].param_groups[0]["lr"]))

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    saving = package.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = package.Trainer(max_epochs=3, callbacks=[saving], logger=False, **QUIET)
    module = Streamed()
    trainer.fit(module, DataLoader(Stream(), batch_size=3), **options)
    return seen, module.layer.weight.detach(), trainer.optimizers[0].param_groups[0]["lr"], trainer.global_step


def test_the_last_batch_of_a_stream_is_known_once_it_is_done(tmp_path):
    expected, actual = (streamed(package, tmp_path / package.__name__)[0] for package in (real, room))
    assert expected[6:8] == [(3, True), (True, 0.25)]
    assert actual[6:8] == [(3, False), (False, 0.5)]


def test_a_run_on_a_stream_goes_on_from_each_of_its_steps_as_if_undisturbed(tmp_path):
    _, full, rate, steps = streamed(room, tmp_path / "whole")
    for step in (2, 3, 4, 5, 8):
        _, again, again_rate, again_steps = streamed(
            room, tmp_path / str(step), ckpt_path=tmp_path / "whole" / f"step={step}.ckpt"
        )
        assert (again_rate, again_steps) == (rate, steps)
        assert torch.equal(again, full)


def drawn(package, **options):
    """Return the random draws of setup hooks after the script has seeded the generators."""

    class Draws(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.drawn = []

        def setup(self, stage):
            self.drawn += [torch.rand(1).item(), torch.randperm(9).tolist()]
            self.layer = nn.Linear(1, 1)

        def state_dict(self, *args, **kwargs):
            assert self.drawn, "there is nothing to save before setup"
            return super().state_dict(*args, **kwargs)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    module = Draws()
    package.seed_everything(3)
    package.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, **QUIET, **options).fit(
        module, DataLoader(torch.ones(4, 1))
    )
    return module.drawn, module.layer.weight.item()


def test_hooks_of_the_set_up_draw_under_the_seed_of_the_run(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "")
    first = drawn(room)
    torch.rand(5)
    assert drawn(room) == first


@pytest.mark.slow
def test_in_workers_they_draw_the_same(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "")
    assert drawn(room, strategy="ddp_spawn", devices=2)[1] == drawn(room)[1]


def test_numbers_are_gathered_as_tensors_on_one_process():
    class Gathers(room.LightningModule):
        def test_step(self, batch, batch_idx):
            gathered = self.all_gather({"a": 1.5, "b": [2, torch.ones(2)]})
            assert (gathered["a"].sum().item(), gathered["b"][0].item(), gathered["b"][1].shape) == (1.5, 2, (2,))

    room.Trainer(logger=False, **QUIET).test(Gathers(), DataLoader(torch.ones(2, 1)), verbose=False)


def test_batch_norms_are_measured_under_manual_optimization_without_a_step():
    class Manual(room.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers, self.automatic_optimization = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)), False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            loss = self.layers(batch).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    averaging, module = room.callbacks.StochasticWeightAveraging(0.1, swa_epoch_start=1), Manual()
    trainer = room.Trainer(max_epochs=3, callbacks=[averaging], logger=False, enable_checkpointing=False, **QUIET)
    batches = torch.arange(16.0).reshape(8, 2)
    trainer.fit(module, DataLoader(batches, batch_size=4))
    assert trainer.global_step == 6
    torch.testing.assert_close(module.layers[0].running_mean, batches.mean(0))


def test_a_strategy_that_starts_processes_in_its_own_way_is_told_that_legato_does():
    class Launches(room.strategies.DDPStrategy):
        def _configure_launcher(self):
            raise AssertionError

        def setup_environment(self):
            raise AssertionError

    with pytest.warns(UserWarning, match="Legato starts the processes itself"):
        trainer = room.Trainer(strategy=Launches(), devices=2, logger=False, **QUIET)
    assert isinstance(trainer.strategy, Launches)


def test_configure_callbacks_may_return_nothing():
    class Brings(room.LightningModule):
        def configure_callbacks(self):
            self.early = room.callbacks.EarlyStopping("loss")

        def test_step(self, batch, batch_idx):
            self.log("loss", batch.mean())

    module = Brings()
    room.Trainer(logger=False, **QUIET).test(module, DataLoader(torch.ones(2, 1)), verbose=False)
    assert module.early.monitor == "loss"


class Told(room.LightningModule):
    """Receives SLURM's signal, as before a time limit, in a step of the job's first start."""

    def __init__(self, at=None):
        super().__init__()
        self.slope, self.at, self.began = torch.nn.Parameter(torch.zeros(1)), at, None

    def on_train_start(self):
        self.began = self.global_step

    def training_step(self, batch, batch_idx):
        return (batch[0] * self.slope - 2 * batch[0]).pow(2).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == self.at:
            os.kill(os.getpid(), signal.SIGUSR1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def test_a_fit_in_a_job_that_was_queued_again_goes_on_where_it_was_told_to_end(monkeypatch):
    def fit(module):
        trainer = room.Trainer(**QUIET, logger=False, max_epochs=3)
        trainer.fit(module, DataLoader(TensorDataset(torch.linspace(0, 1, 16)), 2))
        return module

    undisturbed = fit(Told())
    monkeypatch.setenv("SLURM_JOB_ID", "70")
    with pytest.raises(SystemExit) as end:
        fit(Told(at=5))
    assert end.value.code == 75
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    again = fit(Told())
    assert again.began == 5
    assert torch.equal(again.slope, undisturbed.slope)
    assert fit(Told()).began == 0  # the next fit of the job is a different one
