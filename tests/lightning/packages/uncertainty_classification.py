"""torch-uncertainty's quick start: a classification routine, whose trainer shows the test's results by its own loop."""

import json

import torch
from lightning import LightningDataModule, seed_everything
from torch_uncertainty import TUTrainer
from torch_uncertainty.models.mlp import mlp
from torch_uncertainty.routines import ClassificationRoutine

seed_everything(0)
inputs = torch.randn(64, 4)
classes = (inputs.sum(1) > 0).long() + (inputs[:, 0] > 1).long()
dataset = torch.utils.data.TensorDataset(inputs, classes)


class Data(LightningDataModule):
    training_task, num_classes, eval_ood, eval_shift = "classification", 3, False, False

    def loader(self):
        return torch.utils.data.DataLoader(dataset, batch_size=16)

    train_dataloader = val_dataloader = loader

    def test_dataloader(self):
        return [self.loader()]

    def get_test_set(self):
        return dataset

    get_val_set = get_test_set


model = mlp(in_features=4, num_outputs=3, hidden_dims=[8])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
routine = ClassificationRoutine(model, num_classes=3, loss=torch.nn.CrossEntropyLoss(), optim_recipe=optimizer)
trainer = TUTrainer(accelerator="cpu", max_epochs=2, enable_progress_bar=False)
trainer.fit(routine, Data())
print(json.dumps({"exact": {name: float(value) for name, value in trainer.test(routine, Data())[0].items()}}))
