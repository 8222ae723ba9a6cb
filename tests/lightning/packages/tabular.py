"""pytorch-tabular: training, evaluation and a saved model for a table."""

import json

import numpy as np
import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig

random = np.random.default_rng(0)
columns = {"a": random.normal(size=300), "b": random.normal(size=300), "c": random.integers(0, 3, 300).astype(str)}
table = pd.DataFrame(columns)
table["target"] = ((table.a + table.b) > 0).astype(int)
model = TabularModel(
    data_config=DataConfig(target=["target"], continuous_cols=["a", "b"], categorical_cols=["c"], num_workers=0),
    model_config=CategoryEmbeddingModelConfig(task="classification", layers="16-8", learning_rate=1e-2),
    optimizer_config=OptimizerConfig(),
    trainer_config=TrainerConfig(
        batch_size=32,
        max_epochs=5,
        accelerator="cpu",
        progress_bar="none",
        checkpoints="valid_loss",
        early_stopping="valid_loss",
    ),
    verbose=False,
)
model.fit(train=table[:200], validation=table[200:250])
test = table[250:]
model.evaluate(test, verbose=False)
model.save_model("saved")
again = TabularModel.load_model("saved")
accuracies = [
    (fitted.predict(test)["target_prediction"].astype(int) == test.target).mean() for fitted in (model, again)
]
assert accuracies[0] == accuracies[1]
print(json.dumps({"accuracy": float(accuracies[0])}))
