"""Loaders of others that share out their data by themselves: every sample is trained on and evaluated once.

Each is made in `train_dataloader`, by every process for itself, as its own documentation has it.
"""

import warnings

import pytest
import torch
from streams_of_others import BATCH, SAMPLES, Sum, decode, options, write_samples
from torch import distributed
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

import legato as lg
from legato.base.errors import ConfigError, DataError
from legato.trainer.processes.launch import run_workers

warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # by torch, in torchdata's loader
warnings.filterwarnings("ignore", "Failed to load image Python extension")  # torchvision, without libjpeg

import datasets  # noqa: E402
import litdata  # noqa: E402
import streaming  # noqa: E402
import webdataset  # noqa: E402
from datasets.distributed import split_dataset_by_node  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated", "ignore:Length of IterableDataset", "ignore::ResourceWarning"
)


class Numbers(Dataset):
    """The samples 0, 1, 2 and so on."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([float(index)])


class ByRank(IterableDataset):
    """PyTorch's own recipe: each worker of each rank reads every n-th sample."""

    def __iter__(self):
        rank, ranks = place()
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(rank * workers + number, SAMPLES, ranks * workers):
            yield torch.tensor([float(index)])


def place():
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def sampler():
    rank, ranks = place()
    return DistributedSampler(Numbers(), ranks, rank, shuffle=False)


class OtherBatches(BatchSampler):
    """A batch sampler that Legato does not know."""


def columns():
    return datasets.Dataset.from_dict({"x": [[float(index)] for index in range(SAMPLES)]}).with_format("torch")


def split(data):
    rank, ranks = place()
    return DataLoader(split_dataset_by_node(data, rank=rank, world_size=ranks), BATCH)


def tars(folder):
    names = sorted(str(path) for path in (folder / "tar").iterdir())
    data = webdataset.WebDataset(names, nodesplitter=webdataset.split_by_node, shardshuffle=False).map(decode)
    return DataLoader(data, BATCH)


def mosaic(folder):
    return DataLoader(streaming.StreamingDataset(local=str(folder / "mds"), batch_size=BATCH, shuffle=False), BATCH)


def litdatas(folder):
    return litdata.StreamingDataset(str(folder / "lit"), shuffle=False, cache_dir=str(folder / "cache"))


LOADERS = {
    "a DistributedSampler": lambda folder: DataLoader(Numbers(), BATCH, sampler=sampler()),
    "a DistributedSampler in other batches": lambda folder: DataLoader(
        Numbers(), batch_sampler=OtherBatches(sampler(), BATCH, False)
    ),
    "torchdata": lambda folder: StatefulDataLoader(Numbers(), BATCH, sampler=sampler()),
    "a stream by rank": lambda folder: DataLoader(ByRank(), BATCH),
    "a stream by rank and worker": lambda folder: DataLoader(ByRank(), BATCH, num_workers=2),
    "datasets": lambda folder: split(columns()),
    "datasets as a stream": lambda folder: split(columns().to_iterable_dataset(num_shards=4)),
    "webdataset": tars,
    "mosaicml": mosaic,
    "litdata": lambda folder: litdata.StreamingDataLoader(litdatas(folder), batch_size=BATCH),
    "litdata in torch's loader": lambda folder: DataLoader(litdatas(folder), BATCH),
}


def train_on_all(folder, processes):
    """Return for each loader what all ranks have trained on and validated, the weight and the steps."""
    results = {}
    for name, make in LOADERS.items():
        task, trainer = Sum(make, folder), lg.Trainer(max_epochs=1, **options(folder, processes))
        trainer.fit(task)
        every = trainer.strategy.collectives.gather_objects((task.trained, task.validated))
        trained, validated = (sorted(value for rank in ranks for value in rank) for ranks in zip(*every, strict=True))
        results[name] = trained, validated, task.weight.item(), trainer.global_step
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the samples in the formats of webdataset, MosaicML and litdata."""
    return write_samples(tmp_path_factory.mktemp("samples"))


@pytest.fixture(scope="module", params=[1, 2])
def results(request, folder):
    if request.param == 1:
        return 1, train_on_all(folder, 1)
    return 2, run_workers(lambda: train_on_all(folder, 2), 2, threads=1)


@pytest.mark.parametrize("name", LOADERS)
def test_every_sample_is_trained_on_and_validated_once(results, name):
    processes, by_loader = results
    trained, validated, weight, steps = by_loader[name]
    assert trained == validated == [float(index) for index in range(SAMPLES)]
    if "worker" not in name:  # whose last batches are short
        assert steps == SAMPLES // (BATCH * processes)
        assert weight == pytest.approx(-sum(range(SAMPLES)) / (BATCH * processes), rel=1e-12)


def test_a_dataset_of_litdata_made_before_the_processes_is_dealt_out(tmp_path, folder):
    task, loader = Sum(), litdata.StreamingDataLoader(litdatas(folder), batch_size=BATCH)
    trainer = lg.Trainer(max_epochs=1, **options(tmp_path, 2))
    trainer.fit(task, loader)
    assert trainer.state.samples_seen == SAMPLES
    trainer = lg.Trainer(max_epochs=1, **options(tmp_path, 2), use_distributed_sampler=False)
    with pytest.raises(DataError, match="All 2 processes read the same data in epoch 0 of StreamingDataLoader"):
        trainer.fit(Sum(), loader)
    assert trainer.global_step == 0


def test_a_dataset_of_mosaicml_made_before_the_processes_is_refused(tmp_path, folder):
    with pytest.raises(ConfigError, match=r"A MosaicML StreamingDataset .* Create it in train_dataloader"):
        lg.Trainer(max_epochs=1, **options(tmp_path, 2)).fit(Sum(), mosaic(folder))
