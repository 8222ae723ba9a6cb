"""neuralforecast: several models over windows of series; all windows in each step, so that numbers are comparable."""

import json

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import LSTM, MLP, NHITS, DLinear

times = np.arange(120)
days = pd.date_range("2000-01-31", periods=120, freq="ME")
waves = {name: 10 * level + np.sin(times * np.pi / 6) * 3 + times * 0.05 for level, name in enumerate("ab", 1)}
series = pd.concat([pd.DataFrame({"unique_id": name, "ds": days, "y": wave}) for name, wave in waves.items()])
options = {"windows_batch_size": None, "input_size": 24, "h": 6, "max_steps": 20, "val_check_steps": 5}
quiet = {"enable_progress_bar": False, "accelerator": "cpu", "enable_model_summary": False}
kinds = [NHITS, MLP, DLinear, LSTM]
forecast = NeuralForecast(models=[kind(**options, **quiet) for kind in kinds], freq="ME")
forecast.fit(series, val_size=6)
predictions = forecast.predict()
values = {kind.__name__: float(predictions[kind.__name__].mean()) for kind in kinds}
forecast.save("saved", overwrite=True, save_dataset=True)
again = NeuralForecast.load("saved").predict()
assert np.array_equal(again["MLP"], predictions["MLP"])
assert len(forecast.cross_validation(series, n_windows=2, val_size=6)) == 2 * 2 * 6
print(json.dumps({"exact": values}))
