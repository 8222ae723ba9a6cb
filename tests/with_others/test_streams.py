"""Streams with a state of their own, killed in the middle of an epoch, and batches that are no rows of tensors."""

import shutil
import warnings

import datasets
import litdata
import pytest
import streaming
import torch
import webdataset
from streams_of_others import BATCH, EPOCHS, SAMPLES, decode, options, trained, write_samples
from torch import nn
from torch.nested import nested_tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening

import legato as lg
from legato.base.errors import ConfigError

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)  # PyG scripts its classes
    from torch_geometric.data import Batch, Data
    from torch_geometric.loader import DataLoader as GraphLoader

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:Length of IterableDataset")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_samples(tmp_path_factory.mktemp("samples"))


def rows(workers, **shuffle):
    data = datasets.Dataset.from_dict({"x": [[float(index)] for index in range(SAMPLES)]})
    stream = data.to_iterable_dataset(num_shards=4)
    return DataLoader(
        (stream.shuffle(**shuffle) if shuffle else stream).with_format("torch"), BATCH, num_workers=workers
    )


def tars(folder, workers):
    names = sorted(str(path) for path in (folder / "tar").iterdir())
    return DataLoader(webdataset.WebDataset(names, shardshuffle=False).map(decode), BATCH, num_workers=workers)


def mosaic(folder, workers):
    data = streaming.StreamingDataset(local=str(folder / "mds"), batch_size=BATCH, shuffle=True, shuffle_seed=5)
    return streaming.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)


def lit(folder, workers):
    data = litdata.StreamingDataset(str(folder / "lit"), shuffle=True, cache_dir=str(folder / "cache"))
    return litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)


MAKE = {
    "datasets": lambda folder, workers: rows(workers),
    "datasets, shuffled": lambda folder, workers: rows(workers, seed=3, buffer_size=10),
    "webdataset": tars,
    "mosaicml": mosaic,
    "litdata": lit,
}


def train(path, name, folder, processes, workers, dies_in=0, **changes):
    return trained(path, lambda folder: MAKE[name](folder, workers), folder, processes, dies_in, **changes)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", MAKE)
def test_a_killed_run_goes_on_with_what_was_left(tmp_path, folder, caplog, name, workers):
    uninterrupted = train(tmp_path / "whole", name, folder, 1, workers)
    assert sorted(value for values in uninterrupted.values() for value in values) == sorted(
        [float(index) for index in range(SAMPLES)] * EPOCHS
    )
    # loaders with a state count epochs themselves
    for dies_in in (8, 40) if name in ("mosaicml", "litdata") else (8,):
        killed = train(tmp_path / f"killed-{dies_in}", name, folder, 1, workers, dies_in)
        again = train(tmp_path / f"killed-{dies_in}", name, folder, 1, workers)
        assert min(again) > 0
        assert killed | again == uninterrupted
        assert {step: uninterrupted[step] for step in again} == again
    seeks = name in ("datasets", "mosaicml", "litdata")
    assert ("again to return to step 6 of epoch 0" not in caplog.text) == seeks
    if name == "datasets, shuffled":
        assert "IterableDataset has a state that does not restore its position" in caplog.text
    if name == "webdataset":
        assert "DataLoader over WebDataset has no state_dict, so 6 batches are read again" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_is_dealt_out_goes_on_on_any_number_of_processes(tmp_path, folder, workers):
    uninterrupted = train(tmp_path / "whole", "datasets", folder, 1, workers, replicas=3)
    killed = train(tmp_path / "killed", "datasets", folder, 2, workers, dies_in=6, replicas=3)
    assert {step: uninterrupted[step] for step in killed if step < 5} == {
        step: killed[step] for step in killed if step < 5
    }
    for processes in (1, 2, 3):
        shutil.copytree(tmp_path / "killed", tmp_path / f"on-{processes}")
        again = train(tmp_path / f"on-{processes}", "datasets", folder, processes, workers)
        assert min(again) > 0
        assert {step: uninterrupted[step] for step in again} == again
        assert max(again) == max(uninterrupted)


