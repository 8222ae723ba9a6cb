"""darts: models of a series, unshuffled, so that numbers are comparable. Needs u8darts."""

import json

import numpy as np
import pandas as pd
from darts import TimeSeries
from darts.models import NBEATSModel, NLinearModel
from pytorch_lightning.callbacks import EarlyStopping

times = np.arange(144)
wave = (np.sin(times * np.pi / 6) * 0.3 + times / 144).astype("float32")
series = TimeSeries.from_times_and_values(pd.date_range("1949-01", periods=144, freq="MS"), wave)
train, val = series[:108], series[108:]
quiet = {"accelerator": "cpu", "enable_progress_bar": False}
sizes = {"num_layers": 2, "layer_widths": 16, "num_stacks": 2, "num_blocks": 1}
stopping = {**quiet, "callbacks": [EarlyStopping("val_loss", patience=5)]}
models = [
    NBEATSModel(24, 12, n_epochs=3, random_state=0, **sizes, pl_trainer_kwargs=stopping),
    NLinearModel(24, 12, n_epochs=3, random_state=0, pl_trainer_kwargs=quiet),
]
values = {}
for model in models:
    model.fit(train, val_series=val, dataloader_kwargs={"shuffle": False})
    values |= {f"{type(model).__name__} {name}": float(value) for name, value in model.trainer.callback_metrics.items()}
    model.predict(12, series=train)
print(json.dumps({"exact": values}))
