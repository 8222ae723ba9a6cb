"""Subclasses of Lightning's callbacks, compared with Lightning: they override methods and read private attributes."""

import re
import warnings

import lightning.pytorch as real
import pytest
import torch
from lightning.pytorch.callbacks.progress.tqdm_progress import TQDMProgressBar as RealBar

import legato.compat.lightning.pytorch as room
from legato.compat.lightning.pytorch.callbacks import TQDMProgressBar

PACKAGES = (real, room)
NUMBERS = torch.arange(8.0)[:, None] / 8


def module_of(package, **parts):
    """Return a small module of a package, with additional methods."""

    class Line(package.LightningModule):
        def __init__(self, lr=0.1):
            super().__init__()
            self.lr = lr
            self.backbone, self.head = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
            for parameter in self.parameters():
                torch.nn.init.constant_(parameter, 0.5)

        def training_step(self, batch, batch_idx):
            loss = self.head(self.backbone(batch)).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.head(self.backbone(batch)).square().mean())

        test_step = validation_step

        def configure_optimizers(self):
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=self.lr)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

        def train_dataloader(self):
            return torch.utils.data.DataLoader(NUMBERS, batch_size=4)

        val_dataloader = test_dataloader = train_dataloader

    return type("Line", (Line,), parts)()


def trainer_of(package, folder, callbacks=(), **options):
    """Return a trainer without output for two epochs."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "default_root_dir": folder}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice
        return package.Trainer(callbacks=list(callbacks), **{**defaults, **quiet, **options})


def run(trainer, method, *arguments, **options):
    """Call a method of the trainer without Lightning's advice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(trainer, method)(*arguments, **options)


def shown(value):
    """Return the representation of an argument that two packages share."""
    if isinstance(value, str):
        return re.sub(r".*/", "", str(getattr(value, "value", value)))
    if isinstance(value, (bool, int, type(None))):
        return value
    return sorted(value) if isinstance(value, dict) and all(isinstance(key, str) for key in value) else "..."


def watched(kind, names):
    """Return a subclass that overrides methods, and the list of their calls."""
    calls = []

    def override(name):
        def call(self, *arguments, **named):
            calls.append((name, [shown(item) for item in arguments], {key: shown(item) for key, item in named.items()}))
            return getattr(super(watching, self), name)(*arguments, **named)

        return call

    watching = type("Watching", (kind,), {name: override(name) for name in names})
    return watching, calls


