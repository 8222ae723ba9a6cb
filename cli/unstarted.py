"""UnstartedRun: a config's trainer, task and training data for inspection, without devices or processes."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ..base.errors import LegatoError
from ..base.place import Place
from ..lab.sample_lookup import load_loader
from ..trainer.optimization.precision import Precision
from ..trainer.processes.devices import find_devices
from ..trainer.strategies.servers import build_remote_modules
from ..trainer.trainer import Trainer
from .config.build import build_arguments, build_config

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..tasks.data_module import DataModule
    from ..tasks.task import Task
    from ..trainer.strategies.state_dicts import StateParts
    from .config.check import Config

AUTOMATIC = ("auto", -1, "-1")


def processes_of(config: "Config") -> "tuple[int, StateParts]":
    """Return how many processes a config's run uses and how they share its state, without starting any."""
    trainer = config.values["trainer"]
    # only the arguments that determine the processes: others may need devices that this machine lacks
    shape = build_arguments(config, {name: trainer[name] for name in ("num_nodes", "strategy", "replicas")})
    made = Trainer(**shape, accelerator="cpu", devices=_count_devices(trainer), cluster="off", logger=False)
    count = made.strategy.local_processes(made.device_list) * made.num_nodes
    return count, made.strategy.state_dicts.parts(count)


def _count_devices(trainer: Mapping[str, Any]) -> int:
    """Return the number of devices per machine. For "auto", this is the number of devices on this machine."""
    automatic = trainer["devices"] in AUTOMATIC
    return len(find_devices(trainer["accelerator"] if automatic else "cpu", trainer["devices"]))


class UnstartedRun:
    """A config's objects, each built on first access.

    The task is on the meta device, so it can be any size. The data module is the same as in a real run.

    Raises ConfigError for an invalid process layout.
    """

    def __init__(self, config: "Config") -> None:
        trainer = config.values["trainer"]
        self.processes, self.parts = processes_of(config)
        self.nodes: int = trainer["num_nodes"]
        self.seed: int = config.values["seed"]
        # on the CPU, which every machine has
        self.precision = Precision(trainer["precision"], "cpu")
        single = {"devices": 1, "num_nodes": 1, "strategy": "single", "accelerator": "cpu", "precision": 32}
        self.config = config.changed({**single, "cluster": "off", "fast_dev_run": False}, loggers={})

    @cached_property
    def data(self) -> "DataModule | None":
        """The data module. It is built with an empty task in place of the config's task."""
        if self.config.values.get("data") is None:
            return None
        # building the real task on the meta device would also create the data's tensors there
        empty = {"_target_": "legato.tasks.task.Task"}
        run = build_config(self.config.changed(task=empty))
        assert run.data is not None
        run.data.trainer = self.attach(run.trainer, run.task, 0)
        return run.data

    @cached_property
    def task(self) -> "Task":
        """The task on the meta device, in the run's precision."""
        config = self.config.changed(data=None)
        # on the CPU if "meta" fails, for example because __init__ reads tensor values (timm: linspace().tolist())
        for device in ("meta", "cpu"):
            try:
                with torch.device(device):
                    run = build_config(config)
                    self.attach(run.trainer, run.task, 0)
                    run.task.configure_model()
                    build_remote_modules(run.task, self.seed)
                break
            except LegatoError:
                raise
            except Exception:
                if device == "cpu":
                    raise
        task = run.task.to("meta")
        self.precision.place(task)
        return task

    def load_loader(self, epoch: int = 0) -> Any:
        """Return the training loader for an epoch from the data module or, without one, from the task.

        Raises ConfigError if there is no loader.
        """
        return load_loader([owner for owner in (self.data, self.task) if owner is not None], epoch)

    def make_optimizers(self, rounds: int) -> "Sequence[Optimizer]":
        """Return the task's optimizers for epochs with `rounds` batches per replica."""
        self.attach(self.task.trainer, self.task, rounds)
        return self.task.make_optimizers()[0]

    def attach(self, trainer: Trainer, task: "Task", rounds: int) -> Trainer:
        """Set the run's process counts and epoch length on the trainer, and attach the task to the trainer."""
        local = self.processes // self.nodes
        # tasks read world_size and the number of steps to set learning rates
        trainer.strategy.place = Place(world_size=self.processes, local_world_size=local, nodes=self.nodes)
        trainer.num_nodes = self.nodes
        trainer.lengths = {"train": rounds}
        task.trainer = trainer
        return trainer
