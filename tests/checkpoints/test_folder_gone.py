"""Other programs change a run's files and streams: the run continues or names the missing folder."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from tiny import Validated, make_loader, make_trainer

import legato as lg
from legato.base.errors import LegatoError
from legato.callbacks import Checkpoint
from legato.loggers import JSONLinesLogger
from legato.loggers.logger import Logger
from legato.trainer.checkpoints import find


class At(lg.Callback):
    """Calls a function before a step."""

    def __init__(self, step: int, action: Callable[[Path], object]) -> None:
        self.step, self.action = step, action

    def on_train_batch_start(self, trainer: lg.Trainer, task: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.is_global_zero:
            self.action(Path(trainer.run_dir))


def train(folder: Path, action: Callable[[Path], object], **options: Any) -> lg.Trainer:
    """Train 10 steps and save each; call a function after the sixth."""
    saving = Checkpoint(every_n_train_steps=1, save_top_k=2, asynchronous=options.pop("asynchronous", False))
    chosen: dict[str, Any] = {"logger": True, "log_every_n_steps": 1, "enable_checkpointing": True, "max_epochs": 2}
    trainer = make_trainer(folder, callbacks=[saving, At(6, action)], **{**chosen, **options})
    trainer.fit(Validated(), make_loader(), make_loader())
    return trainer


class FullDisk(Logger):
    """A stream on a full disk."""

    def log_metrics(self, metrics: Any, step: int) -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")


def test_a_full_disk_is_called_full(tmp_path: Path) -> None:
    with pytest.raises(LegatoError, match=r"No space left on device\..*Free some space"):
        make_trainer(tmp_path, logger=[JSONLinesLogger(), FullDisk()], log_every_n_steps=1).fit(
            Validated(), make_loader()
        )


def move(path: Path) -> None:
    path.rename(path.parents[2] / path.name)


def link(path: Path) -> None:
    move(path)
    path.symlink_to(path.parents[2] / path.name)


def add(path: Path) -> None:
    (path / "notes.txt").write_text("the best one")


def spoil(path: Path) -> None:
    (path / "manifest.json").write_text("{")


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("action", [shutil.rmtree, move, link, add, spoil])
def test_a_checkpoint_that_somebody_changes_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, action: Callable[[Path], object], asynchronous: bool
) -> None:
    def change(run_dir: Path) -> None:
        for name in ("step-00000005", "step-00000006"):
            if (run_dir / "checkpoints" / name).exists():  # one may be on its way
                action(run_dir / "checkpoints" / name)

    trainer = train(tmp_path, change, asynchronous=asynchronous)
    assert trainer.global_step == 10
    assert "step-00000005 was not removed: " in caplog.text
    assert "The run continues" in caplog.text
    names = sorted(path.name for path in (trainer.run_dir / "checkpoints").glob("step-*"))
    assert names[-2:] == ["step-00000009", "step-00000010"]
    assert set(names[:-2]) <= {"step-00000005", "step-00000006"}
    for name in names[-2:]:
        find.verify(trainer.run_dir / "checkpoints" / name)


@pytest.mark.slow
def test_the_folder_of_checkpoints_may_be_deleted_or_moved_to_another_disk(tmp_path: Path) -> None:
    newest = ["step-00000009", "step-00000010"]
    trainer = train(tmp_path / "a", lambda run_dir: shutil.rmtree(run_dir / "checkpoints"))
    assert sorted(path.name for path in (trainer.run_dir / "checkpoints").glob("step-*")) == newest

    def swap(run_dir: Path) -> None:
        (run_dir / "checkpoints").rename(tmp_path / "disk")
        (run_dir / "checkpoints").symlink_to(tmp_path / "disk")

    trainer = train(tmp_path / "b", swap)
    assert sorted(path.name for path in (tmp_path / "disk").glob("step-*")) == newest


@pytest.mark.slow
@pytest.mark.parametrize("moved", [False, True])
def test_a_log_that_is_deleted_or_moved_is_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, moved: bool
) -> None:
    def lose(run_dir: Path) -> None:
        path = run_dir / "metrics.jsonl"
        path.rename(tmp_path / "moved.jsonl") if moved else path.unlink()

    trainer = train(tmp_path / "runs", lose)
    lines = (trainer.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [7, 8, 9, 10]
    assert caplog.text.count("metrics.jsonl was deleted or moved") == 1
    if moved:
        lines = (tmp_path / "moved.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("options", [{}, {"log_every_n_steps": 100}, {"asynchronous": True}, {"logger": False}])
def test_a_run_directory_that_is_gone_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], moved: bool, options: dict[str, Any]
) -> None:
    lost = []

    def lose(run_dir: Path) -> None:
        lost.append(run_dir)
        if moved:
            run_dir.rename(tmp_path / "moved")
        while run_dir.exists():  # a save in the background may still add to it
            shutil.rmtree(run_dir, ignore_errors=True)

    with pytest.raises(LegatoError) as caught:
        train(tmp_path / "runs", lose, **options)
    assert f"The run directory {lost[0]} was deleted or moved" in str(caught.value)
    assert len(capfd.readouterr().err.splitlines()) < 5
    assert not lost[0].exists() or "asynchronous" in options  # one may have been on its way


def take_rights(run_dir: Path) -> None:
    for path in [*run_dir.rglob("*"), run_dir]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def run_without_rights(folder: Path) -> None:
    """Run without root's rights in a directory that becomes read-only at the seventh step."""
    train(folder / "before", lambda run_dir: None)  # what is imported as root is there
    tempfile.tempdir = str(folder)
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    for name, options in {"log": {}, "save": {"logger": False}}.items():
        with pytest.raises(LegatoError) as caught:
            train(folder / name, take_rights, **options)
        output = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
        (folder / name / "said").write_text(output)


