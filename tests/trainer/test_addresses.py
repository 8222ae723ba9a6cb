"""Addresses of object stores: refused wherever a path is taken, since Legato writes and reads local folders."""

from pathlib import Path

import pytest
from tiny import Tiny, make_loader, make_trainer

import legato as lg
from legato.base.errors import ConfigError
from legato.cli.main import main
from legato.trainer.checkpoints import commit

REFUSED = r"'(s3|gs|memory)://b/r(uns)?', the address of a store\. .* name the folder"


class Evaluable(Tiny):
    def test_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)


@pytest.fixture(autouse=True)
def folder(config_folder: Path) -> Path:
    return config_folder


@pytest.mark.parametrize(
    "words",
    [
        ("fit", "base.yaml", "run.root=s3://b/runs"),
        ("fit", "base.yaml", "run.root=memory://b/runs"),
        ("fit", "base.yaml", "resume=s3://b/r"),
        ("validate", "base.yaml", "checkpoint=s3://b/r"),
        ("fit", "base.yaml", "callbacks.c={_target_: legato.callbacks.Checkpoint, dirpath: s3://b/r}"),
        ("fit", "base.yaml", "callbacks.c={_target_: legato.callbacks.OnExceptionCheckpoint, dirpath: s3://b/r}"),
        ("fit", "base.yaml", "loggers.a={_target_: legato.loggers.JSONLinesLogger, path: s3://b/r}"),
        ("fit", "s3://b/r"),
        ("validate", "memory://b/r"),
        ("runs", "s3://b/r"),
        ("show", "s3://b/r"),
        ("compare", "s3://b/r", "gs://b/r"),
        ("fit", "base.yaml", "launcher={name: slurm, folder: s3://b/r}"),
        ("clean", "s3://b/r"),
        ("export", "s3://b/r", "here.safetensors"),
        ("convert", "s3://b/r", "here.ckpt"),
        ("replay", "s3://b/r", "step=1"),
        ("replay", "runs", "step=1", "save=s3://b/r"),
        ("samples", "s3://b/r", "step=1"),
        ("new", "s3://b/r"),
    ],
)
def test_a_command_refuses_an_address(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().rglob("*"))
    assert main(words) == 2
    message = capsys.readouterr().err
    assert "://b/r" in message
    assert "the address of a store" in message
    assert len(message.splitlines()) <= 4
    assert sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts) == before


def test_python_refuses_an_address(tmp_path: Path) -> None:
    for argument in ("gs://b/r", Path("gs://b/r")):
        with pytest.raises(ConfigError, match=REFUSED):
            lg.Trainer(default_root_dir=argument)
        with pytest.raises(ConfigError, match=REFUSED):
            lg.callbacks.Checkpoint(dirpath=argument)
        with pytest.raises(ConfigError, match=REFUSED):
            Tiny.load_from_checkpoint(argument)
        with pytest.raises(ConfigError, match=REFUSED):
            commit.write(Path(argument), {"state_dict": {}})
        for stage in ("fit", "test"):
            with pytest.raises(ConfigError, match=REFUSED):
                getattr(make_trainer(tmp_path), stage)(Evaluable(), make_loader(), ckpt_path=argument)
    with pytest.raises(ConfigError, match=REFUSED):
        lg.runs.open("s3://b/r")


def test_a_file_address_is_told_its_path() -> None:
    with pytest.raises(ConfigError, match="is the address 'file:///tmp/x': write it as a path, '/tmp/x'"):
        lg.callbacks.Checkpoint(dirpath="file:///tmp/x")
