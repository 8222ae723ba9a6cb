"""The command line as a user meets it: real processes, exit codes, what is printed where."""

import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line_folder import CONFIG, TASK
from forked import completed, run_module, run_program
from safetensors.torch import load_file

from legato.base.arguments import ARGUMENT_NAMES
from legato.base.errors import TaskError
from legato.cli.config.read import MOVED, SECTION_OF, SECTIONS
from legato.cli.main import COMMANDS, main
from legato.cli.predictions import write_predictions


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a task with its data, and a config."""
    (tmp_path / "line.py").write_text(TASK)
    (tmp_path / "line.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def legato(*arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "legato", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def forked(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command without loading torch again."""
    return completed(run_module, "legato", *arguments)


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


def test_help_lists_every_command_and_the_exit_codes() -> None:
    done = legato("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name, command in COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert command.summary in done.stdout
    for code in ("0", "1", "2", "75", "130"):
        assert re.search(rf"(?m)^  {code} +\w", done.stdout)
    assert legato().returncode == 2


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "lightning"])
def test_help_of_a_command_has_what_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: legato {name} ")
    assert "exit codes:\n  0   done\n" in text
    assert "--quiet" in text
    assert ("keys under trainer:" in text) == ("CONFIG.yaml|KEY=VALUE" in text)
    assert main(["help", name]) == 0
    assert capsys.readouterr().out == text


def test_a_command_that_is_gone_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "line.yaml"]) == 2
    assert "legato sweep" in capsys.readouterr().err
    assert main(["fit", "line.yaml", "--quite"]) == 2
    assert "Did you mean '--quiet'?" in capsys.readouterr().err


def test_help_of_fit_lists_every_key_with_type_default_and_meaning() -> None:
    done = legato("fit", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name, doc in SECTIONS.items():
        assert (f"  {name} " in done.stdout and doc in done.stdout) == (name != "checkpoint")
    for name in set(ARGUMENT_NAMES) - set(MOVED) - set(SECTION_OF):
        assert f"\n  {name}\n" in done.stdout
    assert "  max_steps\n      Stop after this many optimizer steps. -1: no limit.\n" in done.stdout


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["help", *words]) == 0
    return capsys.readouterr().out


def test_help_of_a_key_has_its_type_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, "trainer.accumulate_grad_batches")
    assert text.startswith("trainer.accumulate_grad_batches: int of at least 1\n")
    assert "Number of batches that each replica accumulates" in text
    assert explained(capsys, "accumulate_grad_batches") == text
    assert explained(capsys, "seed").startswith("seed: int from 0 to 4294967295\n")
    assert explained(capsys, "replicas").startswith("trainer.replicas: int of at least 1 or null\n")
    assert explained(capsys, "run.name").startswith("run.name: ")
    assert explained(capsys, "task").startswith("task\n    The model with its steps")


