"""Weights are read from files of other programs without running code from them."""

import argparse
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from legato.base.errors import CheckpointError
from legato.trainer.checkpoints import foreign


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.target),)


def test_foreign_weights_are_read_whatever_they_are_wrapped_in(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    expected = model.state_dict()
    wrapped = {
        "plain.pt": expected,
        "nested.pt": {"epoch": 3, "model": expected, "optimizer": {"state": {}}},
        "ddp.pth": {f"module.{name}": value for name, value in expected.items()},
        "compiled.pt": {f"_orig_mod.{name}": value for name, value in expected.items()},
        "part.pt": {name.replace("0.", "0._orig_mod."): value for name, value in expected.items()},
        "both.pt": {f"_orig_mod.module.{name}": value for name, value in expected.items()},
        "lightning.ckpt": {
            "epoch": 1,
            "global_step": 9,
            "pytorch-lightning_version": "2.5.0",
            "state_dict": expected,
            "optimizer_states": [torch.optim.Adam(model.parameters()).state_dict()],
            "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(1.0), "dirpath": "x"}},
            "hyper_parameters": {"lr": 0.1},
        },
    }
    for name, contents in wrapped.items():
        torch.save(contents, tmp_path / name)
    torch.save(expected, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(expected, tmp_path / "model.safetensors")
    for path in tmp_path.iterdir():
        read = foreign.read_contents(path)["state_dict"]
        assert read.keys() == expected.keys(), path
        assert all(torch.equal(read[name], expected[name]) for name in expected), path
    kept = foreign.read_contents(tmp_path / "ddp.pth", names=[f"module.{name}" for name in expected])["state_dict"]
    assert kept.keys() == {f"module.{name}" for name in expected}  # a task whose only child is called so


def test_foreign_files_never_run_code_and_are_refused_with_what_they_hold(tmp_path: Path) -> None:
    for name, old in (("evil.pt", False), ("old.pt", True)):
        path = tmp_path / name
        contents = {"state_dict": {}, "hook": Evil(tmp_path / "ran")}
        torch.save(contents, path, _use_new_zipfile_serialization=not old)
        with pytest.raises(CheckpointError, match="mkdir"):
            foreign.read_contents(path)
    assert not (tmp_path / "ran").exists()
    torch.save({"state_dict": {"w": torch.ones(1)}, "args": argparse.Namespace()}, tmp_path / "args.pt")
    with pytest.raises(CheckpointError, match=r"objects other than tensors and plain values: argparse\.Namespace"):
        foreign.read_contents(tmp_path / "args.pt")
    torch.save({"epoch": 3, "note": "x"}, tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match=r"no state dict.*epoch \(int\), note \(str\)"):
        foreign.read_contents(tmp_path / "none.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="got list"):
        foreign.read_contents(tmp_path / "list.pt")
    torch.save({"a._orig_mod.w": torch.ones(1), "a.w": torch.ones(1)}, tmp_path / "twice.pt")
    with pytest.raises(CheckpointError, match="two weights whose names differ"):
        foreign.read_contents(tmp_path / "twice.pt")
    with pytest.raises(CheckpointError, match="is not a file"):
        foreign.read_contents(tmp_path)
