"""A masked autoencoder: a transformer sees 6 of an image's 16 patches and reconstructs the others.

    legato fit masked_autoencoder.yaml

TensorBoard's IMAGES tab shows images above their reconstructions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import legato as lg

SIDE, PATCH = 8, 2
PATCHES = (SIDE // PATCH) ** 2


class MaskedAutoencoder(lg.Task):
    def __init__(self, width: int = 64, layers: int = 3, heads: int = 4, seen: int = 6, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.into = nn.Linear(PATCH * PATCH, width)
        self.places = nn.Parameter(0.02 * torch.randn(PATCHES, width))
        self.blank = nn.Parameter(torch.zeros(width))
        self.encoder = self.transformer(width, layers, heads)
        self.decoder = self.transformer(width, 1, heads)
        self.out = nn.Linear(width, PATCH * PATCH)

    @staticmethod
    def transformer(width, layers, heads):
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, patches: Tensor, order: Tensor) -> Tensor:
        """Reconstruct all patches (n, PATCHES, pixels) from the first `seen` patches in each `order` (n, PATCHES)."""
        seen = order[:, : self.hparams.seen]
        tokens = self.into(pick(patches, seen)) + self.places[seen]
        sequence = self.blank.expand(len(patches), PATCHES, -1).clone()
        sequence = sequence.scatter(1, seen.unsqueeze(2).expand(-1, -1, tokens.shape[2]), self.encoder(tokens))
        return self.out(self.decoder(sequence + self.places))

    def step(self, batch):
        """Return the loss on the hidden patches, and all reconstructed patches (n, PATCHES, pixels)."""
        patches = to_patches(batch[0])
        order = torch.rand(len(patches), PATCHES, device=patches.device).argsort(dim=1)
        drawn, hidden = self(patches, order), order[:, self.hparams.seen :]
        return F.mse_loss(pick(drawn, hidden), pick(patches, hidden)), drawn

    def training_step(self, batch, batch_idx):
        loss, _ = self.step(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, drawn = self.step(batch)
        self.log("val/loss", loss, prog_bar=True)
        if batch_idx == 0 and self.logger is not None:
            pairs = torch.cat([batch[0][:8], to_images(drawn[:8])], dim=2)  # each image above its reconstruction
            self.logger.experiment.add_images("drawn", (pairs + 1).clamp(0, 2) / 2, self.global_step)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.05)


def pick(patches: Tensor, places: Tensor) -> Tensor:
    """Return the patches (n, k, pixels) at `places` (n, k)."""
    return patches.gather(1, places.unsqueeze(2).expand(-1, -1, patches.shape[2]))


def to_patches(images: Tensor) -> Tensor:
    """Return the patches (n, PATCHES, pixels) of images (n, 1, SIDE, SIDE)."""
    return F.unfold(images, PATCH, stride=PATCH).transpose(1, 2)


def to_images(patches: Tensor) -> Tensor:
    """Return the images (n, 1, SIDE, SIDE) of patches (n, PATCHES, pixels)."""
    return F.fold(patches.transpose(1, 2), SIDE, PATCH, stride=PATCH)
