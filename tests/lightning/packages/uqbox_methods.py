"""lightning-uq-box: networks that predict their own uncertainty, and an ensemble of their checkpoints."""

import json
from functools import partial

import torch
from lightning import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning_uq_box.models import MLP
from lightning_uq_box.uq_methods import (
    DER,
    NLL,
    DeepEnsembleRegression,
    MCDropoutRegression,
    MVERegression,
    QuantileRegression,
    SWAGRegression,
)

inputs = torch.linspace(0, 1, 64).unsqueeze(1)
samples = [{"input": value, "target": (3 * value).sin()} for value in inputs]
adam = partial(torch.optim.Adam, lr=1e-2)


class Data(LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(samples, batch_size=16)

    val_dataloader = test_dataloader = train_dataloader


def network(outputs, dropout=0.0):
    seed_everything(outputs)
    return MLP(n_inputs=1, n_hidden=[8], n_outputs=outputs, dropout_p=dropout, activation_fn=torch.nn.Tanh())


def fit(model, name):
    trainer = Trainer(
        max_epochs=3, accelerator="cpu", enable_progress_bar=False, log_every_n_steps=1, gradient_clip_val=1.0,
        logger=CSVLogger("logs", name),
    )  # fmt: skip
    trainer.fit(model, datamodule=Data())
    trainer.save_checkpoint(f"{name}.ckpt")
    return trainer.test(model, datamodule=Data(), verbose=False)[0]


steps = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
first = MVERegression(network(2), optimizer=adam, burnin_epochs=2)
exact = {
    "variance": fit(first, "variance"),
    "evidence": fit(DER(network(4), optimizer=adam), "evidence"),
    "quantiles": fit(QuantileRegression(network(3), optimizer=adam, lr_scheduler=steps), "quantiles"),
}
fit(MCDropoutRegression(network(2, 0.1), num_mc_samples=3, loss_fn=NLL(), optimizer=adam), "dropout")
members = [{"base_model": MVERegression(network(2), burnin_epochs=0), "ckpt_path": "variance.ckpt"}]
Trainer(accelerator="cpu", logger=False).test(DeepEnsembleRegression(members), datamodule=Data(), verbose=False)
averaged = SWAGRegression(
    first.model, max_swag_snapshots=2, snapshot_freq=1, num_mc_samples=2, swag_lr=1e-3, loss_fn=NLL()
)
trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False)
trainer.fit(averaged, datamodule=Data())
trainer.test(averaged, datamodule=Data(), verbose=False)
print(json.dumps({"exact": exact}))
