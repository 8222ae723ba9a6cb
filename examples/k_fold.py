"""K-fold cross-validation: k runs, each validated on a different fold of the data.

    python k_fold.py

Each fold is a separate run in `runs/k_fold/`, so TensorBoard shows the folds side by side. After an interruption,
`resume="auto"` lets the program continue where it stopped.
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import legato as lg


class Wine(lg.Task):
    def __init__(self, hidden: int = 32, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.BatchNorm1d(13), nn.Linear(13, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    def training_step(self, batch, batch_idx):
        features, labels = batch
        loss = F.cross_entropy(self.net(features), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        features, labels = batch
        self.log("val/acc", (self.net(features).argmax(dim=1) == labels).float().mean(), batch_size=len(labels))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def cross_validate(folds: int = 5, epochs: int = 15) -> list[float]:
    """Return the accuracy of each fold."""
    features, labels = load_wine(return_X_y=True)
    data = TensorDataset(torch.as_tensor(features, dtype=torch.float32), torch.as_tensor(labels))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    scores = []
    for fold, held_out in enumerate(order.chunk(folds)):
        rest = [index for index in order.tolist() if index not in set(held_out.tolist())]
        lg.seed_everything(fold, verbose=False)  # for the initial weights of the fold
        trainer = lg.Trainer(
            max_epochs=epochs,
            seed=fold,
            accelerator="cpu",
            run_name=f"k_fold/fold_{fold}",
            log_every_n_steps=5,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loaders = DataLoader(Subset(data, rest), 16, shuffle=True), DataLoader(Subset(data, held_out.tolist()), 64)
        trainer.fit(Wine(), *loaders, resume="auto")
        scores.append(float(trainer.callback_metrics["val/acc"]))
        print(f"fold {fold}: val/acc {scores[-1]:.3f}")
    return scores


if __name__ == "__main__":
    accuracies = torch.tensor(cross_validate(*map(int, sys.argv[1:])))
    print(f"mean {accuracies.mean():.3f}, standard deviation {accuracies.std():.3f}")
