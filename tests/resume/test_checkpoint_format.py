"""A user's checkpoint format: a run resumes from it without a changed bit."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tiny, make_loader, make_trainer

import legato as lg
from legato.base.errors import CheckpointError, ConfigError


class TorchFile:
    """A file written by torch.save, in a folder beside the runs if `folder` is set."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def name(self, step: int) -> str:
        return f"{step}.pt" if self.folder is None else str(self.folder / f"{step}.pt")

    def write(self, path: Path, contents: Any, ranks: Any, run: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({**contents, "run": run}, path)

    def read(self, path: Path, ranks: Any, names: Any, in_parts: Any) -> dict[str, Any]:
        contents: dict[str, Any] = torch.load(path, weights_only=False)
        del contents["run"]
        return contents

    def remove(self, path: Path, run: str) -> None:
        if torch.load(path, weights_only=False)["run"] != run:
            raise CheckpointError(f"{path} was not removed: another run wrote it.")
        path.unlink()


class Stops(lg.Callback):
    """Asks this process to end after a step."""

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def weights_of(task: Tiny) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in task.parameters()]


def test_a_run_in_another_format_goes_on_to_the_bit(tmp_path: Path) -> None:
    reference, first, second = Tiny(), Tiny(), Tiny()
    make_trainer(tmp_path / "whole", max_epochs=2).fit(reference, make_loader())
    saves = lg.callbacks.Checkpoint(every_n_train_steps=1, save_top_k=-1, dirpath=tmp_path / "files")
    options = {"checkpoint_format": TorchFile(), "enable_checkpointing": True}
    make_trainer(tmp_path / "first", max_steps=4, callbacks=[saves], **options).fit(first, make_loader())
    assert sorted(path.name for path in (tmp_path / "files").glob("*.pt")) == ["1.pt", "2.pt", "3.pt", "4.pt"]
    trainer = make_trainer(tmp_path / "second", max_epochs=2, checkpoint_format=TorchFile())
    trainer.fit(second, make_loader(), ckpt_path=tmp_path / "files" / "3.pt")
    assert all(map(torch.equal, weights_of(reference), weights_of(second)))


def test_only_the_newest_stays_and_no_other_runs_file_is_removed(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=3, enable_checkpointing=True, checkpoint_format=TorchFile())
    trainer.fit(Tiny(), make_loader())
    kept = list((trainer.run_dir / "checkpoints").glob("*.pt"))
    assert [path.name for path in kept] == ["3.pt"]
    fresh = make_trainer(tmp_path, max_steps=1, checkpoint_format=TorchFile())
    fresh.fit(Tiny(), make_loader())
    with pytest.raises(CheckpointError, match="another run wrote it"):
        fresh.remove_checkpoint(kept[0])
    trainer.remove_checkpoint(kept[0])
    assert not kept[0].exists()


def test_a_signal_saves_where_the_format_says(tmp_path: Path) -> None:
    options = {"checkpoint_format": TorchFile(tmp_path / "beside"), "callbacks": [Stops()]}
    with pytest.raises(SystemExit):
        make_trainer(tmp_path / "runs", max_epochs=9, **options).fit(Tiny(), make_loader())
    assert [path.name for path in (tmp_path / "beside").iterdir()] == ["3.pt"]


def test_what_is_no_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be an object with the methods name, write, read and remove"):
        lg.Trainer(checkpoint_format="torch")  # type: ignore[arg-type]
