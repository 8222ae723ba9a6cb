"""LightningCLI: common command lines, with the same files and values as in Lightning."""

import sys

import pytest
import torch
import yaml
from forked import completed, run_program
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from legato.callbacks import Callback
from legato.compat.lightning.pytorch import LightningDataModule, LightningModule, Trainer

jsonargparse = pytest.importorskip("jsonargparse")

from legato.compat.lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from legato.compat.lightning.pytorch.cli import (  # noqa: E402
    LightningArgumentParser,
    LightningCLI,
    OptimizerCallable,
    SaveConfigCallback,
    instantiate_class,
    instantiate_module,
)
from legato.compat.lightning.utilities import load_file  # noqa: E402


class Model(LightningModule):
    def __init__(self, lr: float = 0.1, width: int = 2, out: int = 1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, out)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    validation_step = test_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Callable(Model):
    def __init__(self, optimizer: OptimizerCallable = torch.optim.Adam):
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 4, classes: int = 3):
        super().__init__()
        self.batch_size, self.classes = batch_size, classes

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=self.batch_size)

    val_dataloader = test_dataloader = train_dataloader


class Noted(Callback):
    def __init__(self, word: str = "none"):
        self.word = word


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # without a seed, the command line warns that it uses 0


QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


def test_fit_from_the_command_line(tmp_path):
    args = ["fit", *QUIET, "--model.lr=0.5", "--trainer.max_epochs=2", "--data.batch_size=2", "--seed_everything=7"]
    cli = LightningCLI(Model, Data, args=args)
    assert (cli.model.hparams.lr, cli.datamodule.batch_size, cli.trainer.max_epochs) == (0.5, 2, 2)
    assert cli.trainer.global_step == 8
    saved = yaml.safe_load((tmp_path / "lightning_logs" / "version_0" / "config.yaml").read_text())
    assert saved["model"] == {"lr": 0.5, "width": 2, "out": 1}
    assert (saved["trainer"]["max_epochs"], saved["seed_everything"]) == (2, 7)
    again = LightningCLI(Model, Data, args=["fit", "--config", "lightning_logs/version_0/config.yaml"])
    assert again.trainer.global_step == 8
    assert torch.equal(again.model.layer.weight, cli.model.layer.weight)


def test_a_config_file_with_class_paths(tmp_path):
    here = __name__
    config = {
        "seed_everything": 1,
        "model": {"class_path": f"{here}.Model", "init_args": {"lr": 0.25}},
        "data": {"class_path": f"{here}.Data"},
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 3}},
        "trainer": {
            "max_steps": 3,
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "logger": {
                "class_path": "legato.compat.lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": "l"},
            },
            "callbacks": [
                {"class_path": f"{here}.Noted", "init_args": {"word": "yes"}},
                {
                    "class_path": "legato.compat.lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {"save_top_k": 0},
                },
            ],
        },
    }
    sys.modules.setdefault(here, sys.modules[Model.__module__])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.warns(UserWarning, match="will be overridden by `LightningCLI.configure_optimizers`"):
        cli = LightningCLI(args=["fit", "--config", "config.yaml", "--model.init_args.lr=0.5"])
    assert cli.model.hparams.lr == 0.5
    assert type(cli.trainer.optimizers[0]) is torch.optim.Adam
    assert type(cli.trainer.lr_scheduler_configs[0].scheduler).__name__ == "StepLR"
    assert [callback.word for callback in cli.trainer.callbacks if isinstance(callback, Noted)] == ["yes"]
    assert any(isinstance(callback, ModelCheckpoint) for callback in cli.trainer.callbacks)
    assert type(cli.trainer.logger).__name__ == "CSVLogger"


def test_classes_by_their_bare_names():
    options = {"EarlyStopping": {"monitor": "loss"}, "StochasticWeightAveraging": {"swa_lrs": 0.1}, "Timer": {}}
    for name, arguments in options.items():
        trainer = {
            "accelerator": "cpu",
            "callbacks": {"class_path": name, "init_args": arguments},
            "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}},
            "profiler": {"class_path": "SimpleProfiler"},
            "plugins": {"class_path": "MixedPrecision", "init_args": {"precision": "bf16-mixed", "device": "cpu"}},
        }
        cli = LightningCLI(
            Model, Data, run=False, save_config_callback=None, args={"seed_everything": 1, "trainer": trainer}
        )
        made = {type(item).__name__: type(item).__module__ for item in [*cli.trainer.callbacks, *cli.trainer.loggers]}
        assert {name, "CSVLogger"} <= made.keys()
        assert all(made[item].startswith("legato.compat.lightning.") for item in (name, "CSVLogger"))
        assert type(cli.trainer.profiler).__name__ == "SimpleProfiler"
        assert cli.trainer.precision == "bf16-mixed"


