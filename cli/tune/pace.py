"""Process of one trial of `legato tune`: trains the real task, one block of steps each time that it is told to."""

import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...callbacks.callback import Callback
from ...trainer.processes.environment import set_variable
from ..config.build import build_config
from ..config.check import load_config
from ..sweep.folder import write_json, write_text

if TYPE_CHECKING:
    from ...tasks.task import Task
    from ...trainer.trainer import Trainer

WORDS, FACTS, ERROR, LOG = "words.json", "facts.json", "error.txt", "log.txt"
"""Files of a trial: its command line, what is known of the run, why it failed, what it printed."""
ORDER, BLOCK = "order-{}.json", "block-{}.json"
"""The steps of a block that the trial shall run, and its seconds and samples."""
ENDLESS = 10**7
"""Steps of a trial: finite, since schedulers ask for the length of the run."""
SECONDS_BETWEEN_LOOKS = 0.002


class Pace(Callback):
    """Runs blocks of steps: waits on every rank for the order of the next one, and writes what the last one took."""

    after_every_step = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = self.left = self.timed = self.samples = 0
        self.step, self.since = -1, 0.0

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Write what is known of the run, and wait for the first block."""
        self.step = trainer.global_step
        if trainer.is_global_zero:
            write_json(self.folder / FACTS, facts_of(trainer, task))
        self._wait(trainer)

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the step; begin the clock after the first steps of a block, and end the block with the last one."""
        if trainer.global_step == self.step or trainer.should_stop:
            return
        self.step = trainer.global_step
        if self.left <= self.timed:
            step = trainer.current_run.loop.step
            self.samples += 0 if step is None else step.samples
        self.left -= 1
        if self.left == self.timed:
            self.since = self._now(trainer)
        if self.left == 0:
            seconds = self._now(trainer) - self.since
            if trainer.is_global_zero:
                write_json(self.folder / BLOCK.format(self.number), {"seconds": seconds, "samples": self.samples})
            self.number += 1
            self._wait(trainer)

    def _wait(self, trainer: "Trainer") -> None:
        path = self.folder / ORDER.format(self.number)
        while not path.exists():
            time.sleep(SECONDS_BETWEEN_LOOKS)
        order = json.loads(path.read_text())
        self.timed, self.left, self.samples = order["steps"], order["steps"] + order["lead"], 0
        trainer.should_stop = not order["steps"]

    def _now(self, trainer: "Trainer") -> float:
        """Return the time at which the devices have done what they were given."""
        import torch

        for device in trainer.strategy.task_devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return time.perf_counter()


def facts_of(trainer: "Trainer", task: "Task") -> dict[str, Any]:
    """Return what decides which settings are worth a trial."""
    import torch
    from torch import nn

    from ...trainer.optimization.kernels import find_blocks

    batch_norms = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
    data = trainer.current_run.data.training
    loader = getattr(getattr(data, "source", None), "loader", None)
    own = {name: getattr(loader, name, None) for name in ("num_workers", "prefetch_factor", "persistent_workers")}
    kernels = [set(one.defaults) & {"fused", "foreach"} for one in trainer.optimizers]
    modules = list(task.modules())
    return {
        "device": trainer.strategy.device.type,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": trainer.world_size,
        "steps of an epoch": None if math.isinf(trainer.steps_per_epoch) else int(trainer.steps_per_epoch),
        "strategy": trainer.strategy.name,
        "loader": {**own, "pin_memory": getattr(loader, "pin_memory", None), **(trainer.loader or {})}
        if isinstance(loader, torch.utils.data.DataLoader)
        else None,
        "batch_size": getattr(getattr(data, "source", None), "batch_size", None),
        "optimizers": [type(one).__name__ for one in trainer.optimizers],
        "kernels": sorted(set.intersection(*kernels)) if kernels else [],
        "blocks": find_blocks(task),
        "images": any(isinstance(one, nn.Conv2d) for one in modules),
        "batch_norm": any(isinstance(one, batch_norms) for one in modules),
        "automatic": task.automatic_optimization,
    }


def run_paced(folder: Path) -> None:
    """Train a copy of the task of the trial's config, with a trainer that writes nothing, until told to end."""
    from ...trainer.tuning import trial_of

    found = build_config(load_config(json.loads((folder / WORDS).read_text())))
    with trial_of(found.trainer, found.task, found.data) as (trial, task):
        trial.callbacks, trial.max_steps, trial.limit_val_batches = [Pace(folder)], ENDLESS, 0
        trial.max_time, trial.hang_timeout, trial.hang_report_seconds = None, None, None
        trial.fit(task, datamodule=found.data)


def enter_paced() -> int:
    """Run the trial in the folder that the command line names; return the exit code."""
    folder = Path(sys.argv[1])
    set_variable("TMPDIR", str(folder.parent))  # compiled code and sockets go away with the folder
    threading.Thread(target=_end_group_with_parent, name="legato-tune", daemon=True).start()
    try:
        run_paced(folder)
    except Exception as error:
        from ...trainer.tuning import is_out_of_memory

        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        text = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {first}"
        write_text(folder / ERROR, text)
        raise
    return 0


def _end_group_with_parent() -> None:
    """End this process and its loader workers when the search does, whose end of the pipe is then closed."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)
