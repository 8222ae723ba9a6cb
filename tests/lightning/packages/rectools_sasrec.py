"""RecTools: a transformer that recommends items. Needs rectools[torch]."""

import json

import numpy as np
import pandas as pd
from pytorch_lightning import Trainer, seed_everything
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel

seed_everything(32)
random = np.random.default_rng(0)
columns = {Columns.User: random.integers(0, 30, 400), Columns.Item: random.integers(0, 20, 400), Columns.Weight: 1}
columns[Columns.Datetime] = pd.date_range("2020", periods=400)
dataset = Dataset.construct(pd.DataFrame(columns))


def make_trainer(**kwargs):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": None, "accelerator": "cpu"}
    return Trainer(max_epochs=2, min_epochs=1, deterministic=True, devices=1, **quiet)


model = SASRecModel(n_factors=8, n_blocks=1, n_heads=1, session_max_len=8, batch_size=16, get_trainer_func=make_trainer)
model.fit(dataset)
recommended = model.recommend(users=[1, 2], dataset=dataset, k=3, filter_viewed=False)
print(json.dumps({"rows": len(recommended)}))
