"""Image classification: a small residual network for handwritten digits, with augmentation and a cosine schedule.

Run `legato fit image_classification.yaml`.
"""

import torch
import torch.nn.functional as F
from torch import nn

import legato as lg


class Residual(nn.Module):
    """Two convolutions whose output is added to their input."""

    def __init__(self, width):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
        )  # fmt: skip

    def forward(self, images):
        return images + self.convolutions(images)


class ImageClassifier(lg.Task):
    def __init__(self, classes: int = 10, width: int = 32, blocks: int = 3, lr: float = 2e-3, smoothing: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            *(Residual(width) for _ in range(blocks)),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * width, classes),
        )

    def forward(self, images):
        """Return logits (n, classes) for images (n, 1, height, width)."""
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        images = images + 0.1 * torch.randn_like(images)  # the same noise in any process and after a resume
        loss = F.cross_entropy(self(images), labels, label_smoothing=self.hparams.smoothing)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        self.log("val/loss", F.cross_entropy(logits, labels))
        self.log("val/acc", (logits.argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).softmax(dim=1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
