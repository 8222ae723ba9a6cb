"""A resume reads each byte of a checkpoint once in the job, frees it after loading, and reports damage on all ranks."""

import gc
import logging
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from shared_processes import run_cases
from tiny import make_data, make_trainer
from torch import nn
from torch.utils.data import DataLoader

import legato as lg
from legato.base.errors import CheckpointError
from legato.callbacks import Checkpoint
from legato.trainer.checkpoints.shards import StoredTensor

pytestmark = pytest.mark.slow


WIDTH = 800
BESIDES = {"single": 100_000, "ddp": 100_000, "zero1": 100_000, "fsdp": 800_000}
"""Bytes that a resume reads besides the checkpoint: its manifest once more, the files of the run, Python's modules."""


class Wide(lg.Task):
    """3 MB of weights, 5 MB of Adam's."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        self.loaded, self.left = [], None

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)

    def on_load_checkpoint(self, saved):
        tensors = list(tensors_in(saved["state_dict"])) + list(tensors_in(saved["optimizer_states"]))
        self.loaded = [weakref.ref(tensor) for tensor in tensors]
        assert len(self.loaded) > 6

    def on_train_start(self):
        """Record the checkpoint's tensors that still exist, without those that the optimizer uses."""
        gc.collect()
        ids = {id(value) for state in self.optimizers().state.values() for value in state.values()}
        kept = [sizes for ref in self.loaded if (sizes := ref()) is not None and id(sizes) not in ids and sizes.ndim]
        holders = [item for item in gc.get_objects() if type(item) is dict and "optimizer_states" in item]
        self.left = [tuple(tensor.shape) for tensor in kept], len(holders)


def tensors_in(value):
    if isinstance(value, (torch.Tensor, StoredTensor)):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def bytes_read():
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def resident():
    return 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def fit(folder, strategy, steps, resume="auto"):
    saves = Checkpoint(every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        folder,
        strategy=strategy,
        devices=2,
        max_steps=steps,
        callbacks=[saves],
        enable_checkpointing=True,
        max_epochs=9,
    )
    task = Wide()
    trainer.fit(task, DataLoader(make_data(), 2), resume=resume)
    return trainer, task


def checkpoint(folder, step):
    return folder / "default" / "version_0" / "checkpoints" / f"step-{step:08d}"


def size_of(folder):
    return sum(file.stat().st_size for file in checkpoint(folder, 2).iterdir())


def train_and_go_on(folder, strategy):
    """Return the bytes that a resume of this rank reads, and the bytes that stay in memory."""
    fit(folder, strategy, 2)
    before = bytes_read()
    _, task = fit(folder, strategy, 2)  # nothing is left to do, so nothing is written either
    return bytes_read() - before, task.left


DAMAGED = {"ddp": "tensors.safetensors", "fsdp": "model-00001.safetensors"}
"""A file that all ranks need, and one of which rank 1 reads."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def results(folder):
    """What `train_and_go_on` and `go_on_from_damage` return on each rank, all in the same two processes."""

    def on_both(function, *arguments):
        values = [None, None]
        torch.distributed.all_gather_object(values, function(*arguments))
        return values

    cases = {name: partial(on_both, train_and_go_on, folder / name, name) for name in ("ddp", "zero1", "fsdp")}
    for name in DAMAGED:
        cases["damage", name] = partial(on_both, go_on_from_damage, folder / f"damaged {name}", name)
    return run_cases(cases, 2, folder / "cases")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_two_processes_read_a_checkpoint_once_between_them_and_keep_nothing(folder, results, strategy):
    ranks = results[strategy]
    size = size_of(folder / strategy)
    assert size > 3 * 4 * WIDTH * WIDTH
    # together, not each: what all ranks need is read by rank 0 and broadcast
    assert sum(ids for ids, _ in ranks) < size + BESIDES[strategy]
    if strategy == "fsdp":
        assert max(ids for ids, _ in ranks) < 0.6 * size
    for _, left in ranks:
        assert left == ([], 0)


def test_the_process_that_starts_the_workers_reads_next_to_nothing(folder, results):
    assert results["ddp"]
    before = bytes_read()
    trainer, _ = fit(folder / "ddp", "ddp", 3)
    assert trainer.global_step == 3
    assert bytes_read() - before < 0.5 * size_of(folder / "ddp")


def test_one_process_reads_it_once(tmp_path):
    ids, left = train_and_go_on(tmp_path, "single")
    assert ids < size_of(tmp_path) + BESIDES["single"]
    assert left == ([], 0)


def go_on_from_damage(folder, strategy):
    """Damage the newest checkpoint, then the one that is asked for; return step, messages and error."""
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())

    def damage_on_rank_0(step):
        if torch.distributed.get_rank() == 0:
            damage(checkpoint(folder, step) / DAMAGED[strategy])
        torch.distributed.barrier()

    fit(folder, strategy, 2)
    damage_on_rank_0(2)
    logging.getLogger("legato").addHandler(handler)
    trainer, _ = fit(folder, strategy, 3)
    logging.getLogger("legato").removeHandler(handler)
    damage_on_rank_0(3)
    with pytest.raises(CheckpointError) as caught:
        fit(folder, strategy, 4, resume=checkpoint(folder, 3))
    return trainer.global_step, "\n".join(messages), str(caught.value)


@pytest.mark.parametrize("strategy", DAMAGED)
def test_damage_that_one_rank_sees_makes_all_take_the_one_before(folder, results, capfd, strategy):
    ranks, file, place = results["damage", strategy], DAMAGED[strategy], folder / f"damaged {strategy}"
    assert [step for step, _, _ in ranks] == [3, 3]
    output = "".join(said for _, said, _ in ranks)
    assert output.count("Skipping the damaged checkpoint step-00000002") == 1
    assert f"{file} is damaged" in output
    for _, _, error in ranks:
        assert f"{file} is damaged" in error
    for step in (1, 2):  # 2 was saved once more
        damage(checkpoint(place, step) / file)
    with pytest.raises(CheckpointError, match="There is no complete checkpoint at"):
        fit(place, strategy, 4)
    output = capfd.readouterr().err
    assert all(output.count(f"Skipping the damaged checkpoint step-0000000{step}") == 1 for step in (1, 2, 3))


def damage(path):
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
