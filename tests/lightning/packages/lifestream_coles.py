"""pytorch-lifestream: contrastive learning over sequences of events. Needs pytorch-lifestream."""

import json
from functools import partial

import numpy as np
import pytorch_lightning as pl
import torch
from ptls.data_load.datasets import MemoryMapDataset
from ptls.frames import PtlsDataModule
from ptls.frames.coles import ColesDataset, CoLESModule
from ptls.frames.coles.split_strategy import SampleSlices
from ptls.nn import RnnSeqEncoder, TrxEncoder

pl.seed_everything(0)
random = np.random.default_rng(0)
clients = [
    {
        "event_time": torch.arange(40),
        "code": torch.tensor(random.integers(1, 10, 40)),
        "amount": torch.tensor(random.normal(size=40)).float(),
    }
    for _ in range(40)
]
events = TrxEncoder(embeddings={"code": {"in": 12, "out": 4}}, numeric_values={"amount": "identity"})
model = CoLESModule(
    seq_encoder=RnnSeqEncoder(trx_encoder=events, hidden_size=8, type="gru"),
    optimizer_partial=partial(torch.optim.Adam, lr=0.01),
    lr_scheduler_partial=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.9),
)
train, valid = (
    ColesDataset(MemoryMapDataset(data=subset), splitter=SampleSlices(split_count=3, cnt_min=5, cnt_max=15))
    for subset in (clients[:30], clients[30:])
)
data = PtlsDataModule(train_data=train, valid_data=valid, train_num_workers=0, train_batch_size=8, valid_batch_size=8)
trainer = pl.Trainer(max_epochs=2, accelerator="cpu", enable_progress_bar=False, logger=True)
trainer.fit(model, data)
print(json.dumps({name: float(value) for name, value in trainer.callback_metrics.items()}))
