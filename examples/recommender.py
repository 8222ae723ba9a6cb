"""A recommender whose embeddings are in a separate process: DDP with a parameter server.

    python examples/recommender.py                     two trainers and a server
    python examples/recommender.py single [EPOCHS]     the same run in one process

Ratings are generated from hidden features of users and items. The embedding tables grow with the number of users and
items, so the task lists them in `remote_modules`: under the ddp_rpc strategy, a server process holds them; under any
other strategy, every process does. Both runs end with the same loss, up to rounding.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg

USERS, ITEMS, TASTES = 400, 200, 4


class Recommender(lg.Task):
    def __init__(self, width: int = 16, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.rate = nn.Sequential(nn.Linear(3 * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def remote_modules(self):
        width = self.hparams.width
        return {"users": lambda: nn.Embedding(USERS, width), "items": lambda: nn.Embedding(ITEMS, width)}

    def forward(self, pairs):
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        return self.rate(torch.cat([user, item, user * item], dim=1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        pairs, ratings = batch
        loss = F.mse_loss(self(pairs), ratings)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        pairs, ratings = batch
        self.log("val/loss", F.mse_loss(self(pairs), ratings), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=self.hparams.lr)


def ratings(count, seed):
    """Return (user, item) pairs (count, 2), and the users' ratings of the items (count,)."""
    tastes = torch.Generator().manual_seed(0)
    users = torch.randn(USERS, TASTES, generator=tastes)
    items = torch.randn(ITEMS, TASTES, generator=tastes)
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.stack([torch.randint(size, (count,), generator=generator) for size in (USERS, ITEMS)], dim=1)
    rating = (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(dim=1) / TASTES**0.5
    return TensorDataset(pairs, rating + 0.1 * torch.randn(count, generator=generator))


single, epochs = sys.argv[1:2] == ["single"], int(sys.argv[2]) if sys.argv[2:] else 6
strategy = {"strategy": "single", "replicas": 2} if single else {"strategy": "ddp_rpc", "devices": 2}
trainer = lg.Trainer(max_epochs=epochs, accelerator="cpu", run_name="recommender", log_every_n_steps=20, **strategy)
lg.seed_everything(0, verbose=False)
task = Recommender()
trainer.fit(
    task,
    DataLoader(ratings(40_000, seed=1), batch_size=128, shuffle=True),
    DataLoader(ratings(4_000, seed=2), batch_size=500),
)
print(f"val/loss {trainer.callback_metrics['val/loss']:.4f}, and the task has {len(task.users.weight)} users")
