"""A user's folder with a config, for tests of the config."""

import shutil
import sys
from pathlib import Path

import pytest

BASE = """\
task:
  _target_: models.Tiny
  width: 8
trainer:
  max_epochs: 3
  strategy: {name: ddp, find_unused_parameters: true}
callbacks:
  note:
    _target_: models.Note
    text: hello
"""


@pytest.fixture
def config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a module with tasks, and a config."""
    shutil.copy(Path(__file__).with_name("config_models.py"), tmp_path / "models.py")
    (tmp_path / "base.yaml").write_text(BASE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "models", raising=False)
    return tmp_path


def write(name: str, text: str) -> str:
    """Write a file into the folder; return its name."""
    Path(name).write_text(text)
    return name
