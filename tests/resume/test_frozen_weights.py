"""Runs with mostly frozen weights: the contents of their checkpoints on each layout, and exact resumes."""

import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from tiny import assert_close, assert_same_bits, make_loader, make_trainer
from torch import nn

import legato as lg
from legato.base.errors import CheckpointError
from legato.callbacks import BaseFinetuning, Checkpoint
from legato.cli.export import run_export
from legato.trainer.checkpoints import find, reading
from legato.trainer.checkpoints.tensors import read_tensors
from legato.trainer.runs.removal import remove_run

WIDE = 128
BASE = {"body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias"}


class Adapted(lg.Task):
    """A wide frozen body and a trained head."""

    def __init__(self, norm: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE)).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDE, affine=False) if norm else nn.Identity()
        self.head = nn.Linear(WIDE, 2)

    def tensor_plan(self):
        return {"body.0": "column", "body.2": "row"}

    def training_step(self, batch, batch_idx):
        return (self.head(self.norm(self.body(batch[0]))) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.head.parameters(), lr=0.01)


class Keep(lg.Callback):
    """Keeps the weights of each epoch at the time of the save."""

    def __init__(self):
        self.weights = {}

    def on_train_epoch_end(self, trainer, task):
        self.weights[trainer.global_step] = {name: tensor.clone() for name, tensor in task.state_dict().items()}


def fit(folder, epochs, task=None, resume=None, callbacks=(), saves=None, **options):
    saves = saves or Checkpoint(dirpath=folder, save_top_k=-1)
    task = Adapted() if task is None else task
    options = {"max_epochs": epochs, "callbacks": [*callbacks, saves], "enable_checkpointing": True, **options}
    make_trainer(folder, **options).fit(task, make_loader(), resume=resume)
    return task, saves.last_model_path


def files_of(path):
    return {file.name: set(read_tensors(file)) for file in Path(path).glob("model*.safetensors")}