@pytest.mark.slow
def test_a_run_directory_without_rights_is_named() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # others than root cannot come to pytest's own
        folder = Path(name)
        for path in (folder, folder / "log", folder / "save"):
            path.mkdir(exist_ok=True)
            path.chmod(0o777)
        process = Forked(run_without_rights, folder)
        _, errors = process.communicate(100)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        where = "default/version_0"
        output = (folder / "log" / "said").read_text()
        assert f"Cannot write to the run directory {folder / 'log' / where}: no permission to" in output
        output = (folder / "save" / "said").read_text()
        assert f"{folder / 'save' / where}/checkpoints/step-00000007 could not be written: Permission denied" in output
        assert output.endswith(" ")  # and nothing failed after that


def run_into_closed_pipe(folder: Path, devices: int) -> None:
    """Run as in `python train.py 2>&1 | head -1`, which reads only the first line."""
    reading, writing = os.pipe()
    for number in (1, 2):
        os.dup2(writing, number)
    os.close(writing)
    os.close(reading)
    options = {"strategy": "ddp", "devices": devices} if devices > 1 else {}
    trainer = train(folder, print, enable_progress_bar=True, enable_model_summary=True, **options)
    trainer.validate(dataloaders=make_loader())
    (folder / "done").write_text(str(trainer.global_step))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_goes_on_where_nobody_reads_its_output(tmp_path: Path, devices: int) -> None:
    process = Forked(run_into_closed_pipe, tmp_path, devices)
    process.communicate(100)
    assert process.returncode == 0
    assert (tmp_path / "done").read_text() in ("10", "6")


@pytest.mark.slow
def test_the_command_line_answers_0_where_nobody_reads_its_output(tmp_path: Path) -> None:
    words = ["fit", "digits.yaml", "trainer.max_steps=3", "trainer.log_every_n_steps=1", f"run.root={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "legato", *words, "trainer.accelerator=cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(100) == 0
    assert list(tmp_path.rglob("step-00000003"))