@pytest.mark.parametrize(
    ("name", "options"),
    [("DDPStrategy", {"find_unused_parameters": True}), ("FSDPStrategy", {"sharding_strategy": "SHARD_GRAD_OP"})],
)
def test_strategies_by_their_names_and_arguments(name, options):
    for path in (name, f"legato.compat.lightning.pytorch.strategies.{name}"):
        trainer = {"accelerator": "cpu", "strategy": {"class_path": path, "init_args": options}}
        cli = LightningCLI(Model, Data, run=False, args={"seed_everything": 1, "trainer": trainer})
        made = type(cli.trainer.strategy)
        assert (made.__name__, made.__module__) == (name, "legato.compat.lightning.strategies")
        assert options.items() <= cli.config["trainer"]["strategy"]["init_args"].as_dict().items()


def test_the_logger_of_a_service_takes_the_arguments_of_its_package():
    pytest.importorskip("wandb")
    options = {"project": "p", "offline": True, "entity": "us", "tags": ["a"]}
    logger = {"class_path": "WandbLogger", "init_args": options}
    args = {"seed_everything": 1, "trainer": {"accelerator": "cpu", "logger": logger}}
    init_args = LightningCLI(Model, Data, run=False, args=args).config["trainer"]["logger"]["init_args"]
    assert options.items() <= init_args.as_dict().items()


def test_a_trainer_without_callbacks_gets_none():
    class Small(Trainer):
        def __init__(self, max_epochs: int = 1):
            super().__init__(max_epochs=max_epochs, accelerator="cpu", logger=False)

    with pytest.warns(UserWarning, match="Small` class does not expose the `callbacks`"):
        cli = LightningCLI(Model, run=False, trainer_class=Small, args=[], trainer_defaults={"callbacks": [Noted()]})
    assert not any(isinstance(callback, Noted) for callback in cli.trainer.callbacks)


def test_a_config_begins_with_the_version(capsys):
    with pytest.raises(SystemExit):
        LightningCLI(Model, run=False, args=["--print_config"])
    assert capsys.readouterr().out.startswith("# lightning.pytorch==2.6")


def test_without_a_run():
    cli = LightningCLI(
        Model, Data, run=False, args=[*QUIET, "--trainer.max_epochs=1"], trainer_defaults={"max_steps": 1}
    )
    assert cli.subcommand is None
    assert isinstance(cli.trainer, Trainer)
    cli.trainer.fit(cli.model, cli.datamodule)
    assert cli.trainer.global_step == 1
    assert cli.config.model.lr == 0.1


class Linked(LightningCLI):
    order: list[str]

    def add_arguments_to_parser(self, parser: LightningArgumentParser):
        parser.add_argument("--word", default="a")
        parser.link_arguments("data.batch_size", "model.width")
        parser.link_arguments("data.classes", "model.out", apply_on="instantiate")
        parser.add_lightning_class_args(Noted, "noted")
        parser.set_defaults({"noted.word": "own", "trainer.max_epochs": 1})

    def before_fit(self):
        self.order = ["before"]

    def after_fit(self):
        self.order.append("after")


def test_a_subclass_with_links():
    cli = Linked(Model, Data, args=["fit", *QUIET, "--word=b"], save_config_callback=None)
    assert (cli.model.hparams.width, cli.model.layer.out_features) == (4, 3)
    assert cli.config["fit"]["word"] == "b"
    assert [callback.word for callback in cli.trainer.callbacks if isinstance(callback, Noted)] == ["own"]
    assert cli.order == ["before", "after"]


def test_optimizers_as_arguments():
    args = [*QUIET, "--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.3", "--trainer.max_steps=1"]
    cli = LightningCLI(Callable, Data, args=["fit", *args], save_config_callback=None, auto_configure_optimizers=False)
    assert cli.trainer.optimizers[0].defaults["lr"] == 0.3
    optimizer = instantiate_class(cli.model.parameters(), {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.2}})
    assert optimizer.defaults["lr"] == 0.2
    assert instantiate_module(Model, {"lr": 0.4}).hparams.lr == 0.4


