"""The module tree of Lightning's names, and `import lightning` as an import of Legato."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from forked import completed, run_module

import legato.compat.lightning.pytorch as pl
from legato.cli.main import main
from legato.compat import lightning as compat
from legato.compat.lightning.placeholders import Placeholder, UnsupportedError
from legato.compat.lightning.script import advice_for

FOLDER = Path(compat.__file__).parent


def public_names(path):
    """Return the names that a module of Lightning defines, and re-exports if it is a package, without importing it."""
    defined, passed_on = set(), set()
    statements = list(ast.parse(path.read_text()).body)
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined.add(node.target.id)
        elif isinstance(node, ast.ImportFrom) and path.name == "__init__.py" and node.module.startswith("lightning."):
            passed_on |= {name.asname or name.name for name in node.names}
        elif isinstance(node, ast.If | ast.Try):
            statements += [*node.body, *node.orelse]
    every = defined | passed_on
    return {name for name in every if not name.startswith("_")} - {"*", "log", "warning_cache", "T", "module_available"}


@pytest.fixture(scope="session")
def lightning():
    """Return the folder of the installed package."""
    from importlib.util import find_spec

    return Path(find_spec("lightning").submodule_search_locations[0])


NO_MODULES = ("demos", "_graveyard", "consolidate_checkpoint")


def test_no_public_name_is_missing(lightning):
    missing = []
    for path in sorted((lightning / "pytorch").rglob("*.py")):
        parts = path.relative_to(lightning).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if any(segment.startswith("_") or segment in NO_MODULES for segment in parts):
            continue
        module = ".".join(parts)
        names = vars(import_module(f"legato.compat.lightning.{module}"))
        missing += [f"{module}.{name}" for name in sorted(public_names(path)) if name not in names]
    assert missing == []


def test_no_module_is_missing(lightning):
    missing = []
    for path in [*(lightning / "pytorch").rglob("*.py"), *(lightning / "fabric").rglob("*.py")]:
        parts = path.relative_to(lightning).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(segment in NO_MODULES or segment.startswith("__") for segment in parts):
            try:
                import_module(".".join(("legato.compat.lightning", *parts)))
            except ModuleNotFoundError:
                missing.append(".".join(parts))
    assert missing == []


def test_inner_workings_can_be_imported_and_not_used():
    from legato.compat.lightning.pytorch.trainer.connectors.data_connector import _DataConnector
    from legato.compat.lightning.pytorch.utilities.imports import _OMEGACONF_AVAILABLE

    assert _OMEGACONF_AVAILABLE is True
    with pytest.raises(UnsupportedError, match="_DataConnector: It is internal to Lightning"):
        _DataConnector(1)
    with pytest.raises(ImportError, match="cannot import name 'NoSuch'"):
        exec("from legato.compat.lightning.pytorch.callbacks import NoSuch")


TREE = sorted(
    f"legato.compat.lightning.{'.'.join(path.relative_to(FOLDER).parts[:-1])}"
    for tree in ("pytorch", "fabric")
    for path in (FOLDER / tree).rglob("__init__.py")
)


@pytest.mark.parametrize("name", [name for name in TREE if not name.endswith("demos")])
def test_a_star_import_brings_the_public_names(name):
    package = import_module(name)
    assert not {"alias_below", "inner_name", "placeholders", "sys"} & set(package.__all__)
    names = {}
    exec(f"from {name} import *", names)
    assert set(package.__all__) <= set(names)


def test_a_name_exists_once():
    """All paths below a package are the package itself, so no two names of its modules may differ."""
    from legato.compat.lightning.pytorch import callbacks, utilities
    from legato.compat.lightning.pytorch.callbacks import progress, timer
    from legato.compat.lightning.pytorch.utilities import rank_zero

    assert callbacks is progress is timer
    assert rank_zero.rank_zero_info is utilities.rank_zero_info
    with pytest.raises(AttributeError, match="no public name 'os'"):
        callbacks.os  # noqa: B018


UNCHANGED = """
import builtins, io, os, pathlib, shutil, sys
import torch

owners = builtins, io, os, pathlib.Path, shutil, torch.serialization
before = [dict(vars(owner)) for owner in owners], list(sys.meta_path), list(sys.path)
import legato.compat.lightning.pytorch
import legato.compat.lightning.pytorch.cli
after = [dict(vars(owner)) for owner in owners], list(sys.meta_path), list(sys.path)
assert after[1:] == before[1:]
assert (torch.load, torch.save) == (torch.serialization.load, torch.serialization.save)
for owner, old, new in zip(owners, before[0], after[0]):
    assert [name for name in old if old[name] is not new[name]] == [], owner
