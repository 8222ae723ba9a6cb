"""What the configs of the config tests name; copied into each test's own folder and imported from there."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Optional

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg
from legato.callbacks.callback import Callback as Watcher

Mode = Literal["fast", "slow"]


class Base(lg.Task):
    def __init__(self, depth: int = 2, mode: Mode = "fast"):
        super().__init__()
        self.depth, self.mode = depth, mode


class Tiny(Base):
    def __init__(
        self,
        width: int,
        lr: float = 1e-3,
        *,
        label: "str" = "tiny",
        deep: bool = False,
        sizes: Optional[list[int]] = None,  # noqa: UP045  (both ways of writing it are tested)
        folder: Path | None = None,
        every: timedelta | None = None,
        pair: tuple[int, str] = (1, "a"),
        head: nn.Module | None = None,
        parts: dict[str, nn.Module] | None = None,
        either: int | str = 3,
        table: dict[str, float] | None = None,
        odd: int = "five",
        free=None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.init_arguments = dict(locals())


class Needy(lg.Task):
    def __init__(self, one, two: int):
        super().__init__()


class Data(lg.DataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()


@dataclass
class Note(Watcher):
    text: str
    times: int = 1
    tags: list[str] = field(default_factory=list)


class Dynamic(lg.Task):
    def __init__(self, **kwargs):
        super().__init__()
        self.kwargs = kwargs.copy()


def make_task():
    return Tiny(3)


number = 3
Alias = Tiny


def make_net(width: int, depth: int = 1) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)], nn.Linear(width, 1))


class Assembled(lg.Task):
    """Its parts come from the config, as in a well-known template for Hydra."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler = None,  # type: ignore[valid-type]  (a module, as that template has it)
        activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
        more=None,
        number: int = 3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.parameters())
        if self.hparams.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.hparams.scheduler(optimizer=optimizer)}

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.linspace(-1, 1, 24).reshape(8, 3)), batch_size=2)
