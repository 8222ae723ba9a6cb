"""Public names, the cost of an import, and the size budgets of the code."""

import ast
import configparser
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
from sources import copy_sources

import legato

ROOT = Path(legato.__file__).parent
ROOMS = ("base", "callbacks", "cli", "compat", "configs", "lab", "loggers", "tasks", "trainer")
TREE = sorted([ROOT / "__init__.py", *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))])
NAMES = sorted(str(path.relative_to(ROOT)) for path in TREE)
SOURCES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in TREE}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}

STAND_INS = tuple(f"compat/lightning/{folder}/" for folder in ("stand_in", "pytorch", "fabric"))
"""What lies there is imported as `lightning` too, where a relative import would not find the package."""

MANY_PARAMETERS = {
    "tasks/task.py: log": "Lightning's signature",
    "tasks/task.py: log_dict": "Lightning's signature",
    "callbacks/checkpoint.py: __init__": "Lightning's arguments, each a key of the config",
    "trainer/strategies/mesh/mesh.py: __init__": "the axes, fully_shard's and init_process_group's, all keys",
}


# --- names ------------------------------------------------------------------------------------------------------------
def test_the_public_names():
    assert sorted(legato.__all__) == [
        "Callback",
        "CheckpointFormat",
        "CombinedLoader",
        "DataModule",
        "Task",
        "Trainer",
        "callbacks",
        "lab",
        "loggers",
        "rank_zero_only",
        "runs",
        "seed_everything",
        "strategies",
        "tasks",
        "testing",
    ]
    assert sorted(legato.callbacks.__all__) == [
        "BackboneFinetuning",
        "BaseFinetuning",
        "Callback",
        "Checkpoint",
        "CheckpointCallback",
        "DeviceStatsMonitor",
        "EarlyStopping",
        "ExponentialMovingAverage",
        "ExportPretrained",
        "GradientAccumulationScheduler",
        "LambdaCallback",
        "LearningRateMonitor",
        "ModelSummary",
        "MonitoringCallback",
        "OnExceptionCheckpoint",
        "PredictionWriter",
        "Profile",
        "ProgressBar",
        "ProgressDisplay",
        "ThroughputMonitor",
        "Timer",
        "WeightAveraging",
    ]
    assert sorted(legato.runs.__all__) == ["BestValue", "CheckpointEntry", "RunDirectory", "list", "open"]
    assert sorted(legato.lab.__all__) == ["Microscope", "SpikeWatch", "StragglerMonitor", "replay", "samples", "verify"]
    assert sorted(legato.tasks.__all__) == ["DataModule", "Digits", "DigitsData", "Task"]
    assert set(legato.strategies.__all__) >= {"Strategy", "SingleStrategy", "DataParallelStrategy", "DDPStrategy"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "room", ["legato", "legato.callbacks", "legato.lab", "legato.loggers", "legato.tasks", "legato.trainer.strategies"]
)
def test_every_public_name_is_there(room):
    module = import_module(room)
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert getattr(module, name).__doc__, name


def test_an_unknown_name_is_an_attribute_error():
    for module in (legato, legato.tasks, legato.strategies):
        with pytest.raises(AttributeError, match="Trianer"):
            _ = module.Trianer
    with pytest.raises(AttributeError, match=r"its name here is legato\.lab\.replay"):
        _ = legato.replay


# --- imports ----------------------------------------------------------------------------------------------------------
def loaded_by(code, before="pass"):
    """Run `before`, then `code` in a fresh Python; return the top-level modules that `code` loaded."""
    script = f"import sys; {before}; old = {{*sys.modules}}; {code}; print(*{{*sys.modules}} - old)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="/", timeout=120)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_legato_alone_does_not_load_torch():
    modules = loaded_by("import legato, legato.base.errors, legato.base.arguments, legato.callbacks, legato.tasks")
    assert "legato" in modules
    assert not {"torch", "numpy", "omegaconf", "tqdm", "tensorboard"} & modules


@pytest.mark.slow
def test_the_order_of_samples_can_be_worked_out_without_torch():
    assert "torch" not in loaded_by("import legato.trainer.data.sampling")


@pytest.mark.slow
def test_the_trainer_loads_nothing_that_is_needed_only_sometimes():
    use = "import legato; legato.Trainer; legato.Task; legato.DataModule; legato.Callback"
    modules = loaded_by(use, before="import torch")
    assert "legato" in modules
    assert not {"tensorboard", "torchmetrics", "tqdm", "sklearn", "torchvision", "torchdata"} & modules


