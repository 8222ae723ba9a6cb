"""Callbacks in Lightning compatibility mode, compared with Lightning: the same runs and observations."""

import importlib
import json
import warnings
from pathlib import Path

import pytest
import torch
from forked import completed, run_script
from lightning_callbacks import SCENARIOS, fit, loader, make_module, make_trainer, seen, weights_of

import legato.compat.lightning as L


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """Return the results of every scenario under Lightning."""
    script = Path(__file__).parents[1] / "lightning_callbacks.py"
    done = completed(run_script, script, "lightning", tmp_path_factory.mktemp("real"), timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout[done.stdout.index("{") :])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_script_sees_the_same(name, real, tmp_path):
    for module in ("callbacks", "utilities.exceptions", "loggers"):
        importlib.import_module(f"legato.compat.lightning.pytorch.{module}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = json.loads(json.dumps(SCENARIOS[name](L, tmp_path)))
    cases = result.keys() if isinstance(result, dict) else range(len(result))
    for case in cases:
        assert repr(result[case]) == repr(real[name][case]), case
    assert len(result) == len(real[name])


def test_what_a_model_summary_shows(tmp_path, caplog):
    from legato.compat.lightning.pytorch.callbacks import ModelSummary

    rows = []

    class Table(ModelSummary):
        @staticmethod
        def summarize(
            summary_data, total_parameters, trainable_parameters, model_size, total_training_modes, **options
        ):
            rows.append(
                (dict(summary_data)["Name"], total_parameters, trainable_parameters, total_training_modes, options)
            )

    with caplog.at_level("INFO", logger="legato"):
        fit(L, tmp_path, [ModelSummary(), Table(max_depth=-1, own=1)], max_epochs=1, enable_checkpointing=False)
    assert rows == [(["backbone", "head"], 19, 19, {"train": 2, "eval": 0}, {"total_flops": 0, "own": 1})]
    assert any("backbone | Linear" in message and "Non-trainable params" in message for message in caplog.messages)


def test_a_bar_prints_above_itself_and_is_left_out_where_it_is_disabled(tmp_path, capsys):
    from legato.compat.lightning.pytorch.callbacks import TQDMProgressBar

    bar = TQDMProgressBar(refresh_rate=2, leave=True)
    assert (bar.refresh_rate, bar.process_position, bar.is_enabled, bar.is_disabled) == (2, 0, True, False)
    with pytest.raises(TypeError, match="_train_progress_bar"):
        _ = bar.train_progress_bar

    class Prints(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.progress_bar_callback.print("batch", batch_idx)

    shows = {"max_epochs": 1, "enable_checkpointing": False, "enable_progress_bar": True}
    fit(L, tmp_path, [bar, Prints()], **shows)
    out = capsys.readouterr().out
    assert "batch 3" in out
    assert "4/4" in out
    assert "Epoch 0" in out
    bar.disable()
    fit(L, tmp_path, [bar, Prints()], **shows)
    assert capsys.readouterr().out == ""
    assert make_trainer(L, tmp_path, [bar], **shows).progress_bar_callback is bar


class Sized(L.LightningModule):
    """Has a learning rate and a batch size to search for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.lr, self.batch_size = 1e-5, 1
        self.net = torch.nn.Linear(4, 1)
        self.sizes = set()

    def training_step(self, batch, batch_idx):
        self.sizes.add(len(batch[0]))
        return (self.net(batch[0]) - 1).square().mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(loader(256).dataset, batch_size=self.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.slow
def test_finders_search_before_the_fit(tmp_path):
    from legato.compat.lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

    size = BatchSizeFinder(max_trials=2, init_val=2, steps_per_trial=1)
    rate = LearningRateFinder(num_training_steps=30, min_lr=1e-4, max_lr=0.1, early_stop_threshold=None)
    module, before = Sized(), Sized().lr
    trainer = make_trainer(L, tmp_path, [size, rate], max_epochs=1, enable_checkpointing=False)
    trainer.fit(module)
    assert module.batch_size == size.optimal_batch_size > 1
    assert module.sizes == {module.batch_size}
    assert module.lr == rate.optimal_lr.suggestion() != before
    assert trainer.optimizers[0].param_groups[0]["lr"] == module.lr
    for kind in (BatchSizeFinder, LearningRateFinder):
        with pytest.raises(ValueError, match="mode"):
            kind(mode="guess")


def test_the_callbacks_that_a_trainer_adds(tmp_path):
    callbacks = L.pytorch.callbacks
    trainer = L.Trainer(default_root_dir=tmp_path, accelerator="cpu", max_time="00:01:00:00", logger=False)
    kinds = [callbacks.TQDMProgressBar, callbacks.ModelSummary, callbacks.Timer, callbacks.ModelCheckpoint]
    assert [type(callback) for callback in trainer.callbacks] == kinds
    assert all(isinstance(callback, L.Callback) for callback in trainer.callbacks)
    bar = callbacks.RichProgressBar()
    trainer = L.Trainer(default_root_dir=tmp_path, accelerator="cpu", callbacks=[bar], logger=False)
    assert trainer.progress_bar_callback is bar
    assert sum(isinstance(callback, callbacks.ProgressBar) for callback in trainer.callbacks) == 1


def test_the_bar_by_rich_is_drawn_by_tqdm(tmp_path, capsys):
    from legato.compat.lightning.placeholders import UnsupportedError

    kinds = L.pytorch.callbacks
    bar = kinds.RichProgressBar(theme=kinds.RichProgressBarTheme(metrics_format=".2e"), leave=True)
    options = {"max_epochs": 1, "enable_checkpointing": False, "enable_progress_bar": True}
    trainer = fit(L, tmp_path, [bar, kinds.RichModelSummary(max_depth=-1)], **options)
    assert trainer.progress_bar_callback is bar
    assert "4/4" in capsys.readouterr().out
    kind = type("Own", (kinds.RichProgressBar,), {"configure_columns": lambda self, trainer: []})
    with pytest.raises(UnsupportedError, match=r"Own\.configure_columns would never be called"):
        kind()
    with pytest.raises(UnsupportedError, match="get_metrics"):
        kinds.progress.rich_progress.CustomProgress()


@pytest.mark.slow
def test_on_two_processes_the_caller_sees_what_they_did(tmp_path):
    kinds = L.pytorch.callbacks
    best = kinds.ModelCheckpoint(
        tmp_path / "best", filename="{epoch}-{val_loss:.2f}", monitor="val_loss", save_last="link"
    )
    every = kinds.ModelCheckpoint(tmp_path / "every", every_n_train_steps=3, save_top_k=-1)
    stopping = kinds.EarlyStopping("val_loss", patience=2)
    averaging = kinds.StochasticWeightAveraging(0.02, 2, annealing_epochs=2)
    callbacks, module = [best, stopping, averaging, every], make_module(L, (0.5, 0.3, 0.4, 0.35, 0.2, 0.1))
    trainer = make_trainer(L, tmp_path, callbacks, max_epochs=8, strategy="ddp_spawn", devices=2)
    trainer.fit(module, loader(), loader(2))
    result = seen(best, tmp_path / "best")
    assert result["files"] == ["epoch=1-val_loss=0.30.ckpt", "last.ckpt"]
    assert (result["links"], result["last"], result["score"]) == (["last.ckpt"], "last.ckpt", 0.3)
    assert result["best"] == "epoch=1-val_loss=0.30.ckpt"
    assert seen(every, tmp_path / "every")["files"] == ["epoch=1-step=3.ckpt", "epoch=2-step=6.ckpt"]
    assert (trainer.current_epoch, trainer.global_step, stopping.stopped_epoch, stopping.wait_count) == (4, 8, 3, 2)
    assert averaging.updates == 3
    again = type(module).load_from_checkpoint(best.best_model_path)
    assert weights_of(again) != weights_of(module)
    assert trainer.validate(module, loader(2), ckpt_path="best", verbose=False)[0]["val_loss"] == 0.5
    assert weights_of(module) == weights_of(again)


class StepNet(L.LightningModule):
    """A model with a rate that decreases after each epoch, and a loss outside the bar."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def quiet_fit(folder, callbacks, **options):
    wanted = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, **options}
    trainer = L.Trainer(accelerator="cpu", max_epochs=2, callbacks=callbacks, default_root_dir=folder, **wanted)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 1)), batch_size=1)
    trainer.fit(StepNet(), batches)
    return trainer


