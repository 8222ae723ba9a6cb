"""StochasticWeightAveraging: exact over a resume, its learning rates, its batch norms."""

import pytest
import torch
from scripted import make_trainer
from torch.utils.data import DataLoader, TensorDataset

import legato as lg
from legato.base.errors import ConfigError
from legato.compat.lightning.pytorch.callbacks import StochasticWeightAveraging


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


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 5, 6])
def test_an_interrupted_run_equals_an_undisturbed_one(tmp_path, step):
    def make():
        return StochasticWeightAveraging(0.02, 2, annealing_epochs=2)

    _, whole = run(tmp_path / "whole", make, False)
    first, _ = run(tmp_path, make, False, Stop(step, tmp_path / "stopped"))
    assert first.global_step == step
    trainer, task = run(tmp_path / "again", make, False, resume=tmp_path / "stopped")
    assert torch.equal(weights(task), weights(whole))
    assert trainer.current_epoch == 4


def test_what_swa_refuses(tmp_path):
    for arguments in ((-0.1,), (0.1, 0), (0.1, 1.5), (0.1, 1, -1), (0.1, 1, 1, "sin"), ([],)):
        with pytest.raises(ConfigError, match="StochasticWeightAveraging"):
            StochasticWeightAveraging(*arguments)
    with pytest.raises(ConfigError, match="one learning rate or one for each"):
        run(tmp_path, lambda: StochasticWeightAveraging([0.1, 0.2]), False)


def test_the_learning_rate_of_swa(tmp_path):
    rates = []

    class Rates(lg.Callback):
        def on_train_epoch_start(self, trainer, task):
            rates.append(round(trainer.optimizers[0].param_groups[0]["lr"], 6))

    run(tmp_path, Rates, False, StochasticWeightAveraging(0.02, 2, annealing_epochs=2, annealing_strategy="linear"))
    assert rates == [0.1, 0.1, 0.06, 0.02]


def test_batch_norms_of_averaged_weights_are_measured(tmp_path):
    trainer, task = run(tmp_path, lambda: StochasticWeightAveraging(0.02, 1), False)
    norm = task.backbone[1]
    inputs = task.backbone[0](trainer.train_dataloader.dataset.tensors[0])
    assert norm.num_batches_tracked == 4
    assert norm.momentum == 0.1
    assert torch.allclose(norm.running_mean, inputs.mean(0), atol=1e-6)
    assert len(task.seen) == 20  # 16 steps, and 4 batches without
