"""Modules and scripts as written for PyTorch Lightning: they run with nothing changed but their imports.

Expected numbers were measured with Lightning 2.6.6, on the same code but for the names that were imported.
"""

import argparse
from functools import partial

import lightning_modules as modules
import pytest
import torch
from lightning_modules import make_loader
from torch import nn

import legato as lg
from legato.base.errors import CheckpointError, ConfigError
from legato.callbacks import Checkpoint, EarlyStopping
from legato.loggers import TensorBoardLogger

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
SILENT = {**QUIET, "logger": False, "enable_checkpointing": False}


@pytest.mark.slow
def test_the_template_with_partials_and_metrics(tmp_path, capsys):
    lg.seed_everything(12345, workers=True)
    model = modules.LitClassifier(
        modules.make_net(),
        partial(torch.optim.Adam, lr=0.02),
        partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=10),
    )
    checkpoint = Checkpoint(monitor="val/acc", mode="max", dirpath=tmp_path / "best", save_last=True)
    logger = TensorBoardLogger()
    trainer = lg.Trainer(
        **QUIET,
        default_root_dir=str(tmp_path),
        run_name="blobs",
        devices="auto",
        max_epochs=4,
        logger=logger,
        callbacks=[checkpoint, EarlyStopping(monitor="val/loss", mode="min", patience=100)],
        log_every_n_steps=1,
        gradient_clip_val=0.0,
    )
    trainer.logger.log_hyperparams({"model/params/total": sum(p.numel() for p in model.parameters())})
    datamodule = modules.BlobsDataModule(batch_size=16)
    trainer.fit(model=model, datamodule=datamodule)
    metrics = {name: round(value.item(), 4) for name, value in trainer.callback_metrics.items()}
    assert metrics == pytest.approx(TEMPLATE, abs=2e-3)

    capsys.readouterr()
    metrics = trainer.test(datamodule=datamodule)  # the last task, with its best weights
    assert set(metrics[0]) == {"test/loss", "acc", "f1"}
    assert "test/loss" in capsys.readouterr().out
    assert metrics == trainer.test(model, datamodule=datamodule, ckpt_path=checkpoint.best_model_path, verbose=False)
    assert capsys.readouterr().out == ""

    with pytest.raises(CheckpointError, match=r"missing 2 required positional arguments: 'optimizer' and 'scheduler'"):
        modules.LitClassifier.load_from_checkpoint(checkpoint.best_model_path, net=modules.make_net())
    missing = {"net": modules.make_net(), "optimizer": None, "scheduler": None}
    again = modules.LitClassifier.load_from_checkpoint(
        checkpoint.best_model_path, map_location=lambda s, _: s, **missing
    )
    assert again.hparams.compile is False
    data = modules.BlobsDataModule.load_from_checkpoint(checkpoint.best_model_path, num_workers=3)
    assert data.hparams == {"batch_size": 16, "num_workers": 3}


TEMPLATE = {"val/loss": 0.879, "val/acc": 0.6667, "val/acc_best": 0.6667, "train/loss": 0.8095, "train/acc": 0.4872}


@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        (modules.WarmUp, 3.39666),
        (modules.EverySecond, 2.30634),
        (modules.LBFGS, -0.34366),
        (modules.ManualAccumulation, -0.18999),
        (modules.OneCycle, -0.40669),
        (modules.Skips, 3.13582),
        (modules.LeavesEpoch, 1.52905),
        (modules.OwnBackward, 3.48956),
    ],
)
def test_small_modules_end_with_the_same_weights(kind, weight):
    model = kind()
    lg.Trainer(**SILENT, max_epochs=2).fit(model, make_loader())
    assert model.l.weight.sum().item() == pytest.approx(weight, abs=2e-5)


def test_a_gan_in_manual_optimization(tmp_path):
    model = modules.GAN(unused=1)
    trainer = lg.Trainer(**QUIET, default_root_dir=tmp_path, max_epochs=2, log_every_n_steps=1)
    trainer.fit(model, make_loader(12))
    assert model.last_batches == [False, False, True] * 2
    assert [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers] == [0.005, 0.005]
    losses = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert losses == pytest.approx({"g_loss": 0.73118, "d_loss": 1.34634}, abs=1e-4)


def test_metrics_are_there_when_an_epoch_ends(tmp_path):
    history, checkpoint = modules.History(), Checkpoint(monitor="step", mode="min", dirpath=tmp_path)
    stopping = EarlyStopping(monitor="both_step", mode="min", patience=9)
    trainer = lg.Trainer(**QUIET, default_root_dir=tmp_path, max_epochs=2, callbacks=[history, checkpoint, stopping])
    trainer.fit(modules.Logged(), make_loader())
    epochs = [{name: round(value.item(), 4) for name, value in epoch.items()} for epoch in history.epochs]
    for epoch, expected in zip(epochs, HISTORY, strict=True):
        assert epoch == pytest.approx(expected, abs=2e-4)
    assert checkpoint.best_model_score == trainer.callback_metrics["step"]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1


