"""Addresses of object stores: errors where a local path is required, and without the store's package."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tiny import Tiny, make_loader, make_trainer

import legato as lg
from legato.base.errors import ConfigError
from legato.base.location import to_location
from legato.cli.main import main
from legato.trainer.checkpoints import commit


class Evaluable(Tiny):
    def test_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)


@pytest.fixture(autouse=True)
def folder(config_folder: Path) -> Path:
    return config_folder


@pytest.mark.parametrize(
    "words",
    [
        ("fit", "base.yaml", "loggers.a={_target_: legato.loggers.JSONLinesLogger, path: s3://b/r}"),
        ("fit", "s3://b/r"),
        ("validate", "memory://b/r"),
        ("fit", "base.yaml", "launcher={name: slurm, folder: s3://b/r}"),
        ("clean", "s3://b/r"),
        ("replay", "runs", "step=1", "save=s3://b/r"),
        ("new", "s3://b/r"),
    ],
)
def test_a_command_refuses_an_address(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().rglob("*"))
    assert main(words) == 2
    message = capsys.readouterr().err
    assert "://b/r" in message
    assert "an address in an object store" in message
    assert len(message.splitlines()) <= 4
    assert sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts) == before


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs is installed")
@pytest.mark.parametrize(
    "words",
    [
        ("fit", "base.yaml", "run.root=s3://b/runs"),
        ("fit", "base.yaml", "resume=s3://b/r"),
        ("validate", "base.yaml", "checkpoint=s3://b/r"),
        ("fit", "base.yaml", "callbacks.c={_target_: legato.callbacks.Checkpoint, dirpath: s3://b/r}"),
        ("fit", "base.yaml", "callbacks.c={_target_: legato.callbacks.OnExceptionCheckpoint, dirpath: s3://b/r}"),
        ("runs", "s3://b/r"),
        ("show", "s3://b/r"),
        ("compare", "s3://b/r", "s3://b/r2"),
        ("export", "s3://b/r", "here.safetensors"),
        ("replay", "s3://b/r", "step=1"),
        ("samples", "s3://b/r", "step=1"),
    ],
)
def test_a_command_tells_the_missing_package(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "pip install 'legato[s3]'" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_missing_package_is_told_before_the_first_step(tmp_path: Path) -> None:
    def fit(place: str | Path, **options: Any) -> None:
        checkpointing = (
            {} if options else {"callbacks": [lg.callbacks.Checkpoint(dirpath=place)], "enable_checkpointing": True}
        )
        make_trainer(tmp_path, **checkpointing).fit(Evaluable(), make_loader(), **options)

    tries: list[Callable[[str | Path], object]] = [
        fit,
        lambda place: lg.Trainer(default_root_dir=place),
        Tiny.load_from_checkpoint,
        lambda place: commit.write(to_location(place), {"state_dict": {}}),
        lambda place: fit(place, ckpt_path=place),
        lambda place: make_trainer(tmp_path).test(Evaluable(), make_loader(), ckpt_path=place),
    ]
    for place in ("gs://b/r", Path("gs://b/r")):
        for attempt in tries:
            with pytest.raises(ConfigError, match=r"pip install 'legato\[gs\]'"):
                attempt(place)


def test_a_file_address_is_told_its_path() -> None:
    with pytest.raises(ConfigError, match=r"is the address 'file:///tmp/x'\. Write it as a path: '/tmp/x'"):
        lg.callbacks.Checkpoint(dirpath="file:///tmp/x")