OVERRIDDEN = {
    "ModelCheckpoint": (
        {"monitor": "val_loss", "save_last": True},
        "_should_skip_saving_checkpoint _should_save_on_train_epoch_end _monitor_candidates _save_topk_checkpoint "
        "_save_monitor_checkpoint check_monitor_top_k _update_best_and_save _get_metric_interpolated_filepath_name "
        "format_checkpoint_name _format_checkpoint_name _save_checkpoint _save_last_checkpoint "
        "_should_remove_checkpoint _remove_checkpoint _ModelCheckpoint__resolve_ckpt_dir "
        "_ModelCheckpoint__warn_if_dir_not_empty _ModelCheckpoint__init_monitor_mode _ModelCheckpoint__init_ckpt_dir "
        "_ModelCheckpoint__init_triggers _ModelCheckpoint__validate_init_configuration",
    ),
    "EarlyStopping": (
        {"monitor": "val_loss"},
        "_should_skip_check _run_early_stopping_check _evaluate_stopping_criteria _improvement_message",
    ),
    "BackboneFinetuning": (
        {"unfreeze_backbone_at_epoch": 1},
        "freeze_before_training finetune_function",
    ),
    "WeightAveraging": ({}, "should_update"),
    "DeviceStatsMonitor": ({}, "_get_and_log_device_stats"),
    "LearningRateFinder": ({"num_training_steps": 3}, "lr_find"),
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_overridden_methods_are_called(name, tmp_path):
    arguments, names = OVERRIDDEN[name]
    results = []
    for package in PACKAGES:
        kind, calls = watched(getattr(package.callbacks, name), names.split())
        folder = tmp_path / package.__name__.partition(".")[0]
        logger = package.loggers.CSVLogger(folder) if "Monitor" in name else False
        shows = {"enable_progress_bar": "Bar" in name, "enable_checkpointing": "Checkpoint" in name}
        trainer = trainer_of(package, folder, [kind(**arguments)], logger=logger, **shows)
        module = module_of(package)
        run(trainer, "fit", module)
        calls.append("test")
        run(trainer, "test", module, verbose=False)
        results.append(calls)
    assert results[0] == results[1]
    assert {call[0] for call in results[0] if call != "test"} == set(names.split())


def test_a_folder_of_ones_own_for_checkpoints(tmp_path):
    for package in PACKAGES:
        folder = tmp_path / package.__name__.partition(".")[0]

        class Elsewhere(package.callbacks.ModelCheckpoint):
            def _ModelCheckpoint__resolve_ckpt_dir(self, trainer, folder=folder):
                return str(folder / "own")

        saves = Elsewhere()
        run(trainer_of(package, folder, [saves], enable_checkpointing=True), "fit", module_of(package))
        assert saves.dirpath == str(folder / "own")
        assert (folder / "own" / "epoch=1-step=4.ckpt").exists()


def test_an_error_is_saved_by_the_method_that_saves(tmp_path):
    def fails(self, batch, batch_idx):
        if self.trainer.global_step == 3:
            raise RuntimeError("the data are bad")
        return self.head(self.backbone(batch)).square().mean()

    for package in PACKAGES:
        kind, calls = watched(package.callbacks.ModelCheckpoint, ["_should_save_on_exception", "_save_checkpoint"])
        folder = tmp_path / package.__name__.partition(".")[0]
        saves = kind(folder, filename="{step}", save_on_exception=True)
        module = module_of(package, training_step=fails, val_dataloader=None)
        with pytest.raises(RuntimeError, match="data are bad"):
            run(trainer_of(package, folder, [saves], enable_checkpointing=True), "fit", module)
        assert [call[0] for call in calls[-2:]] == ["_should_save_on_exception", "_save_checkpoint"]
        assert calls[-1][1][1] == "step=3.ckpt"
        assert (folder / "step=3.ckpt").exists()


def test_rates_of_a_group_that_is_added(tmp_path):
    """The list of the first group continues under its new name."""
    results = []
    for package in PACKAGES:
        rates = package.callbacks.LearningRateMonitor()
        unfreezes = package.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1)
        options = {"logger": package.loggers.CSVLogger(tmp_path, version=package.__name__[:6]), "log_every_n_steps": 1}
        run(trainer_of(package, tmp_path, [rates, unfreezes], **options), "fit", module_of(package))
        results.append({name: [round(rate, 6) for rate in values] for name, values in rates.lrs.items()})
    assert results[0] == results[1]
    assert results[0].keys() == {"lr-SGD/pg1", "lr-SGD/pg2"}


class Half:
    """Moves the averages half way to the weights."""

    def should_update(self, step_idx=None, epoch_idx=None):
        return step_idx is not None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        averages = self._average_model
        self.seen.append((int(averages.n_averaged), self._latest_update_step, total(averages.module)))
        assert "module.head.bias" in averages.state_dict()

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        state = {"state_dict": {name: value.clone() for name, value in pl_module.state_dict().items()}}
        self.on_save_checkpoint(trainer, pl_module, state)
        self.seen += [(kind, round(sum(map(float, state[kind].values())), 5)) for kind in sorted(state)]


def total(module):
    """Return the sum of a module's parameters."""
    return round(sum(float(parameter.sum()) for parameter in module.parameters()), 5)


