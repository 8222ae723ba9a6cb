"""dowhy: causal prediction over several environments, whose training loaders never end and come in a list."""

import json

import pytorch_lightning as pl
import torch
from dowhy.causal_prediction.algorithms.cacm import CACM
from dowhy.causal_prediction.algorithms.erm import ERM
from dowhy.causal_prediction.dataloaders.get_data_loader import get_loaders
from dowhy.causal_prediction.models.networks import MLP, Classifier
from torch.utils.data import TensorDataset

pl.seed_everything(0, workers=True)
generator = torch.Generator().manual_seed(0)


class Environments(list):
    N_WORKERS = 0
    CHECKPOINT_FREQ = 5


def environment(share):
    x = torch.randn(64, 6, generator=generator)
    y, noise = (x[:, 0] + x[:, 1] > 0).long(), (torch.rand(64, generator=generator) < share).long()
    return TensorDataset(x, y, torch.stack([noise, y ^ noise], 1))


data, results = Environments(map(environment, (0.2, 0.5, 0.8))), {}
for kind, options in ((ERM, {}), (CACM, {"gamma": 1e-2, "attr_types": ["causal", "ind"]})):
    loaders = get_loaders(data, train_envs=[0, 1], batch_size=16, val_envs=[2], test_envs=[2])
    algorithm = kind(torch.nn.Sequential(MLP(6, 8, 16, 3, 0.0), Classifier(8, 2)), lr=1e-2, **options)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=2, enable_model_summary=False)
    trainer.fit(algorithm, loaders["train_loaders"], loaders["val_loaders"])
    results[kind.__name__] = {"epochs": trainer.current_epoch, "steps": trainer.global_step}
    results[kind.__name__]["logged"] = sorted(trainer.callback_metrics)  # of values only the names: its loaders draw
print(json.dumps({"exact": results}))