def test_other_stages(capsys):
    cli = LightningCLI(Model, Data, args=["validate", *QUIET, "--verbose=false"], save_config_callback=None)
    assert cli.trainer.state.fn == "validate"
    with pytest.raises(SystemExit):
        LightningCLI(Model, Data, args=["fit", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["model"]["lr"] == 0.1
    with pytest.raises(SystemExit):
        LightningCLI(Model, Data, args=["fit", "--model.lrr=1"])
    assert "lrr" in capsys.readouterr().err


def test_saving_the_config(tmp_path):
    class Own(SaveConfigCallback):
        def save_config(self, trainer, pl_module, stage):
            (tmp_path / "own.txt").write_text(self.parser.dump(self.config))

    args = ["fit", *QUIET, "--trainer.max_steps=1", "--trainer.logger=false"]
    LightningCLI(Model, Data, args=args, save_config_callback=Own, save_config_kwargs={"save_to_log_dir": False})
    assert "max_steps: 1" in (tmp_path / "own.txt").read_text()
    with pytest.raises(ValueError, match="save_to_log_dir"):
        SaveConfigCallback(None, None, save_to_log_dir=False)


@pytest.mark.slow
def test_several_processes_have_it_too(tmp_path):
    args = [
        "fit",
        *QUIET,
        "--trainer.devices=2",
        "--trainer.strategy=ddp_spawn",
        "--trainer.max_epochs=1",
        "--data.batch_size=2",
        "--seed_everything=0",
    ]
    cli = LightningCLI(Model, Data, args=args)
    assert cli.trainer.global_step == 2
    assert (tmp_path / "lightning_logs" / "version_0" / "config.yaml").is_file()


WITHOUT = """
import sys
sys.modules["jsonargparse"] = None
try:
    from legato.compat.lightning.pytorch.cli import LightningCLI
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.slow
def test_without_jsonargparse():
    done = completed(run_program, "-c", WITHOUT)
    assert done.returncode == 0, done.stderr
    assert "pip install 'legato[lightning]'" in done.stdout


# --- hyperparameters --------------------------------------------------------------------------------------------------
class Part(nn.Module):
    def __init__(self, width: int = 2):
        super().__init__()
        self.width = width


class Nested(Model):
    def __init__(self, part: Part, lr: float = 0.1):
        super().__init__(lr)
        self.save_hyperparameters()
        self.part = part


INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"


def test_hyperparameters_are_those_of_the_command_line():
    words = [*QUIET, "--model.part.class_path=Part", "--model.part.init_args.width=5", "--data.classes=4"]
    cli = LightningCLI(Nested, Data, args=["fit", *words, "--trainer.max_epochs=1", "--seed_everything=1"])
    described = {"class_path": f"{__name__}.Part", "init_args": {"width": 5}}
    assert cli.model.hparams == {"part": described, "lr": 0.1, "_instantiator": INSTANTIATOR}
    path = cli.trainer.checkpoint_callback.best_model_path
    assert load_file(path)["hyper_parameters"]["part"] == described
    loaded = Nested.load_from_checkpoint(path)
    assert (loaded.part.width, loaded.hparams.lr) == (5, 0.1)
    dry = ["fit", *words, "--trainer.fast_dev_run=1"]
    off = LightningCLI(Nested, Data, args=dry, load_from_checkpoint_support=False)
    assert isinstance(off.model.hparams.part, Part)


def test_a_checkpoint_gives_its_hyperparameters_to_the_next_command_line():
    first = LightningCLI(Model, Data, args=["fit", *QUIET, "--model.width=9", "--trainer.max_epochs=1"])
    path = first.trainer.checkpoint_callback.best_model_path
    with pytest.warns(UserWarning, match="The dirpath has changed"):  # without a logger, the folder differs
        second = LightningCLI(Model, Data, args=["validate", *QUIET, f"--ckpt_path={path}", "--trainer.logger=false"])
    assert second.model.hparams.width == 9


def test_a_subclass_is_built_again_if_it_is_imported(tmp_path):
    words = [*QUIET, f"--model={__name__}.Model", "--model.init_args.width=3", "--trainer.max_epochs=1"]
    cli = LightningCLI(LightningModule, Data, args=["fit", *words], subclass_mode_model=True)
    assert cli.model.hparams["_class_path"] == f"{__name__}.Model"
    path = cli.trainer.checkpoint_callback.best_model_path
    loaded = LightningModule.load_from_checkpoint(path)
    assert (type(loaded), loaded.hparams.width) == (Model, 3)
    with pytest.raises(ValueError, match="not an imported subclass of Nested"):
        Nested.load_from_checkpoint(path)


def test_a_config_names_the_classes_as_lightning_does_where_a_program_means_legato_by_it(tmp_path, monkeypatch):
    words = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=loss", "--trainer.logger=CSVLogger"]
    words += [f"--trainer.logger.save_dir={tmp_path}", f"--model={__name__}.Model"]
    cli = LightningCLI(args=[*QUIET, *words], run=False)
    inner = cli.parser.dump(cli.config)
    assert yaml.safe_load(inner)["trainer"]["logger"]["class_path"].startswith("legato.compat.lightning.")
    monkeypatch.setitem(sys.modules, "lightning", sys.modules["legato.compat.lightning"])
    written = yaml.safe_load(cli.parser.dump(cli.config))
    assert written["trainer"]["logger"]["class_path"] == "lightning.pytorch.loggers.CSVLogger"
    assert written["trainer"]["callbacks"][0]["class_path"] == "lightning.pytorch.callbacks.EarlyStopping"
    assert written["model"]["class_path"] == f"{__name__}.Model"
