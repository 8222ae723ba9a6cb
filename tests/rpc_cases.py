"""A small recommender with remote embeddings, its data and its trainer."""

import torch
from tiny import unchanged
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg

USERS, ITEMS, WIDTH = 12, 9, 4
generator = torch.Generator().manual_seed(3)
IDS = torch.stack(
    [torch.randint(0, USERS, (48,), generator=generator), torch.randint(0, ITEMS, (48,), generator=generator)], 1
)
RATINGS = torch.randn(48, 1, generator=generator)
QUIET = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    "accelerator": "cpu",
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "max_epochs": 2,
    "threads": 1,
}
RPC = {"devices": 2, "strategy": {"name": "ddp_rpc", "timeout": 60}}


class Ratings(lg.Task):
    """Predicts a rating from the embeddings of a user and an item, with a dense layer."""

    def __init__(self, kind="SGD", lr=0.5, sparse=False, schedule=False):
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.Linear(2 * WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
        self.kind, self.lr, self.sparse, self.schedule = kind, lr, sparse, schedule

    def remote_modules(self):
        return {
            "users": lambda: nn.Embedding(USERS, WIDTH, sparse=self.sparse),
            "items": lambda: nn.Sequential(nn.Embedding(ITEMS, WIDTH, sparse=self.sparse)),
        }

    def rate(self, ids):
        users, items = self.users(ids[:, 0]), self.items(ids[:, 1])
        return self.head(torch.cat([self.before(users), items], dim=1))

    def loss(self, batch):
        return nn.functional.mse_loss(self.rate(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.rate(batch[0])

    def configure_optimizers(self):
        optimizer = getattr(torch.optim, self.kind)(self.parameters(), lr=self.lr)
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(samples=24, batch_size=4, **options):
    return DataLoader(TensorDataset(IDS[:samples], RATINGS[:samples]), batch_size, **options)


def fit(task, samples=24, resume=None, **options):
    trainer = lg.Trainer(**{**QUIET, **options})
    with unchanged():
        trainer.fit(task, loader(samples, shuffle=True), loader(10), resume=resume)
    return trainer


def flat(task):
    return {name: tensor.clone() for name, tensor in task.state_dict().items()}


def in_one(task, **options):
    fit(task, **{"strategy": "single", "replicas": 2, **options})
    return flat(task)


def on_server(task, **options):
    fit(task, **{**RPC, **options})
    return flat(task)
