"""A small task in two parts, and runs of it that are stopped and go on, for callbacks that change a training."""

import torch
from scripted import make_trainer
from torch.utils.data import DataLoader, TensorDataset

import legato as lg


class Parts(lg.Task):
    """A backbone with a batch norm, and a head."""

    def __init__(self, only_head=False):
        super().__init__()
        torch.manual_seed(3)
        self.backbone = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        self.head = torch.nn.Linear(3, 1)
        self.only_head, self.seen = only_head, []

    def training_step(self, batch):
        self.seen.append(self.current_epoch)
        return self.head(self.backbone(batch[0])).square().mean()

    def validation_step(self, batch):
        self.log("val/out", self.head(self.backbone(batch[0])).mean())

    def predict_step(self, batch):
        return batch[0].sum(1).tolist()

    def configure_optimizers(self):
        parameters = self.head.parameters() if self.only_head else self.parameters()
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]


def data(batches=4, size=2):
    generator = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(torch.randn(batches * size, 4, generator=generator)), batch_size=size, shuffle=True)


def weights(task):
    return torch.cat([value.double().flatten() for value in task.state_dict().values()])


class Stop(lg.Callback):
    """Saves and stops after a step."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def run(tmp_path, make, only_head, *more, resume=None, **options):
    task = Parts(only_head)
    trainer = make_trainer(tmp_path, make(), *more, max_epochs=4, **options)
    trainer.fit(task, data(), data(1), resume=resume)
    return trainer, task
