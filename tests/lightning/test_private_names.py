"""Private names of Lightning's that public packages use."""

from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType

import pytest
import torch

import legato.compat.lightning as L
from legato.base.errors import ConfigError
from legato.compat.lightning.placeholders import UnsupportedError
from legato.compat.lightning.pytorch.core.saving import _load_from_checkpoint, get_filesystem
from legato.compat.lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from legato.compat.lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from legato.compat.lightning.pytorch.trainer.states import RunningStage, TrainerFn


class Linear(L.LightningModule):
    def __init__(self, activation=None):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_connector_knows_the_devices():
    connector = _AcceleratorConnector(accelerator="cpu", devices=2)
    assert (connector._accelerator_flag, connector._devices_flag) == ("cpu", 2)
    assert connector._parallel_devices == [torch.device("cpu")] * 2
    assert _AcceleratorConnector(accelerator="cpu", devices="auto")._devices_flag == 1
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False)
    assert trainer._accelerator_connector._parallel_devices == [torch.device("cpu")]
    assert not trainer._accelerator_connector.is_distributed
    assert connector.is_distributed


def test_a_package_registers_an_accelerator_of_its_own():
    """Packages register devices that are absent; a run on them raises an error with advice."""
    from legato.compat.lightning.fabric.utilities.distributed import _distributed_is_initialized
    from legato.compat.lightning.fabric.utilities.registry import _register_classes
    from legato.compat.lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry

    class Own(Accelerator):
        kind = "own"

        @classmethod
        def register_accelerators(cls, registry):
            registry.register(cls.name(), cls, description="devices of one's own")

    module = ModuleType("of_a_package")
    module.Own, module.Accelerator, module.number = Own, Accelerator, 3
    try:
        _register_classes(AcceleratorRegistry, "register_accelerators", module, Accelerator)
        assert "own" in AcceleratorRegistry
        assert isinstance(AcceleratorRegistry.get("own"), Own)
        with pytest.raises(ConfigError, match="expected one of auto, gpu, cpu"):
            L.Trainer(accelerator="own")
    finally:
        AcceleratorRegistry.remove("own")
    replaced = _AcceleratorConnector._choose_strategy, _AcceleratorConnector._check_and_init_precision
    for method in replaced:
        with pytest.raises(UnsupportedError, match="Trainer"):
            method(None)
    assert not _distributed_is_initialized()


def test_callbacks_come_in_any_collection(tmp_path):
    callbacks = [L.Callback(), L.Callback()]
    for passed in (callbacks, tuple(callbacks), dict.fromkeys(callbacks).keys()):
        trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=passed, default_root_dir=tmp_path)
        assert [callback for callback in trainer.callbacks if callback in callbacks] == callbacks
    assert callbacks[0] in L.Trainer(accelerator="cpu", logger=False, callbacks=callbacks[0]).callbacks


def test_names_of_types_and_of_prefixes():
    from legato.compat.lightning.fabric.utilities.logger import _add_prefix
    from legato.compat.lightning.pytorch.plugins import _PLUGIN_INPUT
    from legato.compat.lightning.pytorch.trainer.connectors.accelerator_connector import _LITERAL_WARN, _PRECISION_INPUT

    assert _add_prefix({"loss": 1}, "train", "/") == {"train/loss": 1}
    assert _add_prefix({"loss": 1}, "", "/") == {"loss": 1}
    assert bool | _LITERAL_WARN | list[_PLUGIN_INPUT]
    assert isinstance("16-mixed", _PRECISION_INPUT)


def test_a_checkpoint_opens_through_a_filesystem(tmp_path):
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    module = Linear(torch.nn.Tanh())
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2))
    path = tmp_path / "saved.ckpt"
    trainer.save_checkpoint(path)
    assert path.is_file()
    with get_filesystem(path).open(str(path), "rb") as file:
        contents = torch.load(file, weights_only=False)
    assert torch.equal(contents["state_dict"]["layer.weight"], module.layer.weight)
    assert isinstance(contents["hyper_parameters"]["activation"], torch.nn.Tanh)
    with pytest.raises(UnpicklingError):  # as in a file of Lightning: the hyperparameter is code
        torch.load(path, weights_only=True)

    class Careful(Linear):
        @classmethod
        def load_from_checkpoint(cls, checkpoint_path, **options):
            return _load_from_checkpoint(cls, checkpoint_path, **options)

    for options in ({}, {"weights_only": False}, {"weights_only": True}):
        for loads in (Linear, Careful):
            assert torch.equal(loads.load_from_checkpoint(path, **options).layer.weight, module.layer.weight)
    plain = Path(tmp_path / "plain.txt")
    plain.write_text("text")
    with get_filesystem(plain).open(str(plain), "rb") as file:
        assert file.read() == b"text"


