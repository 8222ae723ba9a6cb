"""Examples of Lightning's documentation, compared with Lightning."""

import signal

import lightning.pytorch as real
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import legato.compat.lightning.pytorch as room
from legato.compat.lightning.pytorch.strategies import StrategyRegistry

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's warnings

BOTH = pytest.mark.parametrize("package", [real, room])
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def loader(count=8, batch_size=2):
    return DataLoader(torch.arange(2.0 * count).reshape(count, 2) / count, batch_size=batch_size)


def small(package, **methods):
    """Return a module of a package with additional methods."""

    class Small(package.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.lr, self.batch_size, self.seen = nn.Linear(2, 1), 0.1, 2, []

        def training_step(self, batch, batch_idx):
            return self.layer(batch).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    return type("Small", (Small,), methods)()


def fitted(package, module, validation=None, **options):
    trainer = package.Trainer(**QUIET, **{"max_epochs": 2, **options})
    trainer.fit(module, loader(), validation)
    return trainer


# --- optimization -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("own_step", [False, True])
def test_on_before_backward_sees_the_loss_as_it_was_returned(own_step):
    def on_before_backward(self, loss):
        self.seen.append(round(loss.item(), 5))

    methods = {"on_before_backward": on_before_backward}
    if own_step:
        methods["optimizer_step"] = lambda self, epoch, batch_idx, optimizer, closure: optimizer.step(closure=closure)
    modules = [small(package, **methods) for package in (real, room)]
    for package, module in zip((real, room), modules, strict=True):
        fitted(package, module, accumulate_grad_batches=2)
    assert modules[1].seen == pytest.approx([2 * share for share in modules[0].seen], abs=1e-4)
    assert torch.allclose(modules[0].layer.weight, modules[1].layer.weight)


@BOTH
def test_an_epoch_that_on_train_batch_start_ends_has_no_validation(package):
    module = small(
        package,
        on_train_batch_start=lambda self, batch, batch_idx: -1 if self.current_epoch == 1 and batch_idx == 1 else None,
        validation_step=lambda self, batch, batch_idx: self.seen.append(self.current_epoch),
    )
    trainer = fitted(package, module, loader(2), max_epochs=3, num_sanity_val_steps=0)
    assert (module.seen, trainer.global_step, trainer.current_epoch) == ([0, 2], 9, 3)


# --- callbacks --------------------------------------------------------------------------------------------------------
def test_a_trainer_is_interrupted_once_fit_has_raised():
    class Failing(room.Callback):
        def on_train_batch_end(self, trainer, pl_module, *arguments):
            raise RuntimeError("full")

    module = small(room)
    with pytest.raises(RuntimeError, match="full"):
        fitted(room, module, callbacks=Failing())
    assert module.trainer.interrupted


# --- tuning -----------------------------------------------------------------------------------------------------------
def at_epochs(package, kind, search, *epochs):
    """Return a finder that searches when these epochs begin, like `FineTuneLearningRateFinder`."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch in epochs:
            getattr(self, search)(trainer, pl_module)

    methods = {"on_fit_start": lambda self, *arguments: None, "on_train_epoch_start": on_train_epoch_start}
    return type(kind, (getattr(package.callbacks, kind),), methods)


@pytest.mark.parametrize("source", ["loaders", "data module", "module"])
def test_a_finder_sweeps_learning_rates_within_a_fit(source):
    weights, rates = [], []
    for package in (real, room):
        module = small(package)
        finder = at_epochs(package, "LearningRateFinder", "lr_find", 0)(min_lr=1e-3, max_lr=0.5, num_training_steps=20)
        trainer = package.Trainer(**QUIET, max_epochs=1, callbacks=finder)
        data = loader(50)
        if source == "loaders":
            trainer.fit(module, data)
        elif source == "data module":
            datamodule = package.LightningDataModule()
            datamodule.train_dataloader = lambda data=data: data
            trainer.fit(module, datamodule=datamodule)
        else:
            module.train_dataloader = lambda data=data: data
            trainer.fit(module)
        rates.append([module.lr, trainer.optimizers[0].param_groups[0]["lr"]])
        weights.append(module.layer.weight)
        assert trainer.global_step == 25
    assert rates[0] == pytest.approx(rates[1])
    assert rates[1][0] == rates[1][1] != 0.1
    assert torch.allclose(*weights)


def test_a_finder_sweeps_at_every_epoch_that_it_names():
    """Lightning sweeps only at the first epoch: at later ones, the sweep ends before a step."""
    module, tried = small(room), []
    kind = at_epochs(room, "LearningRateFinder", "lr_find", 0, 1)
    kind.search = lambda self, *args, **data: (super(kind, self).search(*args, **data), tried.append(self.optimal_lr))
    fitted(room, module, callbacks=kind(num_training_steps=20))
    assert [len(sweep.results["lr"]) for sweep in tried] == [8, 8]


def test_a_finder_searches_batch_sizes_within_a_run():
    """Sizes are those of the following steps; Lightning trains one epoch with them."""
    module = small(
        room,
        train_dataloader=lambda self: loader(16, self.batch_size),
        on_train_batch_end=lambda self, outputs, batch, batch_idx: self.seen.append(len(batch)),
    )
    finder = at_epochs(room, "BatchSizeFinder", "scale_batch_size", 1)(max_trials=2)
    trainer = room.Trainer(**QUIET, max_epochs=2, callbacks=finder)
    trainer.fit(module)
    assert (module.batch_size, finder.optimal_batch_size, trainer.global_step) == (4, 4, 12)
    assert module.seen == [2] * 8 + [4] * 4


@BOTH
def test_a_finder_searches_batch_sizes_within_a_test(package):
    def on_test_start(self, trainer, pl_module):
        self.scale_batch_size(trainer, pl_module)
        pl_module.seen.clear()

    methods = {"on_fit_start": lambda self, *arguments: None, "on_test_start": on_test_start}
    kind = type("Own", (package.callbacks.BatchSizeFinder,), methods)
    module = small(
        package,
        test_dataloader=lambda self: loader(16, self.batch_size),
        test_step=lambda self, batch, batch_idx: self.seen.append(len(batch)),
    )
    package.Trainer(**QUIET, callbacks=kind(max_trials=2)).test(module, verbose=False)
    assert module.batch_size == 4
    if package is room:  # its trials are those of a copy
        assert module.seen == [4, 4, 4, 4]


# --- strategies -------------------------------------------------------------------------------------------------------
def test_a_strategy_is_registered_under_a_word():
    @StrategyRegistry.register("own_ddp", description="with unused parameters", mark=5)
    class Own(room.strategies.DDPStrategy):
        def __init__(self, mark, **options):
            super().__init__(**options)
            self.mark = mark

    StrategyRegistry.register("ddp_unused", room.strategies.DDPStrategy, find_unused_parameters=True)
    try:
        assert {"own_ddp", "ddp_unused"} <= StrategyRegistry.keys()
        strategy = room.Trainer(**QUIET, strategy="own_ddp", devices=1).strategy
        assert (type(strategy), strategy.mark) == (Own, 5)
        assert type(StrategyRegistry.get("own_ddp")) is Own
        assert room.Trainer(**QUIET, strategy="ddp_unused", devices=1).strategy.finds_unused
        with pytest.raises(ValueError, match="override=True"):
            StrategyRegistry.register("own_ddp", Own)
    finally:
        StrategyRegistry.remove("own_ddp")
        StrategyRegistry.remove("ddp_unused")
    assert "own_ddp" not in StrategyRegistry


def test_the_signals_that_requeue_a_job_may_be_asked_for():
    environment = room.plugins.environments.SLURMEnvironment
    assert environment(requeue_signal=signal.SIGUSR1).requeue_signal == signal.SIGUSR1
    assert room.Trainer(**QUIET, plugins=[environment(requeue_signal=signal.SIGTERM)]).world_size == 1
    with pytest.raises(NotImplementedError, match="SIGUSR1 requeue"):
        environment(requeue_signal=signal.SIGHUP)
