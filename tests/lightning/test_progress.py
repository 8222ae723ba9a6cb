"""Counts of a trainer in every hook of a fit, beside the real package."""

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
    """Return what the loops say; what is not the same in a hook is left out there."""
    epochs, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    batches = loop.batch_progress
    found = {
        "steps": (trainer.global_step, loop._batches_that_stepped),
        "epochs": (trainer.current_epoch, trainer.max_epochs, trainer.min_epochs),
        "indices": (loop.batch_idx, loop.total_batch_idx, loop._should_accumulate()),
        "total": (batches.total.ready, batches.total.completed),
    }
    for name, tracker in (("epoch", epochs.epoch_progress.current), ("batch", batches.current)):
        found[name] = (tracker.ready, tracker.started, tracker.processed, tracker.completed)
    if hook == "on_train_batch_start" or (hook == "on_train_batch_end" and trainer.accumulate_grad_batches > 1):
        found.pop("batch")  # started, or processed, here a hook earlier or later
    if hook != "on_train_epoch_start":  # where Lightning still tells of the epoch before
        found["last"] = trainer.is_last_batch
    found["done"] = loop.done, epochs.done  # the last, since Lightning's counts the epoch where it is asked
    return found


def trace(package, manual, **options):
    """Return the counts in every hook of a fit, and after it."""
    found = []

    class Counts(package.Callback):
        pass

    def record(name):
        return lambda self, trainer, *_, **__: found.append((name, counts(trainer, name)))

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
    return [*found, ("after", counts(trainer, "after"))]


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
    own, other = (package.Trainer(**QUIET, **options) for package in (room, real))
    assert {name: str(getattr(own, name)) for name in names} == {name: str(getattr(other, name)) for name in names}


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
    """Two optimizers by hand, of which one does not count; mixed into a module of each package."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.seen = False, []
        self.generator, self.critic = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        second._on_before_step = lambda: self.trainer.profiler.start("optimizer_step")
        second._on_after_step = lambda: self.trainer.profiler.stop("optimizer_step")
        for optimizer, part in ((first, self.generator), (second, self.critic)):
            optimizer.zero_grad()
            self.manual_backward(part(batch).sum())
            optimizer.step()
        self.seen.append((batch_idx, self.global_step))

    def configure_optimizers(self):
        return torch.optim.SGD(self.generator.parameters(), 0.01), torch.optim.Adam(self.critic.parameters(), 0.01)


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_of_two_counts_the_steps():
    found = []
    for package in (room, real):
        module = type("Module", (GAN, package.LightningModule), {})()
        trainer = package.Trainer(**QUIET, max_steps=5)
        trainer.fit(module, DataLoader(torch.ones(16, 2), batch_size=2))
        found.append((module.seen, trainer.global_step))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_has_lightnings_class_and_torchs():
    found = []
    for package in (room, real):
        kind = package.core.optimizer.LightningOptimizer

        class Module(GAN, package.LightningModule):
            def on_train_start(self):
                for one in self.optimizers():
                    raw = one.optimizer
                    classes = isinstance(one, kind), isinstance(one, type(raw))  # noqa: B023
                    found[-1].append((type(one).__name__, one.__class__.__name__, *classes))
                    assert one._optimizer is raw
                    assert one.param_groups is raw.param_groups
                    assert kind._to_lightning_optimizer(one, self.trainer.strategy) is one  # noqa: B023

        found.append([])
        package.Trainer(**QUIET, max_steps=1).fit(Module(), DataLoader(torch.ones(4, 2), batch_size=2))
        plain = kind(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1))
        found[-1].append((type(plain).__name__, isinstance(plain, torch.optim.SGD)))
    assert found[0] == found[1]
    ours = room.core.optimizer.LightningOptimizer
    kinds = ours.__mro__[:-1]
    assert not any("__class__" in vars(kind) for kind in kinds)  # a class of its own, not one that is shown
    scheduler = torch.optim.lr_scheduler.StepLR(ours(plain.optimizer), 1)
    assert scheduler.optimizer.optimizer is plain.optimizer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("manual", [False, True])
def test_outputs_of_a_batch_without_a_loss(manual, tmp_path):
    found = []
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
            found.append(module.seen)
    assert found[:2] == found[2:] == [[{}, {"loss": 0.0}] * 2] * 2
