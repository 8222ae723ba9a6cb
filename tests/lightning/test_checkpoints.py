"""Checkpoints in both directions: Legato resumes Lightning's runs, and Lightning resumes Legato's."""

import argparse
import logging
import warnings

import lightning.pytorch as real
import pytest
import torch
from forked import completed, run_module
from lightning.pytorch.callbacks import EarlyStopping as RealEarlyStopping
from lightning.pytorch.callbacks import EMAWeightAveraging as RealAveraging
from lightning.pytorch.callbacks import ModelCheckpoint as RealCheckpoint
from lightning.pytorch.callbacks import Timer as RealTimer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg
import legato.compat.lightning as room
from legato.base.errors import CheckpointError
from legato.compat.lightning import checkpoint
from legato.compat.lightning.convert import convert_checkpoint
from legato.compat.lightning.utilities import load_file

pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch.optim", "ignore:::torch.jit")
EPOCHS, AT = 4, 2
"""The number of epochs, and the epoch after which a checkpoint is saved."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Run in the temporary folder of the test."""
    monkeypatch.chdir(tmp_path)


def loader(batches=6):
    inputs = torch.randn(4 * batches, 3, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), 4)


def modules(L):
    """Return module classes with the same source for a package."""

    class Plain(L.LightningModule):
        def __init__(self, hidden: int = 4, **kwargs):
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(5)
            self.net = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 1))
            self.rates, self.seen = [], []

        def loss(self, batch):
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def training_step(self, batch, batch_idx):
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            self.log("val", self.loss(batch))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 0.05)

        def on_load_checkpoint(self, checkpoint):
            self.seen.append(sorted(checkpoint))

    class Stepped(Plain):
        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), 0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    class Cycle(Plain):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), 0.05)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=EPOCHS * 6)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Plateau(Plain):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}

    class Manual(Plain):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.second = nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.second(self.net(batch[0])), batch[1])
                self.manual_backward(loss)
                optimizer.step()
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            if self.trainer.is_last_batch:
                for scheduler in self.lr_schedulers():
                    scheduler.step()

        def configure_optimizers(self):
            optimizers = torch.optim.Adam(self.net.parameters(), 0.05), torch.optim.Adam(self.second.parameters(), 0.02)
            return list(optimizers), [torch.optim.lr_scheduler.ExponentialLR(item, 0.7) for item in optimizers]

    return {kind.__name__: kind for kind in (Plain, Stepped, Cycle, Plateau, Manual)}


REAL, ROOM = modules(real), modules(room)