def test_a_bar_of_ones_own_reads_the_newest_values_and_when_to_draw(tmp_path):
    from legato.compat.lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar

    seen, due = [], []

    class Bar(ProgressBar):
        def disable(self):
            pass

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append((self.get_metrics(trainer, pl_module)["loss"], outputs["loss"].item()))

    class Drawn(TQDMProgressBar):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            due.append(self._should_update(batch_idx + 1, self.train_progress_bar.total))

    quiet_fit(tmp_path, Bar())
    assert len(seen) == 8
    assert all(shown == pytest.approx(loss) for shown, loss in seen)
    quiet_fit(tmp_path, Drawn(refresh_rate=3))
    assert due == [False, False, True, True] * 2


def test_checkpoint_callbacks_come_last_in_the_list():
    from legato.compat.lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint

    callbacks = [ModelCheckpoint(), EarlyStopping("loss"), LearningRateFinder()]
    trainer = L.Trainer(accelerator="cpu", callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False)
    assert trainer.callbacks == [callbacks[2], callbacks[1], callbacks[0]]


def test_callbacks_of_a_module_come_before_those_that_save(tmp_path):
    from legato.compat.lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    class Brings(type(make_module(L))):
        def configure_callbacks(self):
            return [EarlyStopping("loss", strict=False)]

    trainer = make_trainer(L, tmp_path, [ModelCheckpoint(tmp_path / "kept")], max_epochs=1)
    trainer.fit(Brings(), loader())
    kinds = [type(callback).__name__ for callback in trainer.callbacks]
    assert kinds.index("EarlyStopping") < kinds.index("ModelCheckpoint") == len(kinds) - 1


def test_a_finetuning_within_an_epoch(tmp_path):
    """Calls `_store`, as some callbacks do; a resume has its groups."""
    from legato.compat.lightning.pytorch.callbacks import BaseFinetuning

    class Steps(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.backbone)

        def finetune_function(self, pl_module, epoch, optimizer):
            pass

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            optimizer = trainer.optimizers[0]
            if trainer.global_step == 2 and len(optimizer.param_groups) == 1:
                self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.05)
                self._store(pl_module, 0, 1, optimizer.param_groups)

    class Head(type(make_module(L))):
        def configure_optimizers(self):
            return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.1)

    groups = []
    for steps, start in ((3, None), (4, tmp_path / "three.ckpt")):
        trainer = make_trainer(L, tmp_path, [Steps()], max_steps=steps, enable_checkpointing=False)
        trainer.fit(Head(), loader(), ckpt_path=start)
        trainer.save_checkpoint(tmp_path / "three.ckpt")
        groups.append([len(group["params"]) for group in trainer.optimizers[0].param_groups])
    assert groups[0] == groups[1]
    assert len(groups[0]) == 2
