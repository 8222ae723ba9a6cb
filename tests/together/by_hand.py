"""The same run as a plain loop that knows nothing of Legato but its order of samples: what a run must come to."""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from together.scene import BATCH, EPOCHS, HELD_OUT, SAMPLES, Net, Numbers
from torch import nn

from legato.trainer.data.sampling import epoch_key, permutation

MODELLED = {
    *("accumulation", "clip", "clip by value", "nan skip", "ema", "late ema", "stop on train", "stop on val"),
    *("drop last", "limit", "val interval", "val interval over epochs", "val every second", "float64", "metrics"),
    *("plateau", "step scheduler", "freeze", "leave epoch", "no loss", "max steps", "min epochs", "three replicas"),
    *("reload", "sparse log", "save by steps", "save all", "save none but last", "save worst", "save on train"),
}
"""The features that the loop knows."""


@dataclass
class Stopping:
    """EarlyStopping(min_delta=0.02, patience=1)."""

    best: float = float("inf")

    def is_over(self, value: float) -> bool:
        if value + 0.02 < self.best:
            self.best = value
            return False
        return True


@dataclass
class Loop:
    """A run of the features `names`."""

    names: set[str]
    points: dict[int, dict[str, float]] = field(default_factory=dict)
    step: int = 0
    rounds: int = 0
    stopped: bool = False

    def __post_init__(self) -> None:
        kind = torch.float64 if "float64" in self.names else torch.float32
        self.task, self.held_out = Net().to(kind), Numbers(HELD_OUT)
        self.data = Numbers(SAMPLES, bad="nan skip" in self.names)
        for numbers in (self.data, self.held_out):
            numbers.inputs, numbers.targets = numbers.inputs.to(kind), numbers.targets.to(kind)
        self.average: nn.Module | None = None
        self.optimizer = torch.optim.SGD(self.task.parameters(), lr=0.05, momentum=0.9)
        self.by_epoch = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.by_step = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.8)
        rule = {"patience": 0, "factor": 0.5, "threshold": 0.3}
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, **rule)
        self.replicas = 3 if "three replicas" in self.names else 2
        self.accumulate = 2 if "accumulation" in self.names else 1
        self.max_steps = 7 if "max steps" in self.names else 3 if "min epochs" in self.names else 10**9
        self.stop_on_val, self.stop_on_train = Stopping(), Stopping()
        self.optimizer.step()  # of no gradient: else schedulers warn where the first step is dropped

    def run(self) -> "Loop":
        epoch = 0
        while epoch < (EPOCHS if self.max_steps == 10**9 else 100) and not self.stopped:
            if self.epoch(epoch):
                epoch += 1
        if self.average is not None:
            self.task = self.average
        return self

    def log(self, **values: float) -> None:
        named = {name.replace("_", "/", 1): float(value) for name, value in values.items()}
        self.points.setdefault(self.step, {}).update(named)

    def batches(self, epoch: int) -> list[list[np.ndarray]]:
        """Return the batches of each round, one a replica; the last rounds may lack some."""
        order = permutation(np.arange(SAMPLES), SAMPLES, epoch_key(0, epoch))
        round_size = self.replicas * BATCH
        if "drop last" in self.names:
            order = order[: len(order) // round_size * round_size]
        rounds = [order[start : start + round_size] for start in range(0, len(order), round_size)]
        if "limit" in self.names:
            rounds = rounds[:3]
        return [[indices[start : start + BATCH] for start in range(0, len(indices), BATCH)] for indices in rounds]

    def epoch(self, epoch: int) -> bool:
        """Train for an epoch; return whether it came to its end."""
        if "freeze" in self.names:
            self.task.net[0].requires_grad_(epoch != 1)
        rounds, sums = self.batches(epoch), []
        done = 0
        for start in range(0, len(rounds), self.accumulate):
            window = rounds[start : start + self.accumulate]
            if "leave epoch" in self.names and epoch == 1 and start <= 2 < start + len(window):
                break
            self.train(window, sums)
            done += len(window)
            self.rounds += len(window)
            every = 2 if "val interval" in self.names else 3 if "val interval over epochs" in self.names else 0
            count = self.rounds if every == 3 else done
            if every and count % every < len(window):
                self.validate()
            if self.step >= self.max_steps or self.stopped:
                self.stopped = True
                if done < len(rounds):
                    return False
                break
        skips = "val every second" in self.names and (epoch + 1) % 2
        if not skips and "val interval" not in self.names and "val interval over epochs" not in self.names:
            self.validate()
        loss = sum(value * count for value, count, _ in sums) / sum(count for _, count, _ in sums)
        self.log(train_loss_epoch=loss, train_samples_epoch=sum(samples for *_, samples in sums))
        if "stop on train" in self.names:
            self.stopped |= self.stop_on_train.is_over(loss)
        if "step scheduler" not in self.names:
            self.by_epoch.step()
        if "plateau" in self.names:
            self.plateau.step(loss)
        return True

    def train(self, window: list[list[np.ndarray]], sums: list[Any]) -> None:
        """Do one step."""
        total = sum(len(batch) for round_batches in window for batch in round_batches)
        self.optimizer.zero_grad()
        logged = []
        for replica in range(self.replicas):
            for round_batches in window:
                if replica >= len(round_batches):
                    continue
                batch = torch.from_numpy(round_batches[replica].astype(np.int64))
                if "no loss" in self.names and 3 in batch:
                    continue
                loss = nn.functional.mse_loss(self.task.net(self.data.inputs[batch]), self.data.targets[batch])
                (loss * len(batch) / total).backward()
                logged.append((loss.item(), len(batch), float((batch + 1.0).square().sum())))
        self.step += 1
        bad = "nan skip" in self.names and not np.isfinite([value for value, *_ in logged]).all()
        if not bad:
            if "clip" in self.names:
                nn.utils.clip_grad_norm_(self.task.parameters(), 0.3)
            if "clip by value" in self.names:
                nn.utils.clip_grad_value_(self.task.parameters(), 0.05)
            self.optimizer.step()
        if "step scheduler" in self.names:
            self.by_step.step()
        self.update_average()
        if bad:
            return
        sums += logged
        if logged and (self.step % 3 == 0 or "sparse log" not in self.names):
            mean = sum(value * count for value, count, _ in logged) / sum(count for _, count, _ in logged)
            self.log(train_loss_step=mean, train_samples_step=sum(samples for *_, samples in logged))

    def update_average(self) -> None:
        if not {"ema", "late ema"} & self.names or ("late ema" in self.names and self.step < 3):
            return
        if self.average is None:
            self.average = copy.deepcopy(self.task)
            return
        with torch.no_grad():
            for ours, theirs in zip(self.average.parameters(), self.task.parameters(), strict=True):
                ours.mul_(0.8).add_(theirs, alpha=0.2)

    def validate(self) -> None:
        count = HELD_OUT if "limit" not in self.names else 2 * BATCH
        with torch.no_grad():
            outputs = (self.average or self.task).net(self.held_out.inputs[:count])
            loss = nn.functional.mse_loss(outputs, self.held_out.targets[:count]).item()
        self.log(val_loss=loss, val_samples=count * (count - 1) / 2)
        if "stop on val" in self.names:
            self.stopped |= self.stop_on_val.is_over(loss)


NAMES = {f"{kind}_{word}" for kind in ("train/loss", "train/samples") for word in ("step", "epoch")}


def check_by_hand(names: set[str], result: Any) -> list[str]:
    """Say in what a run differs from the loop by hand."""
    loop, problems = Loop(names).run(), []
    for name, value in loop.task.state_dict().items():
        if not torch.allclose(result.weights[name], value, rtol=1e-5, atol=1e-6):
            problems.append(f"by hand: {name} differs by {(result.weights[name] - value).abs().max():.2e}")
            break
    if loop.step != result.state["global_step"]:
        problems.append(f"by hand: {loop.step} steps, not {result.state['global_step']}")
    watched = {*NAMES, "val/loss", "val/samples"}
    for step in sorted(loop.points.keys() | result.points.keys()):
        ours = {name: value for name, value in result.points.get(step, {}).items() if name in watched}
        theirs = loop.points.get(step, {})
        close = ours.keys() == theirs.keys() and all(
            abs(ours[name] - theirs[name]) <= 1e-5 * max(1.0, abs(theirs[name])) for name in ours
        )
        if not close:
            problems.append(f"by hand: point {step} is {theirs}, and was {ours}")
    return problems
