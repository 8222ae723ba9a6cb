"""torch-choice: a conditional logit model, trained by its own helper."""

import json

import torch
from torch_choice.data import ChoiceDataset
from torch_choice.model import ConditionalLogitModel
from torch_choice.utils.run_helper_lightning import run

torch.manual_seed(0)
prices = torch.randn(120, 4, 2)
chosen = prices.sum(-1).argmax(-1)
train, test = (ChoiceDataset(item_index=chosen[rows], price_obs=prices[rows]) for rows in (slice(80), slice(80, 120)))
model = ConditionalLogitModel("(price_obs|constant)", dataset=train, num_items=4)
options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
fitted = run(model, train, dataset_test=test, num_epochs=8, learning_rate=0.1, report_std=False, **options)
print(json.dumps({"exact": {"coefficients": fitted.state_dict()["coef_dict.price_obs[constant].coef"].tolist()}}))