def test_help_of_a_class_is_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, "EarlyStopping")
    assert text.startswith("legato.callbacks.EarlyStopping(")
    assert "Number of consecutive checks without improvement after which the run ends." in text
    assert "find_unused_parameters" in explained(capsys, "ddp")
    text = explained(capsys, "slurm")
    assert text.startswith("legato.cli.launchers.slurm.SlurmLauncher(")
    assert "    partition: SLURM partition. None: the default partition." in text
    assert explained(capsys, "line.Line").startswith("line.Line(")


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("trainer.max_epocs", "Did you mean 'trainer.max_epochs'?"),
        ("max_epocs", "Did you mean 'max_epochs'?"),
        ("EarlyStoping", "Did you mean 'EarlyStopping'?"),
        ("%%", "The top-level keys are seed, run"),
    ],
)
def test_help_of_an_unknown_key_suggests_another(topic: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", topic]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--help", "trainer.max_epohcs=3", "task.chanels=3", "callbacks.checkpoint.montor=x"])
def test_neither_help_nor_a_misspelt_key_imports_torch(word: str) -> None:
    """Also not to tell other ranks of the mistake, where there are none."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "legato", "fit", "digits.yaml", word],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == (0 if word == "--help" else 2)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "legato.cli.config.read" in modules
    assert not modules & {"torch", "numpy", "omegaconf"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fitt", "line.yaml"], "'fitt' is not a command. Did you mean 'fit'?"),
        (["tune", "line.yaml"], "legato tune was removed. Try values for a setting with"),
        (["bananas"], "The commands are new, fit, validate"),
        (["fit"], "No config file"),
        (["export", "x"], "legato export: the following arguments are required: OUT."),
        (["convert", "a", "b", "c"], "unexpected argument 'c'. Remove it."),
        (["fit", "lime.yaml"], "Did you mean 'line.yaml'?"),
        (["fit", "line.yaml", "--devices", "2"], "legato fit: unexpected argument '--devices'"),
        (["fit", "line.yaml", "trainer.max_epohcs=3"], "override: trainer.max_epohcs is not an argument"),
        (["config", "line.yaml", "task.lr=x"], "override: task.lr must be float"),
    ],
)  # fmt: skip
def test_usage_errors_exit_with_2_and_no_traceback(arguments: list[str], words: str) -> None:
    done = forked(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("legato: ")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) <= 6


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = f"{sys.executable} -m legato fit --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["trainer.devices=2", "trainer.strategy=ddp"]], ids=["alone", "two"])
def test_a_run_that_is_started_without_standard_files(options: list[str], folder: Path) -> None:
    """None of the run's own files takes their numbers, under which libraries print."""
    (folder / "line.py").write_text(TASK + PRINTS)
    fit = [sys.executable, "-m", "legato", "fit", "line.yaml", "task._target_=line.Prints", *options]
    run = subprocess.run(["bash", "-c", f"{shlex.join(fit)} <&- >&- 2>&-"], timeout=100, check=False)
    assert run.returncode == 0
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert len(files) > 5
    assert not [path for path in files if b"printed by a library" in path.read_bytes()]


PRINTS = """

class Prints(Line):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        import os

        os.write(1, b"printed by a library")
        os.write(2, b"printed by a library")
"""


def test_a_folder_that_has_been_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["runs"]) == 2
    assert "The working directory no longer exists" in capsys.readouterr().err


# --- config ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_config_prints_what_runs_and_where_it_is_from(folder: Path) -> None:
    done = forked("config", "line.yaml", "trainer.max_epochs=3")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  max_epochs: 3                                   # override\n" in done.stdout
    assert "# line.yaml:2\n" in done.stdout
    assert "# default\n" in done.stdout
    (folder / "printed.yaml").write_text(done.stdout)
    again = forked("config", "printed.yaml")
    assert [line.partition("#")[0] for line in again.stdout.splitlines()] == [
        line.partition("#")[0] for line in done.stdout.splitlines()
    ]


def test_a_ready_config_is_found_anywhere() -> None:
    done = forked("config", "digits.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "_target_: legato.tasks." in done.stdout


def test_a_config_of_the_project_is_found_from_its_folders(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "configs").mkdir()
    (folder / "line.yaml").rename(folder / "configs" / "spirals.yaml")
    (folder / "deep" / "er").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(folder / "deep" / "er")
    assert main(["config", "spirals.yaml"]) == 2  # no project yet
    (folder / "pyproject.toml").touch()
    assert main(["config", "spirals.yaml"]) == 0
    assert "_target_: line.Line" in capsys.readouterr().out
    assert main(["config", "spiral.yaml"]) == 2
    assert "Did you mean 'spirals.yaml'?" in capsys.readouterr().err


# --- runs -----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_fit_ends_with_a_summary_and_can_be_repeated_from_its_config() -> None:
    done = forked("fit", "line.yaml", "seed=3")
    assert done.returncode == 0, done.stderr
    run = Path("runs/default/version_0")
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in done.stdout.splitlines() if "  " in line)
    assert Path(rows["Run directory"]).samefile(run)
    assert Path(rows["Checkpoint"]).is_relative_to(rows["Run directory"])
    assert rows["View it with"] == f"tensorboard --logdir {Path(rows['Run directory']).parents[1]}"  # all runs, by name
    assert float(rows["val_loss"]) >= 0
    stored = run / "config.yaml"
    assert "seed: 3" in stored.read_text()
    again = forked("fit", str(stored))
    assert again.returncode == 0, again.stderr
    files = [Path(f"runs/default/version_{version}/metrics.jsonl") for version in (0, 1)]
    points = [[point.get("loss") for point in json_lines(file)] for file in files]
    assert points[0] == points[1]
    assert any(points[0])


