"""The command line as a user meets it: real processes, exit codes, what is printed where."""

import json
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line_folder import CONFIG, TASK
from forked import Forked, run_module
from safetensors.torch import load_file

from legato.trainer.__main__ import COMMANDS, main
from legato.trainer.arguments import ARGUMENT_NAMES
from legato.trainer.commands.predictions import write_predictions
from legato.trainer.config.read import MOVED, SECTIONS
from legato.trainer.errors import TaskError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a task with its data, and a config."""
    (tmp_path / "line.py").write_text(TASK)
    (tmp_path / "line.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def legato(*arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "legato.trainer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def forked(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command without loading torch anew."""
    process = Forked(run_module, "legato.trainer", *arguments)
    said = process.communicate(timeout=100)
    return subprocess.CompletedProcess(arguments, process.returncode or 0, *said)


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- help and usage -------------------------------------------------------------------------------------------------
def test_the_console_script_is_the_module() -> None:
    (script,) = entry_points(group="console_scripts", name="legato")
    assert script.load() is main
    command = [str(Path(sys.executable).with_name("legato")), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == legato("--version").stdout
    assert done.stdout.startswith("legato ")


def test_help_lists_every_command() -> None:
    done = legato("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name, command in COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert command.summary in done.stdout
    assert legato().returncode == 2


def test_help_of_fit_lists_every_key_with_type_default_and_meaning() -> None:
    done = legato("fit", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name, doc in SECTIONS.items():
        assert f"  {name} " in done.stdout
        assert doc in done.stdout
    for name in set(ARGUMENT_NAMES) - MOVED.keys() - {"logger", "callbacks"}:
        assert f"\n  {name}: " in done.stdout
    assert "  max_steps: int = -1\n      Stop after this many optimizer steps. -1: no limit.\n" in done.stdout


def test_help_does_not_import_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "legato.trainer", "fit", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "legato.trainer.arguments" not in modules  # it is read, not run
    assert "legato.trainer.config.check" in modules
    assert not modules & {"torch", "numpy", "omegaconf"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fitt", "line.yaml"], "'fitt' is not a command. Did you mean 'fit'?"),
        (["trane"], "The commands are fit, validate"),
        (["fit"], "No config file was given"),
        (["fit", "lime.yaml"], "Did you mean 'line.yaml'?"),
        (["fit", "line.yaml", "--devices", "2"], "'--devices' is neither a YAML file nor key=value"),
        (["fit", "line.yaml", "trainer.max_epohcs=3"], "override: trainer.max_epohcs is no argument"),
        (["config", "line.yaml", "task.lr=x"], "override: task.lr must be float"),
    ],
)  # fmt: skip
def test_usage_errors_exit_with_2_and_no_traceback(arguments: list[str], words: str) -> None:
    done = legato(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("legato: ")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) <= 6


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = f"{sys.executable} -m legato.trainer fit --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


# --- config ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_config_prints_what_runs_and_where_it_is_from(folder: Path) -> None:
    done = legato("config", "line.yaml", "trainer.max_epochs=3")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  max_epochs: 3                                   # override\n" in done.stdout
    assert "# line.yaml:2\n" in done.stdout
    assert "# default\n" in done.stdout
    (folder / "printed.yaml").write_text(done.stdout)
    again = legato("config", "printed.yaml")
    assert [line.partition("#")[0] for line in again.stdout.splitlines()] == [
        line.partition("#")[0] for line in done.stdout.splitlines()
    ]


def test_a_ready_config_is_found_anywhere() -> None:
    done = legato("config", "digits.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "_target_: legato.tasks." in done.stdout


# --- runs -----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_fit_ends_with_a_summary_and_can_be_repeated_from_its_config() -> None:
    done = legato("fit", "line.yaml", "seed=3")
    assert done.returncode == 0, done.stderr
    run = Path("runs/default/version_0")
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in done.stdout.splitlines() if "  " in line)
    assert Path(rows["Run directory"]).samefile(run)
    assert Path(rows["Best checkpoint"]).is_relative_to(rows["Run directory"])
    assert rows["Look at it"] == f"tensorboard --logdir {rows['Run directory']}"
    assert float(rows["val_loss"]) >= 0
    stored = run / "config.yaml"
    assert "seed: 3" in stored.read_text()
    again = forked("fit", str(stored))
    assert again.returncode == 0, again.stderr
    files = [Path(f"runs/default/version_{version}/metrics.jsonl") for version in (0, 1)]
    points = [[one.get("loss") for one in json_lines(file)] for file in files]
    assert points[0] == points[1]
    assert any(points[0])


@pytest.mark.slow
def test_validate_and_predict_use_the_checkpoint() -> None:
    done = forked("fit", "line.yaml")
    assert done.returncode == 0, done.stderr
    values = [line.split() for line in done.stdout.splitlines() if line.startswith("val_loss")]
    for name in ("last", "best", "runs/default/version_0"):
        done = forked("validate", "line.yaml", f"checkpoint={name}")
        assert done.returncode == 0, done.stderr
        found = [line.split() for line in done.stdout.splitlines() if line.startswith("val_loss")]
        assert values == found
    done = forked("validate", "line.yaml", "checkpoint=best", "run.name=other")
    assert done.returncode == 1
    assert "other" in done.stderr
    done = forked("predict", "line.yaml")
    assert done.returncode == 0, done.stderr
    path = next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("Predictions"))
    assert load_file(path)["predictions"].shape == (12, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "code"), [("graph", 1), ("bug", 1), ("interrupt", 130)])
def test_a_run_that_fails_says_why_and_how_by_its_code(fault: str, code: int) -> None:
    done = legato("fit", "line.yaml", f"task.fault={fault}")
    assert done.returncode == code
    assert ("Traceback" in done.stderr) == (fault == "bug")
    assert fault != "bug" or "ZeroDivisionError: a bug of the user" in done.stderr


# --- predictions ----------------------------------------------------------------------------------------------------
def test_tensors_are_joined_and_all_else_is_json(folder: Path) -> None:
    batches = [torch.arange(6.0).view(3, 2), torch.ones(1, 2)]
    path = write_predictions(batches, folder / "a")
    assert torch.equal(load_file(path)["predictions"], torch.cat(batches))
    path = write_predictions([batches, [torch.ones(2, 1)]], folder / "b")
    assert {name: tuple(one.shape) for name, one in load_file(path).items()} == {
        "predictions.0": (4, 2),
        "predictions.1": (2, 1),
    }
    path = write_predictions([torch.tensor(1), torch.tensor(2)], folder / "c")
    assert load_file(path)["predictions"].tolist() == [1, 2]
    path = write_predictions([{"label": "a", "score": torch.tensor([1.5])}, {"label": "b", "score": 2}], folder / "d")
    assert [one["predictions"] for one in json_lines(path)] == [
        {"label": "a", "score": [1.5]},
        {"label": "b", "score": 2},
    ]
    path = write_predictions([torch.ones(1, 2), torch.ones(1, 3)], folder / "e")
    assert path.suffix == ".jsonl"
    with pytest.raises(TaskError, match="predict_step returned object"):
        write_predictions([object()], folder / "f")


def test_the_package_is_a_program_too() -> None:
    """As torchrun starts it: `torchrun -m legato`."""
    done = subprocess.run([sys.executable, "-m", "legato", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == legato("--version").stdout


@pytest.mark.slow
def test_an_export_of_another_kind_is_refused() -> None:
    done = legato("export", "anything", "weights.pt")
    assert done.returncode != 0
    assert "weights.pt: the file is one of safetensors, and its name must end in .safetensors." in done.stderr
