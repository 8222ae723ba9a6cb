"""Callbacks that change training: weight averaging, fine-tuning, accumulation by epoch; and that write predictions."""

import json

import pytest
import torch
from parts import Parts, Stop, run, weights
from scripted import loader, make_trainer
from torch.utils.data import DataLoader, TensorDataset

import legato as lg
from legato.base.errors import ConfigError
from legato.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LambdaCallback,
    OnExceptionCheckpoint,
    PredictionWriter,
    WeightAveraging,
)
from legato.loggers import JSONLinesLogger

CASES = {
    "mean": (WeightAveraging, False),
    "backbone": (lambda: BackboneFinetuning(1, lambda epoch: 1.5), True),
    "accumulation": (lambda: GradientAccumulationScheduler({0: 1, 1: 2, 3: 4}), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 5, 6])
@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_run_equals_an_undisturbed_one(tmp_path, name, step):
    make, only_head = CASES[name]
    _, uninterrupted = run(tmp_path / "whole", make, only_head)
    first, _ = run(tmp_path, make, only_head, Stop(step, tmp_path / "stopped"))
    assert first.global_step == step
    trainer, task = run(tmp_path / "again", make, only_head, resume=tmp_path / "stopped")
    assert torch.equal(weights(task), weights(uninterrupted))
    assert trainer.current_epoch == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(tmp_path, name):
    make, only_head = CASES[name]
    options = {"replicas": 2}
    _, single = run(tmp_path / "one", make, only_head, **options)
    _, two = run(tmp_path / "two", make, only_head, strategy="ddp", devices=2, **options)
    assert torch.allclose(weights(two), weights(single), atol=1e-6)
    assert torch.allclose(two.head.weight, single.head.weight, atol=1e-6)


class Own(BaseFinetuning):
    """Unfreezes the backbone in epoch 1."""

    def freeze_before_training(self, task):
        self.freeze(task.backbone, train_bn=False)

    def finetune_function(self, task, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(task.backbone, optimizer, lr=0.05)


def test_finetuning_of_ones_own(tmp_path):
    seen = []

    class Look(lg.Callback):
        def on_train_epoch_end(self, trainer, task):
            seen.append((task.backbone[0].weight.requires_grad, len(trainer.optimizers[0].param_groups)))

    before = Parts().backbone[0].weight.clone()
    _, task = run(tmp_path, Own, True, Look())
    assert seen == [(False, 1), (True, 2), (True, 2), (True, 2)]
    assert not torch.equal(task.backbone[0].weight, before)
    with pytest.raises(ConfigError, match="requires Headless to have a `backbone` module"):
        make_trainer(tmp_path, BackboneFinetuning()).fit(Headless(), loader())


def test_finetuning_goes_on_where_the_optimizer_was_given_what_is_trained(tmp_path):
    class Trained(Parts):
        def configure_optimizers(self):
            return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.1)

    groups = []
    for epochs in (2, 4):
        trainer, task = make_trainer(tmp_path, Own(), max_epochs=epochs, enable_checkpointing=True), Trained()
        trainer.fit(task, loader(), resume="auto")
        groups.append([len(group["params"]) for group in trainer.optimizers[0].param_groups])
    assert groups[0] == groups[1]
    assert len(groups[0]) == 2
    assert all(parameter.requires_grad for parameter in task.parameters())


class Headless(lg.Task):
    """Has no backbone."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        return self.net(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_schedule_of_accumulation(tmp_path):
    counts = []
    look = LambdaCallback(on_train_epoch_end=lambda trainer, task: counts.append(trainer.global_step))
    trainer, _ = run(tmp_path, lambda: GradientAccumulationScheduler({1: 2, 2: 4}), False, look)
    assert counts == [4, 6, 7, 8]
    assert trainer.accumulate_grad_batches == 1
    for wrong in ({}, {0: 0}, {-1: 2}, {0: 1.5}):
        with pytest.raises(ConfigError, match="GradientAccumulationScheduler"):
            GradientAccumulationScheduler(wrong)
    with pytest.raises(ConfigError, match="cannot be combined"):
        run(tmp_path, lambda: GradientAccumulationScheduler({0: 2}), False, accumulate_grad_batches=2)


class Written(PredictionWriter):
    """Writes a file for each process."""

    def __init__(self, folder, interval):
        super().__init__(interval)
        self.folder = folder

    def write_on_batch_end(self, trainer, task, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        path = self.folder / f"{dataloader_idx}-{batch_idx}-{trainer.global_rank}.json"
        path.write_text(json.dumps([prediction, batch_indices]))

    def write_on_epoch_end(self, trainer, task, predictions, batch_indices):
        (self.folder / f"epoch-{trainer.global_rank}.json").write_text(json.dumps([predictions, batch_indices]))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_predictions_are_written_with_their_indices(tmp_path, processes):
    values = torch.arange(20.0).reshape(5, 4)
    trainer = make_trainer(tmp_path, Written(tmp_path, "batch_and_epoch"), strategy="ddp", devices=processes)
    predictions = trainer.predict(Parts(), DataLoader(TensorDataset(values), batch_size=2))
    assert [prediction for batch in predictions for prediction in batch] == values.sum(1).tolist()
    written = {}
    for path in [*tmp_path.glob("epoch-*.json")]:
        predictions, indices = json.loads(path.read_text())
        assert len(indices) == 1
        for batch, places in zip(predictions, indices[0], strict=True):
            written |= dict(zip(places, batch, strict=True))
    assert written == dict(enumerate(values.sum(1).tolist()))
    assert len(list(tmp_path.glob("0-*.json"))) == 3
    with pytest.raises(ConfigError, match="write_interval"):
        PredictionWriter("never")


def test_functions_as_hooks(tmp_path):
    calls = []
    callback = LambdaCallback(setup=lambda trainer, task, stage: calls.append(stage), on_train_end=None)
    run(tmp_path, lambda: callback, False)
    assert calls == ["fit"]
    with pytest.raises(ConfigError, match="Did you mean 'on_train_end'"):
        LambdaCallback(on_train_ends=print)


def test_a_checkpoint_when_the_run_fails(tmp_path):
    def fail(trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            raise ZeroDivisionError

    callback = OnExceptionCheckpoint(tmp_path / "own", "failed")
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, lambda: callback, False, LambdaCallback(on_train_batch_end=fail))
    assert callback.ckpt_path == str(tmp_path / "own" / "failed")
    trainer, _ = run(tmp_path / "again", WeightAveraging, False, resume=callback.ckpt_path)
    assert trainer.global_step == 16
    with pytest.raises(ConfigError, match="filename must be a folder name"):
        OnExceptionCheckpoint(tmp_path, "a/b")


def test_statistics_of_the_device(tmp_path):
    pytest.importorskip("psutil")
    trainer, _ = run(tmp_path, DeviceStatsMonitor, False, logger=JSONLinesLogger(), log_every_n_steps=4)
    lines = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    points = [line for line in lines if any(name.endswith("cpu_percent") for name in line)]
    assert [line["step"] for line in points] == [4, 8, 12, 16]
    assert "DeviceStatsMonitor.on_train_batch_end/cpu_vm_percent" in points[0]
    with pytest.raises(ConfigError, match="needs a logger"):
        run(tmp_path, DeviceStatsMonitor, False)
