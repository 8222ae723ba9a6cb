"""chemprop: a message passing network over molecules, with its own way to load checkpoints. Needs chemprop."""

import json

import numpy as np
from chemprop import data, featurizers, models, nn
from lightning import pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

pl.seed_everything(0)
molecules = ["C" * size + end for end in "ON" for size in range(1, 21)]
points = [data.MoleculeDatapoint.from_smi(text, np.array([float(len(text))])) for text in molecules]
featurizer = featurizers.SimpleMoleculeMolGraphFeaturizer()
train, val, test = (data.MoleculeDataset(subset, featurizer) for subset in (points[:28], points[28:34], points[34:]))
scaler = train.normalize_targets()
val.normalize_targets(scaler)
loaders = [data.build_dataloader(subset, num_workers=0, batch_size=8, shuffle=False) for subset in (train, val, test)]
unscale = nn.UnscaleTransform.from_standard_scaler(scaler)
head = nn.RegressionFFN(input_dim=16, output_transform=unscale)
passing, metrics = nn.BondMessagePassing(d_h=16), [nn.metrics.RMSE(), nn.metrics.MAE()]
model = models.MPNN(passing, nn.MeanAggregation(), head, True, metrics)
checkpoint = ModelCheckpoint("checkpoints", "best-{epoch}-{val_loss:.2f}", "val_loss", mode="min", save_last=True)
trainer = pl.Trainer(
    logger=False, enable_progress_bar=False, accelerator="cpu", devices=1, max_epochs=3, callbacks=[checkpoint]
)
trainer.fit(model, loaders[0], loaders[1])
values = {name: float(value) for name, value in trainer.callback_metrics.items()}
values |= trainer.test(dataloaders=loaders[2], verbose=False, weights_only=False)[0]
again = models.MPNN.load_from_checkpoint(checkpoint.best_model_path)
assert len(trainer.predict(again, loaders[2])) == 1
print(json.dumps({"exact": values, "best": checkpoint.best_model_path.rpartition("/")[2]}))
