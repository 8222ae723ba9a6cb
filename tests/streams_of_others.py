"""The same samples in the formats of webdataset, MosaicML and litdata, and a task that is trained on them."""

import io
import tarfile

import torch
from torch import nn

import legato as lg

SAMPLES, BATCH = 60, 2


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
