"""The same samples in the formats of webdataset, MosaicML and litdata, and a task that is trained on them."""

import io
import os
import signal
import tarfile

import pytest
import torch
from torch import nn

import legato as lg
from legato.trainer.processes.launch import run_workers

SAMPLES, BATCH, EPOCHS = 60, 2, 2


def decode(sample):
    return torch.tensor([float(sample["txt"])])


def write_samples(folder):
    """Write the samples 0, 1, 2 and so on; return the folder."""
    import streaming
    from litdata.streaming.cache import Cache

    (folder / "tar").mkdir()
    for shard in range(4):
        with tarfile.open(folder / "tar" / f"{shard}.tar", "w") as file:
            for index in range(15 * shard, 15 * (shard + 1)):
                member = tarfile.TarInfo(f"{index:02}.txt")
                member.size = len(str(index))
                file.addfile(member, io.BytesIO(str(index).encode()))
    with streaming.MDSWriter(out=str(folder / "mds"), columns={"x": "float64"}) as writer:
        for index in range(SAMPLES):
            writer.write({"x": float(index)})
    chunks = Cache(str(folder / "lit"), chunk_size=10)
    for index in range(SAMPLES):
        chunks[index] = {"x": float(index)}
    chunks.done()
    chunks.merge()
    return folder


class Sum(lg.Task):
    """A weight that a step lowers by the mean of its samples; keeps the samples that it has seen."""

    def __init__(self, make=None, folder=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.make, self.folder = make, folder
        self.trained, self.validated = [], []

    def training_step(self, batch, batch_idx):
        values = (batch["x"] if isinstance(batch, dict) else batch).flatten()
        self.trained += values.tolist()
        return (self.weight * values).mean()

    def validation_step(self, batch, batch_idx):
        self.validated += (batch["x"] if isinstance(batch, dict) else batch).flatten().tolist()

    def train_dataloader(self):
        return self.make(self.folder) if self.make else None

    def val_dataloader(self):
        return self.make(self.folder) if self.make else None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def options(path, processes):
    layout = {"devices": processes, "strategy": "ddp" if processes > 1 else "single", "accelerator": "cpu"}
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "save_code": False}
    return {**layout, **silent, "enable_checkpointing": False, "default_root_dir": path, "num_sanity_val_steps": 0}


class Written(Sum):
    """Writes the samples of each step to a file of its process, and dies in the step `dies_in` of process `of`."""

    def __init__(self, make, folder, notes, dies_in=0, of=0):
        super().__init__(make, folder)
        self.notes, self.dies_in, self.of = notes, dies_in, of

    def training_step(self, batch, batch_idx):
        if self.global_step + 1 == self.dies_in and self.global_rank == self.of:
            os.kill(os.getpid(), signal.SIGKILL)
        values = (batch["x"] if isinstance(batch, dict) else batch).flatten()
        with (self.notes / str(self.global_rank)).open("a") as file:
            file.writelines(f"{self.global_step} {value}\n" for value in values.tolist())
        return (self.weight * values).mean()

    def val_dataloader(self):
        return None


def trained(path, make, folder, processes, dies_in=0, **changes):
    """Return the samples of each step of a run on some processes; it goes on with what is in `path`."""
    notes = path / f"notes-{len(list(path.glob('notes-*')))}"
    notes.mkdir(parents=True)
    task = Written(make, folder, notes, dies_in, processes - 1)
    arguments = {**options(path, processes), "enable_checkpointing": True, "max_epochs": EPOCHS, **changes}
    callbacks = [lg.callbacks.Checkpoint(every_n_train_steps=2)]

    def fit():
        lg.Trainer(**arguments, callbacks=callbacks).fit(task, resume="auto")

    if dies_in:
        with pytest.raises(Exception, match=r"SIGKILL|killed|died"):
            run_workers(fit, 1, threads=1) if processes == 1 else fit()
    else:
        fit()
    steps = {}
    for file in notes.iterdir():
        for line in file.read_text().splitlines():
            step, value = line.split()
            steps.setdefault(int(step), []).append(float(value))
    return {step: sorted(values) for step, values in steps.items()}
