"""A run of its own process that is told to end.

It leaves a file in its folder for every moment that a test may wait for, and the trained weights when it is done.
At the moment `hold` it waits until there is a file `go`.
"""

import json
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from waiting import leave

import legato as lg


class Numbers(Dataset):
    """Inputs with augmentation, so that a lost random number would show."""

    def __init__(self, samples: int) -> None:
        self.inputs = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self.inputs[index]
        return inputs + torch.randn(3) / 10, inputs.sum(0, keepdim=True).sin()


class Slow(lg.Task):
    """Batch norm and dropout. Marks each moment of its run with a file.

    A step takes `pace` seconds, a hook five times that; with a `hold` only steps after it do.
    """

    def __init__(self, folder: Path, pace: float = 0.0, hold: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 1))
        self.folder, self.pace, self.hold = folder, pace, hold

    def mark(self, name: str) -> None:
        leave(self.folder / f"{name}-{self.trainer.global_rank}", str(os.getpid()))
        while name == self.hold and not (self.folder / "go").exists():
            time.sleep(0.005)

    def work(self, steps: int = 1) -> None:
        if not self.hold or (steps == 1 and (self.folder / "go").exists()):
            time.sleep(steps * self.pace)

    def setup(self, stage):
        self.mark("setup")
        self.work(5)

    def training_step(self, batch, batch_idx):
        self.mark(f"step-{self.global_step}")
        self.work()
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.mark(f"validation-{self.global_step}-{batch_idx}")
        self.work()
        self.log("val_loss", nn.functional.mse_loss(self.model(batch[0]), batch[1]))

    def on_train_epoch_end(self):
        self.mark(f"epoch_end-{self.current_epoch}")

    def on_train_end(self):
        self.mark("train_end")

    def on_save_checkpoint(self, checkpoint):
        self.mark(f"saving-{self.global_step}")
        self.work(5)

    def teardown(self, stage):
        self.mark("teardown")
        self.work(5)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def run(folder: Path, options: dict[str, Any]) -> lg.Trainer:
    """Train as `options` say, and leave the weights."""
    options = {
        "accelerator": "cpu",
        "devices": 1,
        "replicas": 2,
        "reproducible": "bitwise",
        "max_epochs": 3,
        "default_root_dir": folder / "runs",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "save_code": False,
        "log_every_n_steps": 4,
        "val_check_interval": 4,
        **options,
    }
    every, asynchronous = options.pop("save_every", 3), options.pop("asynchronous", False)
    workers, catch = options.pop("workers", 0), options.pop("catch", False)
    task = Slow(folder, options.pop("pace", 0.0), options.pop("hold", ""))
    if options.get("enable_checkpointing", True):
        options["callbacks"] = [lg.callbacks.Checkpoint(every_n_train_steps=every, asynchronous=asynchronous)]
    loaders = [DataLoader(Numbers(count), 4, shuffle=True, num_workers=workers) for count in (48, 24)]
    trainer = lg.Trainer(**options)
    try:
        trainer.fit(task, *loaders, resume="auto")
    except KeyboardInterrupt:
        if not catch:
            raise
        (folder / "caught").touch()
        return trainer
    if trainer.is_global_zero:
        torch.save(task.state_dict(), folder / "weights.pt")
    return trainer


def sweep(folder: Path, options: dict[str, Any], seconds_between: float) -> None:
    """Start the run again and again, told to end ever later, until it comes to its end; print what it ended by."""
    ends: list[int] = []
    while 0 not in ends and len(ends) < 40:
        (folder / "setup-0").unlink(missing_ok=True)
        child = os.fork()  # torch is loaded already
        if child == 0:
            try:
                run(folder, {**options, "workers": len(ends) % 2})
            except SystemExit as end:
                os._exit(int(str(end.code)))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        while not (folder / "setup-0").exists():
            time.sleep(0.001)
        time.sleep(seconds_between * (1 + len(ends)))
        os.kill(child, [signal.SIGTERM, signal.SIGUSR1][len(ends) % 2])
        status = os.waitpid(child, 0)[1]
        over = os.WIFSIGNALED(status) and (folder / "teardown-0").exists()  # it hit what comes after fit
        ends.append(0 if over else os.waitstatus_to_exitcode(status))
    print(json.dumps(ends))