def test_the_loaders_of_training_are_found_where_programs_look_for_them(tmp_path):
    seen = []

    class Looks(Linear):
        def on_train_epoch_start(self):
            seen.extend(self.trainer.fit_loop._combined_loader.flattened)
            seen.append(self.trainer.fit_loop._data_source.instance)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", max_steps=1, default_root_dir=tmp_path, **quiet)
    assert trainer.fit_loop._combined_loader is None
    data = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)
    trainer.fit(Looks(torch.nn.Tanh()), data)
    assert seen == [data, data]


def test_a_loop_of_ones_own_shows_the_results_of_a_test(tmp_path, capsys):
    shown = []

    class Table(_EvaluationLoop):
        @staticmethod
        def _print_results(results, stage):
            shown.append((stage, results))

    class Tests(Linear):
        def test_step(self, batch, batch_idx):
            self.log("test_loss", self.training_step(batch, batch_idx))

        validation_step = test_step

    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    trainer.test_loop = Table(trainer, TrainerFn.TESTING, RunningStage.TESTING, inference_mode=True)
    module, loader = Tests(torch.nn.Tanh()), torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)
    metrics = trainer.test(module, loader)
    assert shown == [("test", [{"test_loss": torch.tensor(metrics[0]["test_loss"])}])]
    assert "test_loss" not in capsys.readouterr().out
    trainer.test(module, loader, verbose=False)
    assert len(shown) == 1
    trainer.validate(module, loader)
    assert "test_loss" in capsys.readouterr().out


def test_an_unknown_private_name_is_answered_by_a_sentence():
    trainer = L.Trainer(accelerator="cpu", logger=False)
    for owner in (trainer, trainer.fit_loop, trainer.fit_loop.epoch_loop):
        with pytest.raises(AttributeError, match=rf"{type(owner).__name__}.*_data_connector.*from-lightning.md"):
            owner._data_connector  # noqa: B018
        assert not hasattr(owner, "_data_connector")
    with pytest.raises(AttributeError, match=r"no attribute 'max_epoch'$"):
        trainer.max_epoch  # noqa: B018


def test_a_logger_of_ones_own_finds_what_was_saved_since(tmp_path):
    from legato.compat.lightning.pytorch.loggers.utilities import _scan_checkpoints

    class Sends(L.pytorch.loggers.CSVLogger):
        def __init__(self):
            super().__init__(tmp_path)
            self.times, self.sent = {}, []

        def after_save_checkpoint(self, checkpoint_callback):
            for time, path, score, kind in _scan_checkpoints(checkpoint_callback, self.times):
                self.times[path] = time
                self.sent.append((Path(path).name, None if score is None else float(score), kind))

    class Falls(Linear):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 1.0 / (1 + self.current_epoch))

    options = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    logger = Sends()
    saves = L.pytorch.callbacks.ModelCheckpoint(monitor="val_loss", filename="{epoch}", save_top_k=2)
    trainer = L.Trainer(accelerator="cpu", max_epochs=2, logger=logger, callbacks=[saves], **options)
    loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)
    trainer.fit(Falls(torch.nn.Tanh()), loader, loader)
    assert logger.sent == [("epoch=0.ckpt", 1.0, "best_k"), ("epoch=1.ckpt", 0.5, "best_k")]


def test_programs_that_look_for_an_inner_part_are_answered():
    from legato.compat.lightning.pytorch.trainer.connectors import checkpoint_connector

    connector = checkpoint_connector._CheckpointConnector
    assert not hasattr(connector, "restore")
    with pytest.raises(AttributeError, match="internal to Lightning"):
        connector.restore  # noqa: B018
