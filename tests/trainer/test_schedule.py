"""Validation, schedulers and the end of a run happen on time and once, even after a resume from any hook."""

import pytest
from tiny import Tiny, make_loader
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset

import legato as lg


class Scheduled(Tiny):
    """Notes its learning rate in each hook, with a scheduler by steps or epochs."""

    def __init__(self, interval="epoch"):
        super().__init__()
        self.interval, self.rates = interval, []

    def note(self, hook):
        self.rates.append((hook, self.trainer.optimizers[0].param_groups[0]["lr"]))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note("batch end")

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.note("validation")

    def validation_step(self, batch, batch_idx):
        """Log nothing."""

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=1.0)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.5), "interval": self.interval}]


class Stream(IterableDataset):
    """Has no length."""

    def __iter__(self):
        return iter(make_loader().dataset)


def test_schedulers_by_epochs_step_with_the_last_step(trainer):
    task = Scheduled()
    trainer(max_epochs=2, limit_train_batches=2).fit(task, make_loader(), make_loader())
    epoch = [("batch end", 1.0), ("batch end", 0.5), ("validation", 0.5)]
    assert task.rates == epoch + [(hook, rate / 2) for hook, rate in epoch]


def test_schedulers_by_epochs_step_before_the_validation_that_ends_a_stream(trainer):
    task = Scheduled()
    trainer(max_epochs=1).fit(task, DataLoader(Stream(), batch_size=9), make_loader())
    assert task.rates == [*[("batch end", 1.0)] * 3, ("validation", 0.5)]


class Stopping(lg.Callback):
    """Asks the run to stop after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, task):
        trainer.should_stop |= trainer.global_step == self.step


@pytest.mark.parametrize(("step", "validations"), [(3, 1), (5, 1), (6, 2)])  # an epoch has 5 steps
def test_a_run_that_is_asked_to_stop_validates_once_before_it_ends(trainer, step, validations):
    task = Scheduled()
    trainer(max_epochs=3, callbacks=[Stopping(step)]).fit(task, make_loader(), make_loader())
    assert [hook for hook, _ in task.rates].count("validation") == validations
    assert task.rates[-1][0] == "validation"


def test_a_run_that_ends_by_max_steps_within_an_epoch_does_not_validate(trainer):
    task = Scheduled()
    trainer(max_steps=3).fit(task, make_loader(), make_loader())
    assert "validation" not in dict(task.rates)


class Watched(Tiny):
    """ReduceLROnPlateau by steps, which monitors the validation."""

    def validation_step(self, batch, batch_idx):
        self.log("seen", float(self.global_step))

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=1.0)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [{"scheduler": scheduler, "monitor": "seen", "interval": "step", "strict": False}]


def saving(hook, step):
    def save(self, trainer, task, *arguments):
        if trainer.global_step == step and not trainer.sanity_checking:
            trainer.save_checkpoint(trainer.run_dir / "checkpoints" / "here")

    return type("Saving", (lg.Callback,), {hook: save})()


@pytest.mark.parametrize(
    ("hook", "step"),
    [
        ("on_train_batch_end", 2),
        ("on_train_batch_end", 5),
        ("on_validation_start", 2),
        ("on_validation_end", 2),
        ("on_train_epoch_end", 5),
    ],
)
def test_plateaus_by_steps_step_once_from_any_checkpoint(trainer, hook, step):
    options = {"max_epochs": 2, "val_check_interval": 2, "num_sanity_val_steps": 0}
    loaders = make_loader(), make_loader()
    made = trainer(**options, enable_checkpointing=True, callbacks=[saving(hook, step)])
    made.fit(Watched(), *loaders)
    source = made.run_dir / "checkpoints" / "here"
    resumed = trainer(**options)
    resumed.fit(Watched(), *loaders, resume=source)
    scheduler, again = (fitted.lr_scheduler_configs[0].scheduler.state_dict() for fitted in (made, resumed))
    assert scheduler == again
