"""`legato new` writes a project that trains at once, and passes its test and ruff (mypy: test_typing)."""

import subprocess
import sys
from pathlib import Path

import pytest
from pages import Reader

from legato.cli.main import main
from legato.cli.new.command import write_project


def run(folder: Path, *words: str) -> str:
    """Run a tool in a folder; return what it printed."""
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new project."""
    monkeypatch.chdir(tmp_path)
    assert main(["new", "rings"]) == 0
    return tmp_path / "rings"


def test_it_says_what_it_wrote_and_how_to_train_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my-rings"]) == 0
    text = capsys.readouterr().out
    files = [path for path in sorted((tmp_path / "my-rings").rglob("*")) if path.is_file()]
    assert all(f"  my-rings/{path.relative_to(tmp_path / 'my-rings')}\n" in text for path in files)
    assert "cd my-rings && legato fit configs/train.yaml" in text
    assert (tmp_path / "my-rings" / "my_rings" / "task.py").is_file()
    assert not [path for path in files if "__NAME__" in path.read_text() or ".template" in path.name]


def test_every_file_of_the_project_comes_from_the_package(project: Path) -> None:
    names = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    assert {"configs/train.yaml", "configs/quick.yaml", "pyproject.toml", "rings/task.py", "rings/data.py"} <= names
    assert {"rings/callbacks.py", "rings/__init__.py", "tests/test_training.py", "README.md", ".gitignore"} <= names


@pytest.mark.parametrize(
    "name",
    ["torch", "class", "1st", "two words", "legato", ".hidden", "random", "types", "os", "a" * 300, "a" * 250, ""],
)
def test_a_name_that_no_package_can_have_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", name]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rings").mkdir()
    (tmp_path / "rings" / "precious.txt").write_text("mine")
    assert main(["new", "rings"]) == 2
    assert "already exists and is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "rings").iterdir()] == ["precious.txt"]
    assert main(["new"]) == 2


def test_an_empty_folder_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rings").mkdir()
    assert Path("rings/task.py") in write_project(tmp_path / "rings")
    (tmp_path / "my-rings").mkdir()
    monkeypatch.chdir(tmp_path / "my-rings")
    assert main(["new", "."]) == 0
    assert Path("my_rings/task.py").is_file()
    assert "Train it:  legato fit" in capsys.readouterr().out


@pytest.mark.slow
def test_it_trains_and_resumes_at_once(project: Path) -> None:
    reader = Reader(project)
    reader.command("legato fit configs/quick.yaml")
    reader.command("legato fit configs/train.yaml trainer.strategy=ddp trainer.devices=2")
    reader.command("legato fit configs/train.yaml resume=auto trainer.strategy=ddp trainer.devices=2")
    assert "train/weight_norm" in (project / "runs" / "quick" / "version_0" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_it_passes_its_own_test(project: Path) -> None:
    assert "1 passed" in run(project, "pytest", "-q", "-W", "error", "-p", "no:cacheprovider")


@pytest.mark.slow
def test_it_passes_ruff(project: Path) -> None:
    run(project, "ruff", "check", "--no-cache", ".")
    run(project, "ruff", "format", "--no-cache", "--check", ".")
