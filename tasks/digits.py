"""Digits: an example task, a small convolutional network that classifies 8 x 8 images of handwritten digits.

The images in `digits.csv.gz` are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and
C. Kaynak (https://doi.org/10.24432/C50P49), licensed under CC BY 4.0. The file comes from scikit-learn.
"""

from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .data_module import DataModule
from .task import Task

Batch = tuple[Tensor, Tensor]
"""Images (n, 1, 8, 8) and labels (n,)."""


class Digits(Task):
    """Classifies the ten digits. With 32 channels, the network has about 68,000 parameters.

    Args:
        channels: Number of channels in the first two convolutions; the last two have twice as many.
        dropout: Dropout probability before the last layer.
        lr: Peak learning rate of the one-cycle schedule.
        weight_decay: Weight decay for AdamW.
    """

    def __init__(self, channels: int = 32, dropout: float = 0.3, lr: float = 5e-3, weight_decay: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(2, 1, 8, 8)  # for `legato export`
        self.network = nn.Sequential(
            *_convolution(1, channels),
            *_convolution(channels, channels),
            nn.MaxPool2d(2),
            *_convolution(channels, 2 * channels),
            *_convolution(2 * channels, 2 * channels),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * channels * 2 * 2, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (n, 10) for images (n, 1, 8, 8)."""
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy over the batch."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log val/loss and val/acc."""
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log test/loss and test/acc."""
        self._evaluate("test", batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the most likely digit for each image, with shape (n,)."""
        logits: Tensor = self(batch[0])
        return logits.argmax(dim=1)

    def _evaluate(self, stage: str, batch: Batch) -> None:
        images, labels = batch
        logits = self(images)
        correct = (logits.argmax(dim=1) == labels).float()
        # weighting by batch_size makes the mean over batches exact even if the last batch is short
        values = {f"{stage}/loss": F.cross_entropy(logits, labels), f"{stage}/acc": correct.mean()}
        self.log_dict(values, prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW with a one-cycle schedule that raises the learning rate to `lr` and then lowers it to zero."""
        lr, steps = self.hparams.lr, int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=self.hparams.weight_decay)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
    # group norm normalizes each image separately, so the result does not depend on batching
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(max(1, outputs // 8), outputs), nn.ReLU()]


class DigitsData(DataModule):
    """The 1,797 digits in a stratified split: 1,257 for training, 270 for validation and 270 for testing.

    Args:
        batch_size: Batch size per replica.
        num_workers: Number of worker processes per loader.
        shift: Maximum random shift of training images in each direction, in pixels.
        split_seed: Seed for the split.
    """

    def __init__(self, batch_size: int = 32, num_workers: int = 0, shift: int = 1, split_seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.parts: dict[str, DigitImages] = {}

    def setup(self, stage: str) -> None:
        """Load and split the images."""
        if self.parts:
            return
        rows = torch.from_numpy(
            numpy.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",", dtype="float32")
        )
        images = rows[:, :64].reshape(-1, 1, 8, 8) / 8 - 1  # 0 .. 16 -> -1 .. 1
        labels = rows[:, 64].long()
        shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.hparams.split_seed))
        # After sorting images by their relative position in their class, any slice holds all classes in proportion.
        places = torch.empty(len(labels))
        for digit in range(10):
            members = shuffled[labels[shuffled] == digit]
            places[members] = torch.arange(len(members)) / len(members)
        test, val, train = places.argsort(stable=True).split([270, 270, len(labels) - 540])
        self.parts = {
            "train": DigitImages(images[train], labels[train], self.hparams.shift),
            "val": DigitImages(images[val], labels[val]),
            "test": DigitImages(images[test], labels[test]),
        }

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader for the training images, shuffled and shifted at random."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return a loader for the validation images."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the test images."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the test images."""
        return self._loader("test")

    def _loader(self, split: str, shuffle: bool = False) -> DataLoader[Any]:
        size, workers = self.hparams.batch_size, self.hparams.num_workers
        return DataLoader(self.parts[split], size, shuffle=shuffle, num_workers=workers)


class DigitImages(Dataset[tuple[Tensor, Tensor]]):
    """Images (n, 1, 8, 8) and labels (n,). Each image is randomly shifted by up to `shift` pixels in each direction."""

    def __init__(self, images: Tensor, labels: Tensor, shift: int = 0) -> None:
        # pad with the background value
        self.images = F.pad(images, (shift, shift, shift, shift), value=-1.0)
        self.labels = labels
        self.shift = shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # Legato seeds the global generator for each batch, so an image gets the same shift in any process or worker
        row, column = torch.randint(2 * self.shift + 1, (2,)).tolist() if self.shift else (0, 0)
        return self.images[index, :, row : row + 8, column : column + 8], self.labels[index]
