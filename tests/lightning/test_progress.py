"""Counts of a trainer in every hook of a fit, compared with Lightning."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

import legato.compat.lightning.pytorch as room

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as real

QUIET = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    "accelerator": "cpu",
}
HOOKS = (
    *("setup", "on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_train_start"),
    *("on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward"),
    *("on_before_optimizer_step", "on_train_batch_end", "on_validation_start", "on_validation_batch_end"),
    *("on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"),
)


def counts(trainer, hook):
    """Return the counts of the loops, without those that differ in a hook."""
    epochs, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    batches = loop.batch_progress
    counts = {
        "steps": (trainer.global_step, loop._batches_that_stepped),
        "epochs": (trainer.current_epoch, trainer.max_epochs, trainer.min_epochs),
        "indices": (loop.batch_idx, loop.total_batch_idx, loop._should_accumulate()),
        "total": (batches.total.ready, batches.total.completed),
    }
    for name, tracker in (("epoch", epochs.epoch_progress.current), ("batch", batches.current)):
        counts[name] = (tracker.ready, tracker.started, tracker.processed, tracker.completed)
    if hook == "on_train_batch_start" or (hook == "on_train_batch_end" and trainer.accumulate_grad_batches > 1):
        counts.pop("batch")  # started or processed a hook earlier or later than in Lightning
    if hook != "on_train_epoch_start":  # Lightning still has the counts of the previous epoch
        counts["last"] = trainer.is_last_batch
    counts["done"] = loop.done, epochs.done  # last, because Lightning counts the epoch when it is read
    return counts


def trace(package, manual, **options):
    """Return the counts in every hook of a fit, and after it."""
    results = []

    class Counts(package.Callback):
        pass

    def record(name):
        return lambda self, trainer, *_, **__: results.append((name, counts(trainer, name)))

    for name in HOOKS:
        setattr(Counts, name, record(name))

    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.automatic_optimization = torch.nn.Linear(2, 1), not manual

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).sum()
            if manual:
                optimizer = self.optimizers()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("loss", self.layer(batch).sum())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = package.Trainer(**{**QUIET, "max_epochs": 2, **options}, callbacks=[Counts()])
    data = [DataLoader(torch.ones(size, 2), batch_size=2) for size in (8, 4)]
    trainer.fit(Module(), *data)
    return [*results, ("after", counts(trainer, "after"))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("manual", "options"),
    [
        (False, {}),
        (False, {"accumulate_grad_batches": 3}),
        (False, {"val_check_interval": 2}),
        (False, {"val_check_interval": 0.0, "max_epochs": 1}),
        (False, {"max_steps": 6}),
        (False, {"max_epochs": None, "max_steps": 3, "val_check_interval": 2, "min_steps": 1}),
        (True, {}),
    ],
)
def test_counts_in_every_hook(manual, options, tmp_path):
    for ours, theirs in zip(
        *(trace(package, manual, **options, default_root_dir=tmp_path) for package in (room, real)), strict=True
    ):
        assert ours == theirs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"max_steps": 3}, {"num_sanity_val_steps": -1}, {"fast_dev_run": True}])
def test_limits_before_a_run(options):
    names = ("max_epochs", "min_epochs", "max_steps", "min_steps", "num_sanity_val_steps", "_detect_anomaly")
    names += ("_model_registry", "_val_check_time_interval", "state", "val_check_batch")
    ours, theirs = (package.Trainer(**QUIET, **options) for package in (room, real))
    assert {name: str(getattr(ours, name)) for name in names} == {name: str(getattr(theirs, name)) for name in names}


@pytest.mark.filterwarnings("ignore")
def test_a_barebones_trainer_keeps_no_values(tmp_path):
    class Module(room.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).sum()
            self.log_dict({"loss": loss, "other": 1.0})
            self.log("third", 1.0)
            return loss

        validation_step = training_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = room.Trainer(barebones=True, max_epochs=1, accelerator="cpu", default_root_dir=tmp_path)
    data = DataLoader(torch.ones(4, 2))
    trainer.fit(Module(), data, data)
    assert trainer.callback_metrics == trainer.logged_metrics == {}
    assert trainer.validate(Module(), data) == [{}]


class GAN:
    """Two manual optimizers, one of which does not count; a mixin for a module of each package."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.seen = False, []
        self.generator, self.critic = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        second._on_before_step = lambda: self.trainer.profiler.start("optimizer_step")
        second._on_after_step = lambda: self.trainer.profiler.stop("optimizer_step")
        for optimizer, network in ((first, self.generator), (second, self.critic)):
            optimizer.zero_grad()
            self.manual_backward(network(batch).sum())
            optimizer.step()
        self.seen.append((batch_idx, self.global_step))

    def configure_optimizers(self):
        return torch.optim.SGD(self.generator.parameters(), 0.01), torch.optim.Adam(self.critic.parameters(), 0.01)


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_of_two_counts_the_steps():
    results = []
    for package in (room, real):
        module = type("Module", (GAN, package.LightningModule), {})()
        trainer = package.Trainer(**QUIET, max_steps=5)
        trainer.fit(module, DataLoader(torch.ones(16, 2), batch_size=2))
        results.append((module.seen, trainer.global_step))
    assert results[0] == results[1]


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_has_lightnings_class_and_torchs():
    results = []
    for package in (room, real):
        kind = package.core.optimizer.LightningOptimizer

        class Module(GAN, package.LightningModule):
            def on_train_start(self):
                for optimizer in self.optimizers():
                    raw = optimizer.optimizer
                    classes = isinstance(optimizer, kind), isinstance(optimizer, type(raw))  # noqa: B023
                    results[-1].append((type(optimizer).__name__, optimizer.__class__.__name__, *classes))
                    assert optimizer._optimizer is raw
                    assert optimizer.param_groups is raw.param_groups
                    assert kind._to_lightning_optimizer(optimizer, self.trainer.strategy) is optimizer  # noqa: B023

        results.append([])
        package.Trainer(**QUIET, max_steps=1).fit(Module(), DataLoader(torch.ones(4, 2), batch_size=2))
        plain = kind(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1))
        results[-1].append((type(plain).__name__, isinstance(plain, torch.optim.SGD)))
    assert results[0] == results[1]
    ours = room.core.optimizer.LightningOptimizer
    kinds = ours.__mro__[:-1]
    assert not any("__class__" in vars(kind) for kind in kinds)  # a separate class that is not shown
    scheduler = torch.optim.lr_scheduler.StepLR(ours(plain.optimizer), 1)
    assert scheduler.optimizer.optimizer is plain.optimizer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("manual", [False, True])
def test_outputs_of_a_batch_without_a_loss(manual, tmp_path):
    results = []
    for package in (room, real):

        class Module(package.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer, self.automatic_optimization, self.seen = torch.nn.Linear(2, 1), not manual, []

            def training_step(self, batch, batch_idx):
                return self.layer(batch).sum() * 0 if batch_idx % 2 else None

            def on_train_batch_end(self, outputs, batch, batch_idx):
                self.seen.append({name: float(value) for name, value in outputs.items()})
                outputs["own"] = 1

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.01)

        for every in (1, 2):
            module, options = Module(), {"accumulate_grad_batches": 1 if manual else every}
            trainer = package.Trainer(**QUIET, **options, max_epochs=1, default_root_dir=tmp_path)
            trainer.fit(module, DataLoader(torch.ones(4, 2)))
            results.append(module.seen)
    assert results[:2] == results[2:] == [[{}, {"loss": 0.0}] * 2] * 2
