"""pytorch-forecasting: a temporal fusion transformer, its predictions and their interpretation."""

import json

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from pytorch_forecasting import GroupNormalizer, QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import MAE

pl.seed_everything(42)
random = np.random.default_rng(0)
rows = [
    {"group": str(group), "time": time, "value": np.sin(time / 5 + group) + random.normal(0, 0.1), "price": time % 7.0}
    for group in range(4)
    for time in range(60)
]
series = pd.DataFrame(rows)
training = TimeSeriesDataSet(
    series[series.time <= 53],
    time_idx="time",
    target="value",
    group_ids=["group"],
    min_encoder_length=6,
    max_encoder_length=12,
    max_prediction_length=6,
    static_categoricals=["group"],
    time_varying_known_reals=["time", "price"],
    time_varying_unknown_reals=["value"],
    target_normalizer=GroupNormalizer(groups=["group"]),
)
validation = TimeSeriesDataSet.from_dataset(training, series, predict=True, stop_randomization=True)
train = training.to_dataloader(train=True, batch_size=16, num_workers=0)
val = validation.to_dataloader(train=False, batch_size=32, num_workers=0)
stopping = EarlyStopping(monitor="val_loss", min_delta=1e-4, patience=10)
trainer = pl.Trainer(
    max_epochs=2,
    accelerator="cpu",
    gradient_clip_val=0.1,
    limit_train_batches=8,
    callbacks=[LearningRateMonitor(), stopping],
    logger=TensorBoardLogger("logs"),
    enable_progress_bar=False,
)
sizes = {"hidden_size": 8, "attention_head_size": 2, "hidden_continuous_size": 4}
model = TemporalFusionTransformer.from_dataset(training, learning_rate=0.03, **sizes, loss=QuantileLoss())
trainer.fit(model, train_dataloaders=train, val_dataloaders=val)
best = TemporalFusionTransformer.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
predicted = best.predict(val, return_y=True, trainer_kwargs={**quiet})
raw = best.predict(val, mode="raw", return_x=True, trainer_kwargs={**quiet})
best.interpret_output(raw.output, reduction="sum")
print(json.dumps({"error": float(MAE()(predicted.output, predicted.y))}))
