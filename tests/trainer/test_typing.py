"""Legato's types as type checkers and editors see them, installed as a wheel and as an editable install."""

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from sources import copy_sources

import legato as lg
from legato.base.arguments import ARGUMENT_NAMES, TrainerArguments, argument_texts
from legato.cli.new.command import write_project

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "tests" / "typed_project.py"
ROOMS = ("callbacks", "tasks", "lab", "loggers", "trainer/strategies")


def quick_run(*words, **options):
    done = subprocess.run(words, capture_output=True, text=True, timeout=570, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- names ------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_names_that_are_imported_late_are_imported_for_type_checkers(room):
    module = __import__(f"legato.{room.replace('/', '.')}", fromlist=["x"])
    typed = {
        alias.name: f".{node.module}"
        for block in ast.parse((ROOT / room / "__init__.py").read_text()).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name  # else a checker takes it for private
    }
    assert typed.keys() == {name for name in module.__all__ if name.upper() != name}
    for name, home in typed.items():
        assert getattr(module, name).__module__ == f"{module.__name__}{home}"


def test_editors_show_the_trainers_arguments_with_their_texts():
    assert tuple(inspect.signature(lg.Trainer).parameters) == ARGUMENT_NAMES
    assert tuple(argument_texts()) == ARGUMENT_NAMES
    assert inspect.getdoc(lg.Trainer) == inspect.getdoc(TrainerArguments)


# --- a user's project -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return a function that makes an environment like this one, with Legato installed as requested."""
    wheels = tmp_path_factory.mktemp("wheels")

    def make(kind, *install):
        folder = tmp_path_factory.mktemp(kind)
        venv.create(folder, symlinks=True)
        python = folder / "bin" / "python"
        site = Path(quick_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        (site / "others.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
        quick_run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", *install, cwd=wheels)
        return python

    return make


@pytest.fixture(scope="module")
def editable(environment):
    """The interpreter of an environment in which Legato is installed in place."""
    return environment("editable", "--editable", ROOT)


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request, environment, tmp_path_factory):
    """The interpreter of an environment in which Legato is installed."""
    if request.param == "editable":
        return request.getfixturevalue("editable")
    return environment("wheel", copy_sources(tmp_path_factory.mktemp("source") / "legato"))


@pytest.fixture
def project(tmp_path):
    """A user's project, outside of the repository."""
    shutil.copy(PROJECT, tmp_path / "train.py")
    return tmp_path


@pytest.fixture
def strict_mypy(python, pytestconfig):
    """Return a function that runs `mypy --strict` with that interpreter; it returns what was printed."""
    pytest.importorskip("mypy")
    cache = pytestconfig.cache.mkdir("mypy")  # torch takes it half a minute
    words = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "--cache-dir", cache]
    return lambda folder, *more: quick_run(*words, *more, cwd=folder)


@pytest.mark.slow
def test_mypy_finds_every_mistake_of_a_project_and_nothing_else(strict_mypy, project):
    strict_mypy(project, "train.py")


@pytest.mark.slow
def test_a_new_project_passes_mypy_strict(strict_mypy, tmp_path):
    write_project(tmp_path / "rings")
    assert "no issues" in strict_mypy(tmp_path / "rings")


@pytest.mark.slow
def test_pyright_finds_every_mistake_of_a_project_and_nothing_else(python, project):
    pyright = next(filter(None, map(find_program, ("pyright", "basedpyright"))), None)
    if pyright is None:
        pytest.skip("needs pyright or basedpyright")
    settings = {
        "include": ["train.py"],
        "typeCheckingMode": "standard",
        "reportUnnecessaryTypeIgnoreComment": "error",
        "reportMissingModuleSource": "error",
    }
    (project / "pyrightconfig.json").write_text(json.dumps(settings))
    quick_run(pyright, "--pythonpath", python, cwd=project)


def find_program(name):
    beside = Path(sys.executable).parent / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


@pytest.mark.slow
def test_an_editable_install_runs_from_its_own_place(editable, tmp_path):
    code = "import legato, legato.base.errors as e; print(legato.__file__); print(e.__file__)"
    assert quick_run(editable, "-c", code, cwd=tmp_path).split() == [
        str(ROOT / "__init__.py"),
        str(ROOT / "base" / "errors.py"),
    ]
    package = tmp_path / "legato"
    package.mkdir()
    (package / "__init__.py").touch()
    printed = quick_run(
        editable, "-c", "import legato; print(legato.__file__)", env={"PYTHONPATH": str(tmp_path)}, cwd="/"
    )
    assert printed.strip() == str(package / "__init__.py")