LAYOUTS = {
    "one": {},
    "ddp": {"strategy": "ddp", "devices": 2},
    "fsdp": {"strategy": "fsdp", "devices": 2},
    "tensor": {"strategy": {"name": "mesh", "tensor": 2}, "devices": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_holds_what_is_trained_and_resumes_exactly(tmp_path, layout):
    options = {"replicas": 2, **LAYOUTS[layout]} if layout == "one" else LAYOUTS[layout]
    reference, _ = fit(tmp_path / "whole", 4, **options)
    _, path = fit(tmp_path / "cut", 2, **options)
    bases = list((tmp_path / "cut" / "base").iterdir())
    assert len(bases) == (1 if layout in ("one", "ddp") else 2)  # each rank its shards, once
    assert set().union(*files_of(path).values()) == {"head.weight", "head.bias"}
    assert sum(file.stat().st_size for file in Path(path).iterdir()) < 20_000 < 4 * WIDE * WIDE
    again, _ = fit(tmp_path / "cut", 4, resume=path, **options)
    assert_same_bits(again, reference)
    assert sorted((tmp_path / "cut" / "base").iterdir()) == sorted(bases)
    target_layout = "fsdp" if layout in ("one", "ddp") else "one"
    if layout != "tensor":  # whose one group of ranks is one replica
        elsewhere, newer = fit(tmp_path / "elsewhere", 4, resume=path, **LAYOUTS[target_layout])
        assert_close(elsewhere, reference)
        # those that were there have other shards
        assert len(list((tmp_path / "elsewhere" / "base").iterdir())) == (2 if target_layout == "fsdp" else 1)
        assert set().union(*files_of(newer).values()) == {"head.weight", "head.bias"}
    assert_same_bits(Adapted.load_from_checkpoint(path), fit(tmp_path / "two", 2, **options)[0])


class Edits(lg.Callback):
    """Changes a frozen weight without the trainer's knowledge."""

    def on_train_epoch_start(self, trainer, task):
        task.body[2].weight.data[0] += 1


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, task):
        self.freeze(task.body, train_bn=False)

    def finetune_function(self, task, epoch, optimizer):
        if epoch == 2:
            self.unfreeze_and_add_param_group(task.body[0], optimizer)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_frozen_and_changes_all_the_same_is_right_in_each_checkpoint(tmp_path, asynchronous):
    keep, saves = Keep(), Checkpoint(dirpath=tmp_path, save_top_k=-1, asynchronous=asynchronous)
    reference, _ = fit(tmp_path, 4, Adapted(norm=True), callbacks=[Edits(), Unfreeze(), keep], saves=saves)
    assert len(keep.weights) == 4
    for step, weights in keep.weights.items():
        path = tmp_path / find.directory_name(step)
        back = reading.read_checkpoint(path)["state_dict"]
        assert all(torch.equal(back[name], value) for name, value in weights.items())
        held = files_of(path)["model.safetensors"]
        assert {"head.weight", "head.bias"} <= held
        assert ("body.2.bias" in held, "body.0.weight" in held) == (False, step > 10)
    second = tmp_path / find.directory_name(10)
    again, _ = fit(tmp_path / "again", 4, Adapted(norm=True), second, callbacks=[Edits(), Unfreeze(), Keep()])
    assert_same_bits(again, reference)


def test_the_option_and_a_save_by_hand(tmp_path):
    saves = Checkpoint(dirpath=tmp_path / "off", share_frozen=False)
    _, path = fit(tmp_path, 1, saves=saves)
    assert files_of(path)["model.safetensors"] > BASE
    task = Adapted()
    task.body.requires_grad_(True)
    task.body[0].requires_grad_(False)
    _, path = fit(tmp_path / "few", 1, task)
    assert files_of(path)["model.safetensors"] > BASE  # less than half is frozen
    task.body[0].requires_grad_(False)
    _, path = fit(tmp_path, 1, task, saves=Checkpoint(dirpath=tmp_path / "on", share_frozen=True))
    assert files_of(path)["model.safetensors"] >= {"body.2.weight", "head.weight"}
    assert "body.0.weight" not in files_of(path)["model.safetensors"]

    class ByHand(lg.Callback):
        def on_train_end(self, trainer, task):
            trainer.save_checkpoint(tmp_path / "by_hand" / "one")

    fit(tmp_path / "beside", 1, callbacks=[ByHand()])
    assert files_of(tmp_path / "by_hand" / "one")["model.safetensors"] > BASE
    assert [path.name for path in (tmp_path / "by_hand").iterdir()] == ["one"]


def test_retention_keeps_the_base_and_a_run_that_is_removed_takes_it_along(tmp_path):
    trainer = make_trainer(tmp_path, max_epochs=3, enable_checkpointing=True, logger=True, run_name="lora")
    trainer.fit(task := Adapted(), make_loader())
    folder = trainer.run_dir / "checkpoints"
    (path,) = find.checkpoints_in(folder)
    (base,) = (folder / "base").iterdir()
    assert set(read_tensors(base)) == BASE
    shutil.copytree(trainer.run_dir, tmp_path / "copy")
    shutil.copytree(path, tmp_path / "alone")
    for word, name in ((trainer.run_dir, "whole/"), (path, "whole.safetensors")):
        run_export(
            Namespace(
                checkpoint=str(word),
                out=str(tmp_path / name) + "/" * name.endswith("/"),
                config=[],
                format=None,
                shard_size=None,
            )
        )
    remove_run(trainer.run_dir)
    assert not folder.exists()
    with pytest.raises(CheckpointError, match=f"in base/{base.name} beside them, but this file is missing"):
        Adapted.load_from_checkpoint(tmp_path / "alone")
    for name in ("copy", "whole", "whole.safetensors"):
        assert_same_bits(Adapted.load_from_checkpoint(tmp_path / name), task)
    again, _ = fit(tmp_path / "again", 4, resume=tmp_path / "whole")
    assert_same_bits(again, fit(tmp_path / "four", 4)[0])