NAMES = (*("step", "both", "both_step", "both_epoch", "max", "numbers"), *(f"val/dataloader_idx_{i}" for i in (0, 1)))
HISTORY = [
    dict(zip(NAMES, (1.0918, 3.1503, 1.0918, 3.1503, 6.2876, 0.5, 0.5988, 0.97), strict=True)),
    dict(zip(NAMES, (0.2064, 0.3654, 0.2064, 0.3654, 0.7349, 0.5, 0.0797, 0.1352), strict=True)) | {"average": 3.1503},
]
for epoch in HISTORY:
    epoch |= {f"own_{index}": epoch[f"val/dataloader_idx_{index}"] for index in (0, 1)}
    epoch["sum"] = epoch["own_0"] + epoch["own_1"]


def test_a_namespace_of_hyperparameters(tmp_path):
    arguments = argparse.Namespace(hidden=3, lr=0.1, betas=(0.9, 0.99), nested={"deep": [1, {"x": 2}]})
    trainer = lg.Trainer(**{**QUIET, "logger": False}, default_root_dir=tmp_path, max_epochs=1)
    trainer.fit(modules.FromNamespace(arguments), make_loader())
    again = modules.FromNamespace.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, lr=0.5)
    assert (again.hparams.hidden, again.hparams.lr, again.hparams["betas"]) == (3, 0.5, (0.9, 0.99))
    assert again.hparams.nested.deep[1].x == 2


def test_a_lightning_checkpoint_file(tmp_path):
    wanted = modules.Sized(hidden=5)
    contents = {"hyper_parameters": {"hidden": 5, "lr": 0.2}, "state_dict": wanted.state_dict(), "epoch": 3}
    torch.save({**contents, "pytorch-lightning_version": "2.6.6"}, tmp_path / "model.ckpt")
    task = modules.Sized.load_from_checkpoint(tmp_path / "model.ckpt", lr=0.3, map_location="cpu")
    assert dict(task.hparams) == {"hidden": 5, "lr": 0.3}
    nn.init.zeros_(task.l.weight)
    trainer = lg.Trainer(**SILENT)
    expected = trainer.test(wanted, make_loader(), verbose=False)
    assert trainer.test(task, make_loader(), ckpt_path=str(tmp_path / "model.ckpt"), verbose=False) == expected
    with pytest.raises(CheckpointError, match=r"contains only weights.*load_from_checkpoint.*`legato lightning"):
        trainer.fit(task, make_loader(), ckpt_path=tmp_path / "model.ckpt")


# --- outside of a run, and what is not there --------------------------------------------------------------------------
def test_a_module_without_a_trainer():
    model = modules.Base()
    assert (model.current_epoch, model.global_step, model.global_rank) == (0, 0, 0)
    assert (model.logger, model.loggers) == (None, [])
    assert model.training_step(next(iter(make_loader())), 0).requires_grad
    with pytest.raises(ConfigError, match="test needs a task"):
        lg.Trainer(**SILENT).test(dataloaders=make_loader())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_epoch": 3}, TypeError, "no argument 'max_epoch'. Did you mean 'max_epochs'"),
        ({"benchmark": True}, TypeError, "torch.backends.cudnn.benchmark"),
        ({"strategy": "ddp_find_unused_parameters_true"}, ConfigError, r"'ddp', 'find_unused_parameters': True\}"),
    ],
)
def test_what_is_said_of_arguments_that_are_not_there(arguments, error, message):
    with pytest.raises(error, match=message):
        lg.Trainer(**SILENT, **arguments)


def fit_distributed(folder, **where):
    torch.manual_seed(0)
    model, datamodule = modules.Distributed(), modules.Loaders()
    stopping, checkpoint = EarlyStopping(monitor="train_loss_epoch", mode="min"), Checkpoint(monitor="gathered")
    trainer = lg.Trainer(
        **QUIET,
        **where,
        default_root_dir=folder,
        max_epochs=2,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[modules.Thaw(), stopping, checkpoint],
    )
    trainer.fit(model, datamodule=datamodule)
    return trainer, model, datamodule


@pytest.mark.slow
def test_a_script_on_two_processes(tmp_path):
    trainer, model, datamodule = fit_distributed(tmp_path, devices=2, strategy="ddp")
    assert trainer.global_step == 2
    assert {"train_loss", "train_loss_step", "train_loss_epoch", "gathered"} <= trainer.callback_metrics.keys()
    assert trainer.callback_metrics["count"] == 3
    assert trainer.lightning_module is trainer.model is model
    assert trainer.datamodule is datamodule
    weights = [parameter.detach().clone() for parameter in model.parameters()]  # predict takes the best, not the last
    predictions = torch.cat(trainer.predict(datamodule=datamodule))
    assert torch.equal(predictions, make_loader(12).dataset.tensors[0][:, 0])
    _, alone, _ = fit_distributed(tmp_path, devices=1, replicas=2)
    assert (alone.norm.weight != 1).any()
    for ours, theirs in zip(weights, alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
