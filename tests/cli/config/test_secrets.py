"""Secrets that a config takes from the environment: no file of the run has their values."""

import importlib
import os
import sys
from pathlib import Path

import pytest
from forked import completed, run_module

from legato.base.errors import CheckpointError
from legato.cli.config.check import load_config

TASK = """
from tiny import Tiny, make_loader


class Line(Tiny):
    def __init__(self, token: str, width: int = 2, options: dict[str, str] | None = None):
        super().__init__()
        self.save_hyperparameters()
        self.token = token

    def train_dataloader(self):
        assert (self.token, self.hparams.options["header"]) == ("hunter2-5f3a", "Bearer hunter2-5f3a")
        return make_loader()
"""
CONFIG = """
vars: {access: "${env:SERVICE_API_KEY}", size: "${env:KEY_SIZE}"}
task:
  _target_: line.Line
  token: ${vars.access}
  width: ${env:KEY_SIZE}
  options: {header: "Bearer ${vars.access}", folder: "${env:FOLDER}"}
trainer: {max_steps: 2, accelerator: cpu}
"""
SECRET = "hunter2-5f3a"
ENVIRONMENT = {"SERVICE_API_KEY": SECRET, "KEY_SIZE": "4", "FOLDER": "data"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "line.py").write_text(TASK)
    (tmp_path / "line.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "line", raising=False)  # another test's
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_the_stored_text_names_the_variable_and_is_read_again() -> None:
    overrides = ("task.options.password=${env:FOLDER}", "task.options.other=x-${env:MY_KEY,none}")
    config = load_config(["line.yaml", *overrides])
    assert config.values["task"]["token"] == SECRET
    assert config.values["task"]["width"] == 4
    for text in (config.text(), config.text(origins=True), config.given_text(), " ".join(config.override_words())):
        assert SECRET not in text
    assert "token: '${env:SERVICE_API_KEY}'" in config.text()
    assert "header: Bearer ${env:SERVICE_API_KEY}" in config.text().replace("'", "")
    assert "task.options.password='${env:FOLDER}'" in config.override_words()
    assert "folder: data" in load_config(["line.yaml"]).text()  # neither the name nor the key is that of a secret
    assert "${env:SERVICE_API_KEY}" in load_config(["line.yaml", "task.token='${oc.env:SERVICE_API_KEY}'"]).text()
    Path("again.yaml").write_text(config.text())
    assert load_config(["again.yaml"]).values == config.values


@pytest.mark.slow
def test_no_file_of_a_run_has_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(Path(__file__).parents[2])])}
    for words in ((), ("resume=auto", "trainer.max_steps=3")):
        done = completed(run_module, "legato", "fit", "line.yaml", *words, env=environment)
        assert done.returncode == 0, done.stderr
        assert SECRET not in done.stdout + done.stderr
    files = [path for path in Path("runs").rglob("*") if path.is_file()]
    assert any("events.out" in path.name for path in files)
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    run = Path("runs/default/version_0")
    assert "${env:SERVICE_API_KEY}" in (run / "config.yaml").read_text()

    line = importlib.import_module("line")
    checkpoint = next((run / "checkpoints").glob("step-*3"))
    assert line.Line.load_from_checkpoint(checkpoint).token == SECRET
    monkeypatch.delenv("SERVICE_API_KEY")
    with pytest.raises(CheckpointError, match="SERVICE_API_KEY, which is not set"):
        line.Line.load_from_checkpoint(checkpoint)
    loaded = line.Line.load_from_checkpoint(checkpoint, token="another", options={})
    assert loaded.token == "another"