@pytest.mark.slow
def test_an_evaluation_does_not_load_torchs_compiler(tmp_path):
    """It takes a second; torch loads it with the first optimizer."""
    arguments = f"accelerator='cpu', devices=1, enable_progress_bar=False, default_root_dir={str(tmp_path)!r}"
    make = "import legato; task = type('T', (legato.Task,), {'validation_step': lambda self, batch: None})()"
    modules = loaded_by(f"{make}; legato.Trainer({arguments}).validate(task, [[1]])", before="import torch")
    assert "legato" in modules
    assert "sympy" not in modules


# --- budgets ----------------------------------------------------------------------------------------------------------
def functions_of(tree):
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


@pytest.mark.parametrize("name", NAMES)
def test_functions_and_signatures_are_small(name):
    for function in functions_of(TREES[name]):
        length = function.end_lineno - function.lineno + 1
        assert length <= 60, f"{name}: {function.name} has {length} lines"
        arguments = function.args
        count = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
        count -= bool(arguments.args and arguments.args[0].arg in ("self", "cls"))
        if f"{name}: {function.name}" not in MANY_PARAMETERS and not name.startswith("compat/lightning/"):  # not ours
            assert count <= 10, f"{name}: {function.name} has {count} parameters"


def test_the_loop_fits_on_a_few_screens():
    assert len(SOURCES["trainer/trainer.py"].splitlines()) <= 320


def test_the_exceptions_are_still_needed():
    for entry in MANY_PARAMETERS:
        name, function = entry.split(": ")
        sizes = [
            len([*definition.args.args, *definition.args.kwonlyargs]) - 1
            for definition in functions_of(TREES[name])
            if definition.name == function
        ]
        assert max(sizes) > 10, entry


@pytest.mark.slow
def test_the_environment_is_read_in_one_file():
    readers = {
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv", "environb"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and any("env" in a.name for a in node.names))
    }
    assert readers <= {"base/environment.py"}


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(STAND_INS)])
def test_imports_inside_the_package_are_relative(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module]
        else:
            continue
        assert not {module.partition(".")[0] for module in modules} & {"legato", *ROOMS}, ast.unparse(node)


@pytest.mark.parametrize("room", ["callbacks", "tasks"])
def test_callbacks_and_tasks_know_the_trainer_by_type_only(room):
    """They may take errors, quantities and, inside of a function, what works on a batch; nothing of the loop."""
    for name, tree in TREES.items():
        if not name.startswith(f"{room}/"):
            continue
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.level == 2 and (node.module or "").startswith("trainer"):
                assert node.module in ("trainer.errors", "trainer.quantities"), f"{name}: {ast.unparse(node)}"


def test_nothing_is_left_to_do():
    for name, source in SOURCES.items():
        for word in ("TODO", "FIXME", "XXX", "NotImplemented\n"):
            assert word not in source, name


@pytest.mark.slow
def test_nothing_is_pickled_into_files():
    for name, tree in TREES.items():
        # whose files are Lightning's; tests/lightning/test_hostile_files.py holds what it reads
        for node in () if name == "compat/lightning/checkpoint.py" else ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert options.get("weights_only") == "True", name
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.save", "pickle.dump"), name


# --- packages ---------------------------------------------------------------------------------------------------------
def packages_in_the_tree():
    folders = {path.parent.relative_to(ROOT) for path in TREE}
    return {".".join(("legato", *folder.parts)) for folder in folders}


def test_setup_cfg_lists_every_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = setup["options"]["packages"].split()
    assert set(listed) == packages_in_the_tree()
    assert len(listed) == len(set(listed))
    for folder in {path.parent for path in TREE}:
        assert (folder / "__init__.py").is_file(), folder


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_every_config(tmp_path):
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(tmp_path / "source"),
    ]
    copy_sources(tmp_path / "source")
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    folder = (ROOT / "configs").iterdir()
    configs = {str(path.relative_to(ROOT)) for path in folder if path.suffix in (".yaml", ".json")}
    templates = {str(path.relative_to(ROOT)) for path in (ROOT / "cli").rglob("*.template")}
    assert held == {
        f"legato/{name}" for name in {*NAMES, *configs, *templates, "__main__.py", "py.typed", "tasks/digits.csv.gz"}
    }
