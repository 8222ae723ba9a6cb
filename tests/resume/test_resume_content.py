"""A resume on changed data is reported, and refused within an epoch and under bitwise."""

import random

import numpy as np
import pytest
import torch
from tiny import Tiny
from torch.utils.data import DataLoader, Dataset, Subset, WeightedRandomSampler

import legato as lg
from legato.base.errors import ConfigError, DataError
from legato.trainer.processes.launch import run_workers

SAMPLES, STEPS = 24, 6


class Rows(Dataset):
    """Rows with noise from the generators that Legato keys; `shift` changes the data."""

    def __init__(self, shift=0.0, length=SAMPLES, noise=None):
        self.shift, self.length, self.noise, self.epoch, self.read = shift, length, noise, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read += 1
        noise = torch.rand(1) + random.random() + np.random.rand() + self.epoch
        shift_of_row = 0.0 if self.noise is None else self.noise.random()
        return torch.full((3,), float(index)) + noise + self.shift + shift_of_row, torch.zeros(1)


def loader(dataset, workers=0, **options):
    return DataLoader(dataset, 4, num_workers=workers, **{"shuffle": True, **options})


def run(path, data, **options):
    """Train with a checkpoint of each step; resume an existing run."""
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "save_code": False}
    callbacks = [lg.callbacks.Checkpoint(every_n_train_steps=1)]
    arguments = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "default_root_dir": path,
        "callbacks": callbacks,
        **silent,
        **options,
    }
    lg.Trainer(**arguments).fit(Tiny(), data, resume="auto")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_data_is_not_told_and_other_data_is_refused_within_an_epoch(tmp_path, caplog, workers):
    run(tmp_path, loader(Rows(), workers), max_steps=2)
    run(tmp_path, loader(Rows(), workers), max_steps=3)
    assert "other settings" not in caplog.text
    with pytest.raises(
        ConfigError, match=r"in the middle of epoch 0 .*: samples of the dataset: saved ones -> different ones"
    ):
        run(tmp_path, loader(Rows(shift=1.0), workers))
    run(tmp_path, loader(Rows(), workers), max_steps=STEPS)
    caplog.clear()
    run(tmp_path, loader(Rows(shift=1.0), workers))
    assert (
        "New values that change the samples in each step: samples of the dataset: saved ones -> different ones."
        in caplog.text
    )


@pytest.mark.slow
def test_two_processes_tell_the_same(tmp_path, caplog):
    options = {"devices": 2, "strategy": "ddp"}
    run(tmp_path, loader(Rows()), replicas=2, max_steps=1)
    run(tmp_path, loader(Rows()), max_steps=2, **options)
    assert "other settings" not in caplog.text
    with pytest.raises(ConfigError, match="samples of the dataset: saved ones -> different ones"):
        run(tmp_path, loader(Rows(shift=1.0)), **options)
    with pytest.raises(ConfigError, match="samples of the dataset: saved ones -> different ones"):
        run_workers(lambda: run(tmp_path, loader(Rows(shift=1.0))), 1, threads=1)


def test_bitwise_goes_on_with_the_same_data_alone(tmp_path):
    run(tmp_path, loader(Rows()), max_steps=STEPS, reproducible="bitwise")
    with pytest.raises(ConfigError, match="bitwise would not stay bitwise identical: samples of the dataset"):
        run(tmp_path, loader(Rows(shift=1.0)), reproducible="bitwise")
    run(tmp_path, loader(Rows()), reproducible="bitwise")


def test_what_is_another_at_each_reading_tells_nothing(tmp_path, caplog):
    run(tmp_path, loader(Rows(noise=random.Random())), max_steps=2)
    run(tmp_path, loader(Rows(noise=random.Random())))
    assert "other settings" not in caplog.text


def test_what_cannot_be_read_tells_nothing(tmp_path, caplog):
    class Failing(Rows):
        def __getitem__(self, index):
            if index == self.fails:
                raise OSError("no such file")
            return super().__getitem__(index)

    data = Failing()
    data.fails = None
    run(tmp_path, loader(data, shuffle=False), max_steps=2)
    data = Failing()
    data.fails = 0
    run(tmp_path, loader(data, shuffle=False), max_steps=3)
    assert "other settings" not in caplog.text


def test_the_order_and_the_numbers_of_a_resumed_run_are_those_of_an_undisturbed_one(tmp_path):
    class Kept(Tiny):
        def __init__(self):
            super().__init__()
            self.sums = []

        def training_step(self, batch, batch_idx):
            self.sums.append((batch[0].sum() + torch.rand(())).item())
            return super().training_step(batch, batch_idx)

    def kept(path, **options):
        task, data = Kept(), Rows()
        sampler = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
        trainer = lg.Trainer(
            max_epochs=2, accelerator="cpu", default_root_dir=path, logger=False, enable_progress_bar=False,
            callbacks=[lg.callbacks.Checkpoint(every_n_train_steps=1)], enable_model_summary=False, **options,
        )  # fmt: skip
        trainer.fit(task, loader(data, shuffle=False, sampler=sampler), resume="auto")
        return task.sums, data.read

    reference, read = kept(tmp_path / "whole")
    assert read == 2 * SAMPLES  # a new run reads nothing twice
    first, _ = kept(tmp_path / "stopped", max_steps=4)
    rest, read = kept(tmp_path / "stopped")
    assert first + rest == reference
    assert read == 2 * SAMPLES - 4 * 4 + 2 * 4


def test_each_of_combined_loaders_is_compared(tmp_path):
    def both(shift):
        return {"a": loader(Rows()), "b": loader(Rows(shift, length=12))}

    class Both(Tiny):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"], batch_idx)

    def fit(shift, **options):
        trainer = lg.Trainer(
            max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, logger=False, enable_progress_bar=False,
            callbacks=[lg.callbacks.Checkpoint(every_n_train_steps=1)], enable_model_summary=False, **options,
        )  # fmt: skip
        trainer.fit(Both(), both(shift), resume="auto")

    fit(0.0, max_steps=2)
    with pytest.raises(ConfigError, match="samples of the dataset of b: saved ones -> different ones"):
        fit(1.0)
    fit(0.0)


class Files(Dataset):
    def __init__(self, folder):
        self.paths = [(str(path), 0) for path in sorted(folder.iterdir())]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return torch.ones(3), torch.zeros(1)


def test_files_are_compared_by_name_and_size(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text("x" * number)
    run(tmp_path, loader(Subset(Files(folder), range(24))), max_steps=2)
    run(tmp_path, loader(Subset(Files(folder.rename(tmp_path / "moved")), range(24))), max_steps=3)
    (tmp_path / "moved" / "39.txt").write_text("another")
    with pytest.raises(ConfigError, match="files of the dataset: 40 files"):
        run(tmp_path, loader(Subset(Files(tmp_path / "moved"), range(24))))


def test_a_replay_on_other_data_is_refused(tmp_path):
    def make(shift=0.0, **options):
        callbacks = [lg.callbacks.Checkpoint(every_n_train_steps=2)]
        trainer = lg.Trainer(max_epochs=1, default_root_dir=tmp_path, callbacks=callbacks, accelerator="cpu", **options)
        return trainer, Tiny(), loader(Rows(shift))

    trainer, task, data = make(log_every_n_steps=1)
    trainer.fit(task, data)
    assert lg.lab.replay(trainer.run_dir, 4, make=make).holds
    with pytest.raises(DataError, match="samples in the dataset have changed"):
        lg.lab.replay(trainer.run_dir, 4, make=lambda: make(1.0))
