"""The saver runs simultaneous saves of callbacks and the user one by one, and loses none."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tiny, make_loader, make_trainer
from torch import nn

import legato as lg
from legato.base.errors import CheckpointError, ConfigError
from legato.callbacks import Checkpoint
from legato.loggers.json_lines import JSONLinesLogger
from legato.loggers.tensorboard import TensorBoardLogger
from legato.trainer.checkpoints import find


class Large(Tiny):
    """Has 16 MB of state, so that a save takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(3, 1_000_000, bias=False)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + self.second(batch[0]).mean() * 0.0


class Evaluated(Tiny):
    """Can be tested."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch))


class SavingBefore(lg.Callback):
    """Saves after every step as a user may, beside or before the saves of the Checkpoint callback."""

    def __init__(self, name: str = "step-{:08d}", **options: Any) -> None:
        self.name, self.options = name, options

    def on_train_batch_end(self, trainer: lg.Trainer, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        name = self.name.format(trainer.global_step)
        trainer.save_checkpoint(trainer.run_dir / "checkpoints" / name, **self.options)


class Saving(SavingBefore, lg.callbacks.CheckpointCallback):
    """Overwrites the checkpoints of the Checkpoint callback."""


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "index.json")


def steps(*numbers: int) -> list[str]:
    return [f"step-{number:08d}" for number in numbers]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_callbacks_one_of_them_in_the_background(tmp_path: Path, strategy: str) -> None:
    first = Checkpoint(every_n_train_steps=1, asynchronous=True, save_top_k=2)
    second = Checkpoint(dirpath=tmp_path / "own", every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"strategy": strategy, "devices": 2, "enable_checkpointing": True, "max_epochs": 2}
    trainer = make_trainer(tmp_path / "runs", callbacks=[first, second, Saving("mine")], **options)
    trainer.fit(Large(), make_loader(batch_size=5))
    assert names_in(trainer.run_dir / "checkpoints") == ["mine", *steps(3, 4)]
    assert names_in(tmp_path / "own") == steps(1, 2, 3, 4)
    for path in [*(tmp_path / "own").glob("step-*"), *(trainer.run_dir / "checkpoints").glob("step-*")]:
        find.verify(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "saving", [Saving("step-{:07d}0"), Saving("mine"), Saving(), Saving(asynchronous=True), SavingBefore("mine")]
)
def test_a_save_by_the_user_leaves_one_in_the_background_alone(tmp_path: Path, saving: Saving) -> None:
    """In the same folder, at the same step, before it, over it, and also in the background."""
    callback = Checkpoint(every_n_train_steps=1, asynchronous=True, save_top_k=-1)
    trainer = make_trainer(tmp_path, callbacks=[callback, saving], enable_checkpointing=True)
    trainer.fit(Large(), make_loader())
    names = names_in(trainer.run_dir / "checkpoints")
    assert set(steps(1, 2, 3, 4, 5)) <= set(names)
    assert set(names) - set(steps(1, 2, 3, 4, 5)) <= {"mine", *steps(10, 20, 30, 40, 50)}
    for name in names:
        find.verify(trainer.run_dir / "checkpoints" / name)


def test_a_plain_save_is_whole_where_the_one_in_the_background_before_it_has_failed(tmp_path: Path) -> None:
    class Both(lg.Callback):
        def on_train_batch_end(self, trainer: lg.Trainer, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            (tmp_path / "in the way").write_text("no folder")
            trainer.save_checkpoint(tmp_path / "in the way" / "lost", asynchronous=True)
            trainer.save_checkpoint(tmp_path / "kept")

    trainer = make_trainer(tmp_path / "runs", callbacks=[Both()])
    with pytest.raises(CheckpointError, match="lost in the background failed"):
        trainer.fit(Tiny(), make_loader())
    find.verify(tmp_path / "kept")


def test_both_failures_are_told(tmp_path: Path) -> None:
    class Both(lg.Callback):
        def on_train_batch_end(self, trainer: lg.Trainer, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            (tmp_path / "in the way").write_text("no folder")
            trainer.save_checkpoint(tmp_path / "in the way" / "lost", asynchronous=True)
            trainer.save_checkpoint(tmp_path / "in the way" / "lost too")

    trainer = make_trainer(tmp_path / "runs", callbacks=[Both()])
    with pytest.raises(CheckpointError, match=r"lost too could not be written.*lost in the background failed"):
        trainer.fit(Tiny(), make_loader())


@pytest.mark.parametrize("spelling", ["same", "through a link", "relative"])
def test_two_callbacks_for_one_folder_are_refused_however_it_is_spelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "own"
    target.mkdir()
    (tmp_path / "link").symlink_to(target)
    spelled = {"same": target / "." / ".." / "own", "through a link": tmp_path / "link", "relative": Path("own")}[
        spelling
    ]
    callbacks: list[Any] = [Checkpoint(dirpath=target), Checkpoint(dirpath=spelled)]
    trainer = make_trainer(tmp_path / "runs", callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(ConfigError, match="Two Checkpoint callbacks write to the same folder"):
        trainer.fit(Tiny(), make_loader())


class Leaving(lg.Callback):
    """Changes the working directory, as a task that reads its data elsewhere may."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: lg.Trainer, task: Any) -> None:
        os.chdir(self.folder)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_relative_folders_are_those_of_when_the_trainer_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    options: dict[str, Any] = {"enable_checkpointing": True, "strategy": "ddp", "devices": devices}
    for epochs in (1, 2):
        os.chdir(tmp_path)
        loggers = [JSONLinesLogger("own/metrics.jsonl"), TensorBoardLogger()]
        callbacks = [Leaving(tmp_path / "elsewhere"), Checkpoint(), Checkpoint(dirpath="own/checkpoints")]
        trainer = make_trainer("runs", max_epochs=epochs, logger=loggers, callbacks=callbacks, **options)
        os.chdir(tmp_path / "elsewhere")
        trainer.fit(Tiny(), make_loader(batch_size=5), resume="auto")
        os.chdir(tmp_path / "elsewhere")
        assert trainer.default_root_dir == str(tmp_path / "runs")
        assert trainer.checkpoint_callback.best_model_path.startswith(str(trainer.run_dir))
        trainer.test(Evaluated(), make_loader(), ckpt_path="best")
    assert names_in(tmp_path) == ["elsewhere", "own", "runs"]
    assert not names_in(tmp_path / "elsewhere")
    assert trainer.global_step == (8 if devices == 1 else 4)
    assert trainer.run_dir == tmp_path / "runs" / "default" / "version_0"
    assert names_in(tmp_path / "own") == ["checkpoints", "metrics.jsonl"]


def test_the_next_start_sweeps_what_killed_saves_have_left(trainer, tmp_path):
    def fit(epochs):
        callbacks = [Checkpoint(), Checkpoint(dirpath=tmp_path / "own")]
        made = trainer(enable_checkpointing=True, callbacks=callbacks, max_epochs=epochs)
        made.fit(Tiny(), make_loader(), resume="auto")
        return [Path(callback.dirpath) for callback in made.checkpoint_callbacks]

    rests = [folder / ".step-00000099.partial" for folder in fit(1)]
    for rest in rests:
        rest.mkdir()
    fit(2)
    assert not [rest for rest in rests if rest.exists()]
