"""A small elastic run, and what kills its processes."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from waiting import leave

import legato as lg

REPLICAS = 4
EPOCHS = 6
STEPS_PER_EPOCH = 10


def words_after(folder: Path, word: str) -> list[str]:
    """Return NAME of each file WORD-NAME. Not by glob, which takes longer: elastic runs call this in each step."""
    return [name.partition("-")[2] for name in os.listdir(folder) if name.startswith(f"{word}-")]


class Net(lg.Task):
    """Dropout, batch norm and AdamW. It leaves files in `folder` from which a test sees where its processes are.

    trained-PID: the newest step of that process. While a file slow-SECONDS is there, each batch takes so long.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        self.model = nn.Sequential(*layers)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 3
        self.folder = folder

    def slow_down(self, word: str) -> None:
        for seconds in words_after(self.folder, word) if self.folder else ():
            time.sleep(float(seconds))

    def tell(self, name: str, text: str = "") -> None:
        if self.folder is not None:
            leave(self.folder / f"{name}-{os.getpid()}", text)

    def on_train_start(self):
        self.tell("built")

    def training_step(self, batch, batch_idx):
        self.slow_down("slow")
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.tell("trained", str(self.global_step))

    def on_processes_changed(self):
        self.tell("trained", str(self.global_step))

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.tell("validating")
            self.slow_down("hold")
        self.log("val", nn.functional.mse_loss(self.model(batch[0]), batch[1]))

    def on_validation_end(self):
        if self.folder is not None:
            (self.folder / f"validating-{os.getpid()}").unlink(missing_ok=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


def loader(samples: int = STEPS_PER_EPOCH * REPLICAS * 4, **options) -> DataLoader:
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(samples))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=4, **options)


def trainer_of(root: Path, elastic: bool = False, **options) -> lg.Trainer:
    """A trainer of REPLICAS replicas; with `elastic` options of the strategy may be among `options`."""
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "save_code"), False)
    defaults = {"accelerator": "cpu", "replicas": REPLICAS, "reproducible": "bitwise", "default_root_dir": root}
    names = ("min_processes", "join", "init_method", "timeout")
    chosen = {name: options.pop(name) for name in names if name in options}
    strategy = {"name": "ddp", "elastic": True, **chosen} if elastic else "auto"
    return lg.Trainer(
        **{**defaults, "max_epochs": EPOCHS, "log_every_n_steps": 4, **quiet, "strategy": strategy, **options}
    )


def fit(root: Path, folder: Path | None = None, resume: str | None = None, task: Net | None = None, **options):
    """Train and return task and trainer."""
    task, workers = task or Net(folder), options.pop("num_workers", 0)
    trainer = trainer_of(root, **options)
    trainer.fit(task, loader(shuffle=True, num_workers=workers), loader(32), resume=resume)
    return task, trainer


class Killer(threading.Thread):
    """Does what `plan` says, a function that is given this object, while the run goes on; then lets the run hurry.

    Until then the run takes its time, the more so when it is further than its share of the `kills` that are done.
    """

    def __init__(
        self, folder: Path, plan, seed: int = 0, kills: int = 1, steps: int = EPOCHS * STEPS_PER_EPOCH
    ) -> None:
        super().__init__()
        self.folder, self.plan, self.random = folder, plan, random.Random(seed)
        self.kills, self.steps = kills, steps
        self.dead: list[int] = []
        self.problem: BaseException | None = None
        self.slow = folder / "slow-0.01"
        self.slow.touch()

    def __enter__(self) -> "Killer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join()
        if self.problem is not None:
            raise self.problem

    def run(self) -> None:
        try:
            self.plan(self)
        except BaseException as error:
            self.problem = error
        finally:
            self.slow.unlink(missing_ok=True)

    def living(self, word: str = "trained") -> list[int]:
        """The processes that left such a file and were not killed, in the order of their ids."""
        return sorted(process for process in map(int, words_after(self.folder, word)) if process not in self.dead)

    def wait(self, condition, seconds: float = 90.0):
        """Wait until `condition` returns something that is true, and return that."""
        deadline = time.monotonic() + seconds
        while not (outcome := condition()):
            assert time.monotonic() < deadline, "what the test waits for did not happen"
            self.brake()
            time.sleep(0.005)
        return outcome

    def brake(self) -> None:
        """Let each batch take longer, and ever longer, where the run might be over before all kills are done."""
        share = self.steps / (self.kills + 2)
        ahead = self.step() / share - (len(self.dead) + 1)
        pace = self.folder / ("slow-0.01" if ahead <= 0 else "slow-0.1" if ahead < 0.3 else "slow-1")
        if pace != self.slow:
            self.slow = self.slow.rename(pace)

    def wait_for_members(self, count: int, word: str = "trained") -> list[int]:
        """Wait until so many living processes have trained, or left another such file; return them."""
        return self.wait(lambda: len(members := self.living(word)) >= count and members)

    def kill(self, process: int, number: int = signal.SIGKILL) -> None:
        self.dead.append(process)
        os.kill(process, number)

    def step(self) -> int:
        """The newest step of any living process."""
        return max((int((self.folder / f"trained-{process}").read_text()) for process in self.living()), default=0)


def digest(task: Net) -> str:
    """A text that says every bit of the task's state."""
    return "".join(f"{name}:{value.numpy().tobytes().hex()};" for name, value in task.state_dict().items())
