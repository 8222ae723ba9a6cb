"""Files with pickles that run code under `pickle.load`; none of them may run it here."""

import builtins
import io
import os
import pickle
import runpy
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import legato.compat.lightning as room
from legato.compat.lightning import checkpoint
from legato.trainer.processes.ranks import SINGLE

MARK = "ran"


class Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Plain(room.LightningModule):
    def __init__(self, width: int = 1, loss: Any = None) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(2))


ATTACKS = {
    "system": lambda: Calls(os.system, f"touch {MARK}"),
    "popen": lambda: Calls(subprocess.check_call, ["touch", MARK]),
    "exec": lambda: Calls(builtins.exec, f"open({MARK!r}, 'w').close()"),
    "eval": lambda: Calls(builtins.eval, f"open({MARK!r}, 'w').close()"),
    "file": lambda: Calls(Path.write_text, Path(MARK), "x"),
    "directory": lambda: Calls(os.mkdir, MARK),
    "copy": lambda: Calls(shutil.copy, "script.py", MARK),
    "script": lambda: Calls(runpy.run_path, "script.py"),
    "method": lambda: Calls(Path.touch, Path(MARK)),
    "nested": lambda: Calls(pickle.loads, pickle.dumps(Calls(os.mkdir, MARK))),
    "link": lambda: Calls(os.symlink, "script.py", MARK),
    "interpreter": lambda: Calls(subprocess.run, [sys.executable, "script.py"]),
}
PLACES = ("weights", "hyperparameters", "callback", "beside", "code of ours", "whole file")


def file_with(attack: Any, place: str) -> Any:
    saved: dict[str, Any] = {"state_dict": {"a": torch.ones(2)}, "pytorch-lightning_version": "2.6.6"}
    if place == "weights":
        saved["state_dict"]["b"] = attack
    elif place == "hyperparameters":
        saved["hyper_parameters"] = {"width": 2, "loss": attack}
    elif place == "callback":
        saved["callbacks"] = {"Timer": {"elapsed": attack}}
    elif place == "beside":
        saved["added"] = [attack]
    elif place == "code of ours":  # code as this program stores it, but from a different process
        buffer = io.BytesIO()
        torch.save(attack, buffer)
        code = checkpoint.Code(buffer.getvalue())
        saved |= {"hyper_parameters": {"width": 2, "loss": code}, "note": code, "deep": [{"note": code}]}
    return attack if place == "whole file" else saved


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_file_that_runs_code_elsewhere_runs_none_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(f"open({MARK!r}, 'w').close()")
    pickle.loads(pickle.dumps(ATTACKS[name]()))
    mark = Path(MARK)
    assert os.path.lexists(mark), "the attack does nothing even where it may"
    mark.rmdir() if mark.is_dir() and not mark.is_symlink() else mark.unlink()
    torch.save(file_with(ATTACKS[name](), place), "x.ckpt")
    ways = (
        lambda: checkpoint.read("x.ckpt"),
        lambda: checkpoint.read(io.BytesIO(Path("x.ckpt").read_bytes()), weights_only=True),
        lambda: Plain.load_from_checkpoint("x.ckpt"),
        lambda: checkpoint.LightningFile(None).read(Path("x.ckpt"), SINGLE, (), ()),
        lambda: checkpoint.run_of(Path("x.ckpt")),
    )
    for way in ways:
        with suppress(Exception):  # raised by torch, by Legato, or by a module without a weight
            way()
        assert not os.path.lexists(mark)