def test_a_checkpoint_of_stochastic_averages_has_the_trained_weights(tmp_path):
    path = tmp_path / "one.ckpt"
    weights = []

    class Saves(room.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(path)
            weights.append(total(pl_module))

    averages = room.callbacks.StochasticWeightAveraging(0.05, 1)
    module = module_of(room)
    run(trainer_of(room, tmp_path, [averages, Saves()]), "fit", module)
    assert total(type(module).load_from_checkpoint(path)) == weights[-1] != total(module)


def test_finders_that_the_module_brings(tmp_path):
    results = []
    for package in PACKAGES:
        finder = package.callbacks.LearningRateFinder(num_training_steps=20)
        module = module_of(package, configure_callbacks=lambda self, finder=finder: [finder])
        run(trainer_of(package, tmp_path, max_epochs=20), "fit", module)
        results.append((finder.optimal_lr.suggestion(), module.lr))
    assert results[0] == pytest.approx(results[1])
    assert results[0][0] == results[0][1]


def test_how_often_bars_are_drawn(monkeypatch):
    for kind in (RealBar, TQDMProgressBar):
        assert kind(7).refresh_rate == 7
        with monkeypatch.context() as patch:
            patch.setenv("TQDM_MINITERS", "9")
            assert (kind(7).refresh_rate, kind(11).refresh_rate) == (9, 11)
        with monkeypatch.context() as patch:
            patch.setenv("COLAB_GPU", "1")
            assert (kind().refresh_rate, kind(2).refresh_rate) == (20, 2)


def test_one_progress_bar_at_most(tmp_path):
    for package in PACKAGES:
        bars = package.callbacks.TQDMProgressBar, package.callbacks.RichProgressBar
        for callbacks, wanted in (([bars[0](), bars[1]()], True), ([bars[0]()], False)):
            with pytest.raises(package.utilities.exceptions.MisconfigurationException, match=r"[Pp]rogress.?bar"):
                trainer_of(package, tmp_path, callbacks, enable_progress_bar=wanted)


def test_a_summary_of_ones_own_is_the_only_one(tmp_path):
    for package in PACKAGES:
        summary = type("Own", (package.callbacks.ModelSummary,), {})()
        callbacks = trainer_of(package, tmp_path, [summary], enable_model_summary=True).callbacks
        assert [callback for callback in callbacks if isinstance(callback, package.callbacks.ModelSummary)] == [summary]


# --- loggers ----------------------------------------------------------------------------------------------------------


def test_a_version_and_hyperparameters_of_ones_own(tmp_path):
    for package in PACKAGES:

        class Own(package.loggers.TensorBoardLogger):
            def _get_next_version(self):
                return 7

        logger = Own(tmp_path / package.__name__[:6], flush_secs=9)
        assert (logger.version, logger._kwargs, logger._sub_dir) == (7, {"flush_secs": 9}, None)
        logger.log_hyperparams({"outer": {"inner": 1}})
        assert logger.hparams == {"outer": {"inner": 1}}
        logger.finalize("success")
        assert (tmp_path / package.__name__[:6] / "lightning_logs" / "version_7" / "hparams.yaml").exists()


def test_names_of_legatos_own_are_free(tmp_path):
    """Such a method belongs to the program, even if Legato uses the name."""

    def fails(self):
        raise AssertionError("called by the trainer")

    for package in PACKAGES:
        free = dict.fromkeys(("set_task", "extend_optimizers"), fails)
        callback = type("Own", (package.Callback,), {**free, "late": True})()
        logger = type("Log", (package.loggers.TensorBoardLogger,), {"log_text": fails})
        folder = tmp_path / package.__name__[:6]
        made = logger(folder)
        made.folder = "mine"
        trainer = trainer_of(package, folder, [callback], logger=made)
        run(trainer, "fit", module_of(package))
        assert (callback.late, made.folder) == (True, "mine")
        assert (folder / "lightning_logs" / "version_0").is_dir()
