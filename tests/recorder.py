"""Tasks and callbacks that write down every call of a hook."""

import functools

from tiny import Validated
from torch.optim.lr_scheduler import StepLR

import legato as lg
from legato.tasks.data_hooks import DataHooks
from legato.trainer.hooks import CALLBACK_HOOKS, TASK_HOOKS

TASK_METHODS = (
    *TASK_HOOKS,
    *(name for name in vars(DataHooks) if not name.startswith("_")),
    *("configure_model", "configure_optimizers", "training_step", "validation_step", "test_step", "predict_step"),
    *("backward", "optimizer_zero_grad", "configure_gradient_clipping", "optimizer_step", "lr_scheduler_step"),
)


def recording(base, names, who):
    """Return a subclass of `base` that writes every call of `names` to its list `record`."""

    def wrap(name):
        @functools.wraps(getattr(base, name))
        def method(self, *arguments, **options):
            self.record.append((name, who))
            return getattr(base, name)(self, *arguments, **options)

        return method

    return type(f"Recording{base.__name__}", (base,), {name: wrap(name) for name in names})


class Scheduled(Validated):
    """Has a scheduler that goes by steps and one that goes by epochs."""

    def __init__(self, record):
        super().__init__()
        self.record = record

    def test_step(self, batch, batch_idx):
        self.loss(batch)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        by_step = {"scheduler": StepLR(optimizer, 1), "interval": "step"}
        return [optimizer], [by_step, StepLR(optimizer, 1)]


RecordingTask = recording(Scheduled, TASK_METHODS, "T")
Recorder = recording(lg.Callback, CALLBACK_HOOKS, "C")


class LateRecorder(Recorder, lg.callbacks.MonitoringCallback):
    """Comes after the task."""


def make_recorder(kind, record):
    made = kind()
    made.record = record
    return made