@pytest.mark.parametrize("name", ["mosaicml", "litdata"])
def test_a_stream_that_shards_itself_goes_on_on_as_many_processes(tmp_path, folder, name):
    uninterrupted = train(tmp_path / "whole", name, folder, 2, 0)
    train(tmp_path / "killed", name, folder, 2, 0, dies_in=6)
    shutil.copytree(tmp_path / "killed", tmp_path / "on-1")
    again = train(tmp_path / "killed", name, folder, 2, 0)
    assert min(again) > 0
    assert {step: uninterrupted[step] for step in again} == again
    assert max(again) == max(uninterrupted)
    with pytest.raises(
        ConfigError, match=r"own share of the training data .* Start 2 processes, as many as when the run"
    ):
        train(tmp_path / "on-1", name, folder, 1, 0)


# --- how many samples a batch has -------------------------------------------------------------------------------------
def graphs(count):
    return [
        Data(x=torch.full((nodes, 1), 1.0), edge_index=torch.zeros(2, 0, dtype=torch.long))
        for nodes in range(1, count + 1)
    ]


def images(count):
    return [(torch.ones(3, 8, 8 + number), {"boxes": torch.ones(number, 4)}) for number in range(count)]


def texts(count):
    return [{"input_ids": [1] * length, "labels": [1] * length} for length in range(2, count + 2)]


def sequences(count):
    return [torch.ones(length) for length in range(1, count + 1)]


def apart(samples):
    return tuple(zip(*samples, strict=True))


def stream(samples, collate):
    data = datasets.IterableDataset.from_generator(lambda: iter([{"index": index} for index in range(len(samples))]))
    return DataLoader(data, 4, collate_fn=lambda rows: collate([samples[row["index"]] for row in rows]), num_workers=1)


BATCHES = {
    "PyG": lambda: GraphLoader(graphs(10), 4),
    "PyG as a stream": lambda: stream(graphs(10), Batch.from_data_list),
    "images": lambda: stream(images(10), apart),
    "packed texts": lambda: stream(texts(10), DataCollatorWithFlattening(return_tensors="pt")),
    "packed texts for flash attention": lambda: stream(
        texts(10), DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)
    ),
    "packed sequences": lambda: stream(sequences(10), lambda rows: pack_sequence(rows, enforce_sorted=False)),
    "nested tensors": lambda: stream(sequences(10), lambda rows: nested_tensor(rows, layout=torch.jagged)),
}


class Weighing(lg.Task):
    """Adds its batches' numbers to 0 in each step, and keeps how many samples they were logged with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.log("mean", float(batch_idx), on_step=False, on_epoch=True)
        return self.weight * float(batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_weighs_its_samples(tmp_path, name):
    task, trainer = Weighing(), lg.Trainer(max_epochs=1, accumulate_grad_batches=3, **options(tmp_path, 1))
    trainer.fit(task, BATCHES[name]())
    assert trainer.state.samples_seen == 10
    mean = (0 * 4 + 1 * 4 + 2 * 2) / 10
    assert trainer.callback_metrics["mean"].item() == pytest.approx(mean)
    assert task.weight.item() == pytest.approx(-mean)


def weigh_all(path, processes):
    """Return, for each kind of batch, the samples that were counted, the mean of what was logged, and the weight."""
    results = {}
    for name, make in BATCHES.items():
        task, trainer = Weighing(), lg.Trainer(max_epochs=1, replicas=2, **options(path, processes))
        trainer.fit(task, make())
        results[name] = [trainer.state.samples_seen, trainer.callback_metrics["mean"].item(), task.weight.item()]
    return results


def test_a_batch_weighs_as_much_on_two_processes(tmp_path):
    alone, together = weigh_all(tmp_path / "alone", 1), weigh_all(tmp_path / "together", 2)
    for name in BATCHES:
        assert alone[name][0] == 10
        assert together[name] == pytest.approx(alone[name]), name