def saver(package, path, moment):
    """Return a callback that saves once: at the end of an epoch, at the end of the run, or within an epoch."""

    class Save(package.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if moment == "within" and trainer.current_epoch == AT - 1 and batch_idx == 3:
                trainer.save_checkpoint(path)

        def on_train_epoch_end(self, trainer, pl_module):
            if moment == "epoch" and trainer.current_epoch == AT - 1:
                trainer.save_checkpoint(path)

        def on_validation_end(self, trainer, pl_module):
            if moment == "validation" and not trainer.sanity_checking and trainer.current_epoch == AT - 1:
                trainer.save_checkpoint(path)

    return Save()


def fit(package, kind, epochs=EPOCHS, source=None, callbacks=(), **options):
    """Train a module of a kind with a package, to the end or from a checkpoint; return it."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    module = (REAL if package is real else ROOM)[kind]()
    options = {"accelerator": "cpu", "max_epochs": epochs, "callbacks": list(callbacks), **quiet, **options}
    with warnings.catch_warnings():
        if package is real:
            warnings.simplefilter("ignore")
        trainer = package.Trainer(**options)
        trainer.fit(module, loader(), loader(2), ckpt_path=source)
    module.state = trainer.global_step, trainer.current_epoch
    return module


def assert_goes_on(full, rest):
    """Check that the second run repeated the last steps of the first, and ended with its weights."""
    torch.testing.assert_close(rest.state_dict(), full.state_dict(), rtol=1e-5, atol=1e-6)
    assert rest.rates == pytest.approx(full.rates[-len(rest.rates) :])


CASES = {
    "step_lr": ("Stepped", {}),
    "one_cycle": ("Cycle", {}),
    "clipped": ("Stepped", {"gradient_clip_val": 0.1}),
    "accumulation": ("Stepped", {"accumulate_grad_batches": 2}),
    "max_steps": ("Cycle", {"max_steps": 22}),
    "manual": ("Manual", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["epoch", "within", "validation"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_of_lightning_goes_on_as_if_undisturbed(tmp_path, case, moment):
    kind, options = CASES[case]
    path = tmp_path / "x.ckpt"
    full = fit(real, kind, callbacks=[saver(real, path, moment)], **options)
    rest = fit(room, kind, source=path, **options)
    batches = EPOCHS * 6 - (2 if moment != "within" else 1) * 6 - (4 if moment == "within" else 0)
    assert len(rest.rates) == batches - (2 if "max_steps" in options else 0)
    assert_goes_on(full, rest)
    assert {"callbacks", "hyper_parameters", "loops", "pytorch-lightning_version"} <= set(rest.seen[0])
    if case not in ("manual", "max_steps"):
        assert rest.state == full.state


@pytest.mark.slow
def test_a_run_goes_on_after_its_last_epoch_and_a_plateau(tmp_path):
    path = tmp_path / "x.ckpt"
    full = fit(real, "Plateau")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = real.Trainer(accelerator="cpu", max_epochs=AT, logger=False, enable_checkpointing=False,
                               enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
        trainer.fit(REAL["Plateau"](), loader(), loader(2))
    trainer.save_checkpoint(path)
    rest = fit(room, "Plateau", source=path)
    assert len(set(rest.rates)) > 1
    assert_goes_on(full, rest)


@pytest.mark.slow
def test_callbacks_go_on_where_they_were(tmp_path, caplog):
    path = tmp_path / "epoch=1-step=12.ckpt"
    options = {"monitor": "val", "patience": 3, "min_delta": 1.0}  # no epoch is good enough: stops after the fourth
    every = RealCheckpoint(tmp_path, save_top_k=-1)
    full = fit(
        real, "Plain", 10, callbacks=[RealEarlyStopping(**options), RealTimer(), every], enable_checkpointing=True
    )
    early, timer = room.pytorch.callbacks.EarlyStopping(**options), room.pytorch.callbacks.Timer()
    with caplog.at_level(logging.INFO, logger="legato"):
        rest = fit(room, "Plain", 10, source=path, callbacks=[early, timer])
    assert (rest.state, full.state) == ((24, 4), (24, 4))
    assert_goes_on(full, rest)
    saved = torch.load(path, weights_only=True)["callbacks"]
    assert float(early.best_score) == pytest.approx(
        saved["EarlyStopping{'monitor': 'val', 'mode': 'min'}"]["best_score"]
    )
    assert timer.time_elapsed() > saved["Timer"]["time_elapsed"]["train"]
    messages = "\n".join(caplog.messages)
    assert f"Lightning 2.6.6 wrote {path}. Resuming at step 12 in epoch 2" in messages
    assert "Not restored: the state of ModelCheckpoint, because this run has no such callback." in messages
    assert "A loader that shuffles now uses Legato's order" in messages


@pytest.mark.slow
def test_what_is_not_taken_over_is_said(tmp_path, caplog):
    path = tmp_path / "x.ckpt"
    fit(real, "Plain", callbacks=[RealEarlyStopping("val"), saver(real, path, "within")])
    with caplog.at_level(logging.INFO, logger="legato"):
        fit(room, "Plain", source=path)
    assert "Not restored: the state of EarlyStopping, because this run has no such callback." in caplog.text
    assert "Values logged so far in this epoch" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["epoch", "within"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_under_lightning(tmp_path, case, moment):
    kind, options = CASES[case]
    fit(room, kind, callbacks=[saver(room, tmp_path / "x.ckpt", moment)], **options)
    full = fit(real, kind, callbacks=[saver(real, tmp_path / "real.ckpt", moment)], **options)
    rest = fit(real, kind, source=tmp_path / "x.ckpt", **options)
    resumed = fit(real, kind, source=tmp_path / "real.ckpt", **options)
    assert_goes_on(resumed, rest)
    assert rest.state == resumed.state
    # within an epoch and with max_steps, Lightning restarts the loader for its own files, too
    if moment == "epoch" and "max_steps" not in options:
        assert_goes_on(full, rest)
    ours, theirs = (torch.load(tmp_path / name, weights_only=True) for name in ("x.ckpt", "real.ckpt"))
    assert ours.keys() - {"legato"} == theirs.keys()
    assert (ours["epoch"], ours["global_step"]) == (theirs["epoch"], theirs["global_step"])
    for name in ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict"):
        assert ours["loops"]["fit_loop"][name] == theirs["loops"]["fit_loop"][name], name
    loaded = REAL[kind].load_from_checkpoint(tmp_path / "x.ckpt")
    torch.testing.assert_close(loaded.state_dict(), theirs["state_dict"])
    assert loaded.hparams == REAL[kind]().hparams
    ours = ROOM[kind].load_from_checkpoint(tmp_path / "real.ckpt")
    torch.testing.assert_close(ours.state_dict(), theirs["state_dict"])
    assert ours.hparams == loaded.hparams


@pytest.mark.slow
def test_lightning_goes_on_from_the_end_of_a_run_and_with_its_callbacks(tmp_path):
    options = {"monitor": "val", "patience": 3, "min_delta": 1.0}
    full = fit(real, "Stepped", 10, callbacks=[RealEarlyStopping(**options)])
    every = room.pytorch.callbacks.ModelCheckpoint(tmp_path, "{step}", monitor="val", save_top_k=-1)
    callbacks = [room.pytorch.callbacks.EarlyStopping(**options), room.pytorch.callbacks.Timer(), every]
    fit(room, "Stepped", 10, callbacks=callbacks, enable_checkpointing=True)
    source = tmp_path / "step=12.ckpt"
    rest = fit(real, "Stepped", 10, source=source, callbacks=[RealEarlyStopping(**options), RealTimer()])
    assert (rest.state, full.state) == ((24, 4), (24, 4))
    assert_goes_on(full, rest)


def test_a_file_is_not_converted(tmp_path):
    torch.save({"state_dict": ROOM["Plain"]().state_dict()}, tmp_path / "x.ckpt")
    done = completed(run_module, "legato", "convert", "x.ckpt", "own", cwd=tmp_path)
    assert (done.returncode, "To resume from a Lightning checkpoint" in done.stderr) == (1, True)


@pytest.mark.slow
def test_two_processes_go_on_from_a_file(tmp_path):
    """Two replicas take the same steps as one replica that accumulates two batches."""
    path = tmp_path / "x.ckpt"
    fit(real, "Stepped", callbacks=[saver(real, path, "epoch")])
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"accelerator": "cpu", "max_epochs": EPOCHS, "default_root_dir": tmp_path, **quiet}
    ended = []
    for devices in (1, 2):
        module = ROOM["Stepped"]()
        layout = {"strategy": "ddp_spawn"} if devices > 1 else {"accumulate_grad_batches": 2}
        trainer = room.Trainer(devices=devices, **layout, **options)
        trainer.fit(module, loader(), loader(2), ckpt_path=path)
        assert trainer.global_step == 12 + 2 * 3
        ended.append(module.state_dict())
    torch.testing.assert_close(*ended, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_data_modules_and_loss_scales_are_taken_over(tmp_path):
    class Data(room.LightningDataModule):
        def __init__(self):
            super().__init__()
            self.loaded = None

        def train_dataloader(self):
            return loader()

        def state_dict(self):
            return {"at": 7}

        def load_state_dict(self, state_dict):
            self.loaded = state_dict

    path, data = tmp_path / "x.ckpt", Data()
    fit(real, "Plain", callbacks=[saver(real, path, "epoch")])
    saved = torch.load(path, weights_only=True)
    scale = {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 3}
    torch.save({**saved, Data.__qualname__: {"at": 5}, "MixedPrecision": scale}, path)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    quiet["plugins"] = room.plugins.MixedPrecision("16-mixed", "cpu")
    trainer = room.Trainer(accelerator="cpu", max_epochs=AT, default_root_dir=tmp_path, **quiet)
    trainer.fit(ROOM["Plain"](), datamodule=data, ckpt_path=path)
    assert data.loaded == {"at": 5}
    trainer.save_checkpoint(tmp_path / "own", weights_only=True)
    assert trainer.strategy.precision.state_dict() == scale


def test_files_that_no_run_can_go_on_from_are_refused(tmp_path):
    path = tmp_path / "x.ckpt"
    module = ROOM["Plain"]()
    torch.save(module.state_dict(), path)
    with pytest.raises(CheckpointError, match="contains only weights"):
        fit(room, "Plain", source=path)
    contents = {"state_dict": module.state_dict(), "pytorch-lightning_version": "1.4.0", "epoch": 1, "global_step": 3}
    torch.save(contents, path)
    with pytest.raises(CheckpointError, match=r"Lightning 1.4.0 does not contain the progress .*upgrade_checkpoint"):
        fit(room, "Plain", source=path)
    torch.save({**contents, "hyper_parameters": argparse.Namespace(lr=1)}, path)
    with pytest.raises(CheckpointError, match=r"argparse.Namespace.*add_safe_globals"):
        fit(room, "Plain", source=path)


def test_programs_open_a_checkpoint_as_the_file_that_they_expect(tmp_path):
    path = tmp_path / "last.ckpt"
    module = fit(room, "Stepped", callbacks=[saver(room, path, "epoch")])
    for read in (torch.load(path, weights_only=True), torch.load(str(path)), load_file(path)):
        assert (read["epoch"], read["global_step"], read["hyper_parameters"]) == (1, 12, {"hidden": 4})
        module.load_state_dict(read["state_dict"])
    assert torch.load(path, map_location="meta")["state_dict"]["net.0.bias"].is_meta
    with pytest.raises(IsADirectoryError):
        torch.load(tmp_path)


def test_what_hooks_add_and_no_checkpoint_holds_stays_in_the_process(tmp_path, caplog):
    class Adds(ROOM["Plain"]):
        def on_save_checkpoint(self, checkpoint):
            checkpoint.update(loss_fn=nn.L1Loss(), kind=torch.float32)

        def on_load_checkpoint(self, checkpoint):
            self.loaded = checkpoint.get("loss_fn"), checkpoint["kind"]

    path = tmp_path / "x.ckpt"
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    module, trainer = Adds(), room.Trainer(accelerator="cpu", max_epochs=1, **options)
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    assert [message for message in caplog.messages if "loss_fn (L1Loss)" in message] == caplog.messages[-1:]
    loss, kind = Adds.load_from_checkpoint(path).loaded
    assert (type(loss), kind) == (nn.L1Loss, torch.float32)
    again, trainer = Adds(), room.Trainer(accelerator="cpu", max_epochs=2, **options)
    trainer.fit(again, loader(), ckpt_path=path)
    assert isinstance(again.loaded[0], nn.L1Loss)
    checkpoint.written.clear()  # as in a different process
    assert Adds.load_from_checkpoint(path).loaded == (None, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["here", "there"])
def test_a_run_that_averages_goes_on_on_the_other_side(tmp_path, first):
    kinds = {real: RealAveraging, room: room.pytorch.callbacks.EMAWeightAveraging}
    begin, rest = (room, real) if first == "here" else (real, room)
    full = [fit(real, "Plain", 3, callbacks=[RealAveraging(decay=0.5)]).state_dict()]
    fit(begin, "Plain", callbacks=[kinds[begin](decay=0.5), saver(begin, tmp_path / "x.ckpt", "epoch")])
    module = fit(rest, "Plain", 3, source=tmp_path / "x.ckpt", callbacks=[kinds[rest](decay=0.5)])
    torch.testing.assert_close(module.state_dict(), full[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty")  # Lightning warns, too
def test_the_best_checkpoints_so_far_are_known_on_both_sides(tmp_path):
    options = {"monitor": "val", "save_top_k": 2, "filename": "{epoch}"}
    fit(real, "Plain", AT, callbacks=[RealCheckpoint(tmp_path, **options)], enable_checkpointing=True)
    states = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["callbacks"]
    (state,) = states.values()
    callback = room.pytorch.callbacks.ModelCheckpoint(tmp_path, **options)
    fit(room, "Plain", AT + 1, tmp_path / "epoch=1.ckpt", callbacks=[callback], enable_checkpointing=True)
    values = {path: float(value) for path, value in state["best_k_models"].items()}
    kept = min(values, key=values.__getitem__)
    scores = {path: float(value) for path, value in callback.best_k_models.items()}
    assert scores.keys() == {kept, str(tmp_path / "epoch=2.ckpt")}
    assert scores[kept] == values[kept]
    assert (tmp_path / "epoch=0.ckpt").is_file()  # another run wrote it
    assert (tmp_path / "epoch=1.ckpt").is_file()
    back = RealCheckpoint(tmp_path, **options)
    fit(real, "Plain", AT + 1, tmp_path / "epoch=2.ckpt", callbacks=[back], enable_checkpointing=True)
    assert back.best_k_models.keys() == callback.best_k_models.keys()
    assert float(back.best_model_score) == pytest.approx(float(callback.best_model_score))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["epoch", "within", "validation"])
@pytest.mark.parametrize("kind", ["Stepped", "Cycle", "Manual"])
def test_lightning_goes_on_from_a_checkpoint_of_legatos_own_trainer(tmp_path, kind, moment):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    saves = [lg.callbacks.Checkpoint(dirpath=tmp_path / "own", save_on_train_epoch_end=True)]
    if moment != "epoch":
        saves = [saver(room, tmp_path / "own", moment)]
    quiet["enable_checkpointing"] = moment == "epoch"
    trainer = lg.Trainer(accelerator="cpu", max_epochs=AT, callbacks=saves, **quiet)
    trainer.fit(ROOM[kind](), loader(), loader(2))
    epoch, step = convert_checkpoint(tmp_path / "own", tmp_path / "x.ckpt")
    assert (epoch, step) == (AT - 1, (10 if moment == "within" else 12) * (2 if kind == "Manual" else 1))
    full = fit(real, kind, callbacks=[saver(real, tmp_path / "real.ckpt", moment)])
    rest, resumed = (fit(real, kind, source=tmp_path / name) for name in ("x.ckpt", "real.ckpt"))
    assert_goes_on(resumed, rest)
    if moment == "epoch":
        assert_goes_on(full, rest)
    with pytest.raises(CheckpointError, match="already exists"):
        convert_checkpoint(tmp_path / "own", tmp_path / "x.ckpt")
