"""GluonTS: two estimators over a series, with windows drawn at random. Needs gluonts[torch]."""

import json

import numpy as np
import pandas as pd
from gluonts.dataset.pandas import PandasDataset
from gluonts.dataset.split import split
from gluonts.torch import DeepAREstimator, SimpleFeedForwardEstimator

times = np.arange(144)
months = pd.date_range("1949-01", periods=144, freq="MS")
frame = pd.DataFrame({"y": 100 + np.sin(times * np.pi / 6) * 30 + times}, dtype="float32", index=months)
training, generator = split(PandasDataset(frame, target="y"), offset=-36)
test = generator.generate_instances(prediction_length=12, windows=3)
quiet = {"max_epochs": 3, "accelerator": "cpu", "enable_progress_bar": False}
options = {"prediction_length": 12, "num_batches_per_epoch": 5, "trainer_kwargs": quiet}
counts = [
    len(list(estimator.train(training).predict(test.input)))
    for estimator in (DeepAREstimator(freq="M", **options), SimpleFeedForwardEstimator(**options))
]
print(json.dumps({"forecasts": counts}))