@pytest.mark.slow
def test_quiet_leaves_the_result_and_verbose_says_what_was_read(folder: Path) -> None:
    """In all processes: the workers have the level of the command."""
    (folder / "more.yaml").write_text("extends: [line.yaml]\nseed: 3\n")
    words = ["more.yaml", "trainer.strategy=ddp", "trainer.devices=2", "trainer.enable_progress_bar=true"]
    done = forked("fit", *words, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"\S+/runs/default/version_0  step 4 in [\d.]+ s\n", done.stdout)
    done = forked("validate", *words, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"val_loss +[\d.e-]+\n", done.stdout)
    done = forked("fit", "--verbose", *words)
    assert done.returncode == 0, done.stderr
    for pattern in (
        f"Config file {folder / 'line.yaml'}, which more.yaml extends\n",
        r"seed: 3 +# more\.yaml:2\n",
        r"devices: 2 +# override\n",
        f"Run directory {folder}/runs/default/version_\\d\n",
        r"Rank 1 of 2: process \d+ on cpu\n",
        "Training data: DataLoader, 2 batches per replica\n",
        f"JSONLinesLogger writes to {folder}/runs/default/version_\\d\n",
        f"Checkpoint {folder}/runs/default/version_\\d/checkpoints/step-00000002\n",
    ):
        assert re.search(pattern, done.stderr), (pattern, done.stderr)
    assert "which more.yaml" not in forked("fit", *words).stderr
    quiet = "accelerator='cpu', devices=1, enable_progress_bar=False, enable_model_summary=False"
    script = f"import line, logging, legato as lg\nlogging.getLogger('legato').setLevel('LEVEL')\nlg.Trainer({quiet}, "
    script += "max_epochs=1).fit(line.Line())"
    for level in ("WARNING", "DEBUG"):
        done = completed(run_program, "-c", script.replace("LEVEL", level))
        assert done.returncode == 0, done.stderr
        assert ("Run directory" in done.stderr) == (level == "DEBUG")
        assert done.stdout == ""
        assert done.stderr == "" or level == "DEBUG"


@pytest.mark.slow
def test_validate_and_predict_use_the_checkpoint() -> None:
    done = forked("fit", "line.yaml")
    assert done.returncode == 0, done.stderr
    values = [line.split() for line in done.stdout.splitlines() if line.startswith("val_loss")]
    for name in ("last", "best", "runs/default/version_0"):
        done = forked("validate", "line.yaml", f"checkpoint={name}")
        assert done.returncode == 0, done.stderr
        rows = [line.split() for line in done.stdout.splitlines() if line.startswith("val_loss")]
        assert values == rows
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
    done = forked("fit", "line.yaml", f"task.fault={fault}")
    assert done.returncode == code
    assert ("Traceback" in done.stderr) == (fault == "bug")
    assert fault != "bug" or "ZeroDivisionError: a bug of the user" in done.stderr


# --- predictions ----------------------------------------------------------------------------------------------------
def test_tensors_are_joined_and_all_else_is_json(folder: Path) -> None:
    batches = [torch.arange(6.0).view(3, 2), torch.ones(1, 2)]
    path = write_predictions(batches, folder / "a")
    assert torch.equal(load_file(path)["predictions"], torch.cat(batches))
    path = write_predictions([batches, [torch.ones(2, 1)]], folder / "b")
    assert {name: tuple(tensor.shape) for name, tensor in load_file(path).items()} == {
        "predictions.0": (4, 2),
        "predictions.1": (2, 1),
    }
    path = write_predictions([torch.tensor(1), torch.tensor(2)], folder / "c")
    assert load_file(path)["predictions"].tolist() == [1, 2]
    path = write_predictions([{"label": "a", "score": torch.tensor([1.5])}, {"label": "b", "score": 2}], folder / "d")
    assert [line["predictions"] for line in json_lines(path)] == [
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
    done = forked("export", "anything", "weights.pt")
    assert done.returncode != 0
    assert "weights.pt: expected a file name ending in .safetensors" in done.stderr


def test_more_processes_than_replicas_are_refused_before_any_starts() -> None:
    done = forked("fit", "line.yaml", "trainer.devices=3", "trainer.strategy=ddp", "trainer.replicas=2")
    assert done.returncode == 2
    assert "Start at most 2 processes, or" in done.stderr
    assert "started by legato" not in done.stderr
    assert not Path("runs").exists()