"""


@pytest.mark.slow
def test_an_import_changes_nothing_for_others():
    done = subprocess.run([sys.executable, "-c", UNCHANGED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_modules_say_where_the_package_lies():
    for name in ("", ".pytorch", ".pytorch.callbacks.timer", ".fabric.utilities.seed"):
        assert Path(import_module(f"legato.compat.lightning{name}").__file__).is_file(), name


def test_a_placeholder_can_be_named_subclassed_and_not_used():
    absent = {
        f"{package}.{name}": value
        for package in TREE
        for name, value in vars(import_module(package)).items()
        if isinstance(value, Placeholder)
    }
    assert len(absent) > 40
    for path, value in absent.items():
        assert not isinstance(3, value)
        assert value | None
        assert value.way_out.endswith("."), path
        derived = type("Derived", (value,), {})
        with pytest.raises(UnsupportedError, match=value.__name__):
            value()
        with pytest.raises(UnsupportedError):
            derived(1, a=2)


def test_packages_and_modules():
    with pytest.raises(ModuleNotFoundError):
        import_module("legato.compat.lightning.pytorch.callbacks.nothing")
    with pytest.raises(ImportError, match="no_such"):
        exec("from legato.compat.lightning.pytorch.callbacks import no_such")


SCRIPT = """
import pytorch_lightning as pl
import lightning as L
import lightning.pytorch.callbacks.timer as timer
from lightning.pytorch.callbacks import Timer
from lightning_fabric.utilities.seed import seed_everything
import os, sys

assert os.path.isabs(__file__) and os.path.samefile(__file__, "train.py")
assert "lightning.pytorch.trainer.states" in sys.modules
assert pl.trainer is L.pytorch.trainer and pl.Trainer is L.Trainer and timer.Timer is Timer
assert L.__version__.startswith("2.6")
assert L.Trainer.__module__.startswith("legato.") and L.pytorch is pl
print("ran", sys.argv[1:])
"""


def run(tmp_path, *called, script=SCRIPT):
    (tmp_path / "train.py").write_text(script)
    done = completed(*called, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_a_script_runs_unchanged(tmp_path):
    done = run(tmp_path, run_module, "legato", "lightning", "train.py", "--lr", "3")
    assert done.stdout == "ran ['--lr', '3']\n"
    done = run(tmp_path, run_module, "legato.compat.lightning", "-m", "train", "--help")
    assert done.stdout == "ran ['--help']\n"


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_the_command_tells_its_own_help(capsys, word):
    assert main(["lightning", word]) == 0
    assert "legato lightning SCRIPT.py [arguments]" in capsys.readouterr().out


@pytest.mark.slow
def test_an_error_of_a_script_is_told_as_by_python(tmp_path):
    (tmp_path / "train.py").write_text("import lightning as L\ndef f():\n    L.Trainer(max_epochs=-5)\nf()\n")
    done = completed(run_module, "legato", "lightning", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert 'train.py", line 3, in f' in done.stderr
    assert "runpy" not in done.stderr
    assert "max_epochs" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_an_exit_code_of_a_script_is_its_own(tmp_path):
    (tmp_path / "train.py").write_text("import sys\nsys.exit(7)\n")
    assert completed(run_module, "legato", "lightning", "train.py", cwd=tmp_path).returncode == 7


CHILDREN = """
import subprocess, sys
import legato.compat.lightning
legato.compat.lightning.install()
import multiprocessing

def child(queue):
    from pytorch_lightning.utilities.exceptions import MisconfigurationException
    queue.put(MisconfigurationException.__module__)

if __name__ == "__main__":
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
    code = "from importlib.util import find_spec; print(find_spec('lightning').origin)"
    print(subprocess.check_output([sys.executable, "-c", code], text=True))
    import importlib.metadata
    print(importlib.metadata.version("lightning"), importlib.metadata.version("pytorch-lightning"))
"""


@pytest.mark.slow
def test_processes_started_from_it_see_the_same(tmp_path):
    (tmp_path / "train.py").write_text(CHILDREN)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    spawned, origin, *versions = done.stdout.split()
    assert (spawned, versions) == ("legato.base.errors", ["2.6.6", "2.6.6"])
    assert Path(origin).is_relative_to(FOLDER)


DEMO = """
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel, BoringDataModule

assert issubclass(BoringModel, L.LightningModule) and L.Trainer.__module__.startswith("legato.")
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=1, accelerator="cpu", **options)
trainer.fit(BoringModel(), datamodule=BoringDataModule())
print(trainer.global_step)
"""


@pytest.mark.slow
def test_lightnings_own_demonstrations_run(tmp_path):
    done = run(tmp_path, run_module, "legato", "lightning", "train.py", script=DEMO)
    assert done.stdout.split()[-1] == "2"


def test_an_error_within_legato_ends_in_a_sentence_and_one_of_the_program_does_not(tmp_path, monkeypatch):
    class Fails(pl.LightningModule):
        def test_step(self, batch, batch_idx):
            raise ValueError("mine")

    def error_of(*arguments):
        with pytest.raises(Exception) as caught:
            trainer.test(*arguments, verbose=False)
        return advice_for(caught.value, ["train.py", "--fast"])

    trainer = pl.Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_progress_bar=False)
    assert error_of(Fails(), [torch.ones(2, 1)]) == ""
    assert error_of(3) == ""  # an error of Legato with its own advice
    monkeypatch.setattr("legato.trainer.setup.start.make_run", None)
    advice = error_of(Fails(), [torch.ones(2, 1)])
    assert advice.startswith("legato: this error occurred within Legato (trainer/setup/start.py:")
    assert "as it does with Lightning: `python train.py --fast`" in advice
