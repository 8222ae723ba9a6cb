"""A run that hangs in user code in many ways, told to end by signals that it does not answer."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from tiny import Tiny, make_data, make_loader
from torch.utils.data import DataLoader, Dataset
from waiting import leave

import legato as lg
from legato.callbacks import Checkpoint
from legato.trainer.processes import signals


def wait_in_c(library: ctypes.CDLL) -> None:
    """Wait for ever where no signal gets through: by CDLL without Python's lock, as a collective, by PyDLL with it."""
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


SLOW = 0.6
"""Seconds that a slow disk takes to sync one file, or one folder."""


class Stuck(Dataset):
    """One of its samples never comes."""

    def __init__(self, folder: Path) -> None:
        self.data, self.folder = make_data(32), folder

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        if index == 20:
            parent, asleep = psutil.Process(os.getppid()), 0
            while asleep < 20:  # the worker is some batches ahead: until the run waits for this one
                trained = (self.folder / "trained").exists()
                asleep = asleep + 1 if trained and parent.status() == psutil.STATUS_SLEEPING else 0
                time.sleep(0.01)
            leave(self.folder / "stuck", str(os.getppid()))
            time.sleep(600)
        return self.data[index]


class Hangs(Tiny):
    """Hangs in its third step (its second validation batch, where `how` says so) on the rank `who`."""

    def __init__(self, folder: Path, how: str, who: int, grace: float) -> None:
        super().__init__()
        self.folder, self.how, self.who, self.grace = folder, how, who, grace

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in a worker, which is given as long to answer as its launcher."""
        super().__setstate__(state)
        signals.GRACE = self.grace

    def hang(self) -> None:
        leave(self.folder / "stuck", str(os.getpid()))
        if self.how == "sleep":
            time.sleep(600)
        elif self.how == "swallows":
            while True:
                try:
                    time.sleep(600)
                except BaseException:
                    continue
        elif self.how == "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        elif self.how == "python":
            while True:
                pass
        elif self.how == "library":
            wait_in_c(ctypes.CDLL(None))
        elif self.how == "holds the interpreter":
            wait_in_c(ctypes.PyDLL(None))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.how == "loader" and batch_idx == 4:
            (self.folder / "trained").touch()

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == self.who:
            self.hang()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.hang()


class Hooks(Hangs):
    """Hangs in a hook, after it was told to end: `how` is the hook's name."""

    def setup(self, stage):
        if self.how == "setup":
            if self.global_rank != self.who:
                while not (self.folder / "stuck").exists():
                    time.sleep(0.01)
                raise LookupError("the other rank fails")
            leave(self.folder / "stuck", str(os.getpid()))
            wait_in_c(ctypes.CDLL(None))

    def training_step(self, batch, batch_idx):
        leave(self.folder / "stuck", str(os.getpid()))
        time.sleep(0.05)
        return Tiny.training_step(self, batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        if self.how == "save":
            time.sleep(600)
        if self.how == "slow save":  # each file of it takes its time
            sync = os.fsync
            os.fsync = lambda descriptor: (time.sleep(SLOW), sync(descriptor))[1]
            leave(self.folder / "saving", str(os.getpid()))

    def teardown(self, stage):
        if self.how == "teardown":
            leave(self.folder / "teardown")
            time.sleep(600)


def run(folder: Path, how: str, who: int = 0, grace: float = 1.0, **options: Any) -> None:
    """Fit (validate, where `how` begins with it) until it is ended."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    signals.GRACE = grace
    made = lg.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 5,
            "default_root_dir": folder / "runs",
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "save_code": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0 if not how.startswith("validate") else 1.0,
            "callbacks": [Checkpoint(every_n_train_steps=2)],
            **options,
        }
    )
    kind = Hooks if how in ("setup", "save", "slow save", "teardown", "moves") else Hangs
    task = kind(folder, how.removeprefix("validate, "), who, grace)
    loader = DataLoader(Stuck(folder), 4, num_workers=1) if how == "loader" else make_loader(32)
    torch.set_num_threads(1)
    if how.startswith("validate"):
        made.validate(task, loader)
    else:
        made.fit(task, loader)


def run_with(folder: Path, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Run; with `nohup` as that starts a program, else as a terminal does, however the tests were started."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN if options.pop("nohup", False) else signal.SIG_DFL)
    run(folder, *arguments, **options)
