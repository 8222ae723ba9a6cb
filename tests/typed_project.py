"""A user's project, as type checkers see it: each `type: ignore` marks a mistake that they must find."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg
import legato.compat.lightning as L
from legato.callbacks import Checkpoint, EarlyStopping

if TYPE_CHECKING:
    from typing_extensions import assert_type
else:
    assert_type = print


class Patient(EarlyStopping):
    """A callback of one's own, on one of Legato's."""

    def __init__(self, epochs: int) -> None:
        super().__init__("val/loss", patience=epochs)

    def on_fit_start(self, trainer: lg.Trainer, task: lg.Task) -> None:
        print(trainer.max_epochs, self.patience, task.device)


class Counter(lg.Callback):
    """Counts steps."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(
        self, trainer: lg.Trainer, task: lg.Task, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self.steps = trainer.global_step


class Regression(lg.Task):
    """A task with annotations."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        self.log_dict({"val/loss": nn.functional.mse_loss(self(x), y)})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Numbers(lg.DataModule):
    """A data module with annotations."""

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(torch.zeros(8, 8), torch.zeros(8, 1)), batch_size=2)


class Ported(L.LightningModule):
    """A module written for Lightning."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch.sum()


def main() -> None:
    best = Checkpoint(monitor="val/loss", mode="min")
    trainer = lg.Trainer(max_epochs=2, callbacks=[best, Patient(3), Counter()], strategy="ddp", devices=2)
    assert_type(trainer.max_epochs, int | None)
    assert_type(trainer.global_step, int)
    assert_type(trainer.validate(Regression()), list[dict[str, float]])
    trainer.fit(Regression(), datamodule=Numbers(), resume="auto")
    lg.Trainer(strategy=lg.strategies.DDPStrategy(timeout=60), logger=lg.loggers.CSVLogger())
    L.Trainer(max_epochs=1).fit(Ported())
    lg.seed_everything(1)

    lg.Trainer(max_epoch=2)  # type: ignore[call-arg]
    lg.Trainer(max_epochs="2")  # type: ignore[arg-type]
    lg.callbacks.EarlyStoping("val/loss")  # type: ignore[attr-defined]
    lg.tasks.Digit()  # type: ignore[attr-defined]
    lg.strategies.DPStrategy()  # type: ignore[attr-defined]
    lg.Trianer()  # type: ignore[attr-defined]
    EarlyStopping(patience=3)  # type: ignore[call-arg]


if __name__ == "__main__":
    main()
