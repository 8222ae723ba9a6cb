"""A run in which something fails at a chosen point, and what of the process is not as it was before."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import Memory, Tiny, make_loader, make_trainer
from torch import distributed

import legato as lg
from legato.callbacks import Checkpoint
from legato.trainer.hooks import CALLBACK_HOOKS, TASK_HOOKS

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")]
EVALUATIONS = ("test", "predict")
NOT_CALLED = ("on_load_checkpoint", "on_processes_changed")


def called_by_fit(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name not in NOT_CALLED and not name.startswith(("on_test", "on_predict"))]


POINTS = [
    *(f"callback.{name}" for name in called_by_fit(CALLBACK_HOOKS)),
    *(f"task.{name}" for name in called_by_fit(TASK_HOOKS)),
    *(f"data.{name}" for name in ("prepare_data", "setup", "teardown", "on_exception")),
    "strategy.finish",
    "strategy.teardown",
    "background save",
]
ON_ALL_RANKS = [point for point in POINTS if point not in ("data.prepare_data", "background save")]
"""The points that every rank reaches."""
LOGGER_POINTS = [f"logger.{name}" for name in ("open", "log_metrics", "save", "finalize")]


class Injected(Exception):
    """What goes wrong at the chosen point."""


class Users(Exception):
    """What the user's training_step raises."""


def failing(name: str) -> Callable[..., None]:
    """Return a function of this name that fails."""

    def fail(*_: Any, **__: Any) -> None:
        raise Injected("injected")

    fail.__name__ = name
    return fail


class Wrong(Tiny):
    """Validates; its training_step fails where it is to."""

    def __init__(self, fails: bool, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.fails, self.ranks = fails, ranks

    def training_step(self, batch, batch_idx):
        if self.fails and batch_idx == 1 and self.global_rank in self.ranks:
            raise Users("the user's")
        self.log("loss", 0.0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        pass


class Data(lg.DataModule):
    """Five batches to train on, two to validate on."""

    def train_dataloader(self):
        return make_loader(20)

    def val_dataloader(self):
        return make_loader(8)


def run(folder: Path, point: str, fails: bool, ranks: tuple[int, ...] = (0, 1), **options: Any) -> BaseException | None:
    """Fit with a failure at `point`, and in training_step where it `fails`; return what reached the caller."""
    owner, _, name = point.partition(".")
    task, data, logger = Wrong(fails, ranks), Data(), Memory()
    callback, saver = lg.Callback(), Checkpoint(every_n_train_steps=1)
    if owner == "background save":
        saver = Checkpoint(dirpath=folder / "taken", every_n_train_steps=1, asynchronous=True)
        (folder / "taken").mkdir()
        (folder / "taken" / f"step-{1 if fails else 5:08d}").touch()  # a file stands where the checkpoint is to be
    made = make_trainer(
        folder,
        logger=logger,
        callbacks=[callback, saver],
        enable_checkpointing=True,
        log_every_n_steps=1,
        deterministic=True,
        detect_anomaly=True,
        threads=2,
        **options,
    )
    objects = {"callback": callback, "task": task, "data": data, "logger": logger, "strategy": made.strategy}
    if owner in objects:
        setattr(objects[owner], name, failing(name))
    try:
        made.fit(task, datamodule=data)
    except BaseException as error:
        assert all(module.training for module in task.modules()), "training mode"
        return error
    return None


def state_of_process() -> dict[str, Any]:
    """Everything of this process that a run may change, and that others may depend on."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return {
        "signals": [signal.getsignal(number) for number in SIGNALS],
        "wakeup": wakeup,
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fills memory": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "anomaly": torch.is_anomaly_enabled(),
        "threads of torch": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "precision": torch.get_float32_matmul_precision(),
        "warnings": list(warnings.filters),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        "folder": os.getcwd(),
        "hooks": (sys.excepthook, threading.excepthook),
        "group": distributed.is_initialized() and distributed.get_world_size(),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Say what is not as it was."""
    return [f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]


def say(error: BaseException | None) -> tuple[str, list[str]]:
    """Return the class and text of an error, and its notes; "" where there is none."""
    if error is None:
        return "", []
    return f"{type(error).__name__}: {error}", getattr(error, "__notes__", [])


def run_all(folder: Path) -> dict[tuple[str, bool], tuple[str, list[str], list[str]]]:
    """In each of several ranks: fail at every point on all of them alike; return what came of it on this one."""
    make_trainer(folder, strategy="ddp", devices=2).fit(Tiny(), make_loader(8))  # makes the group, which stays
    results = {}
    for point in ON_ALL_RANKS:
        for fails in (False, True):
            before = state_of_process()
            error = run(folder, point, fails, strategy="ddp", devices=2)
            results[point, fails] = (*say(error), differences(before, state_of_process()))
    return results
