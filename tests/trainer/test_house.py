"""Rules about the code as a whole: rooms of tests, names that tests leave alone, the map in docs/architecture.md."""

import ast
import re
from pathlib import Path

import grimp
import pytest

import legato as lg

PACKAGE = Path(lg.__file__).resolve().parent
TESTS = Path(__file__).resolve().parents[1]
ROOMS = ("trainer", "callbacks", "tasks", "compat")
MODULES = [path for top in ROOMS for path in sorted((PACKAGE / top).rglob("*.py"))]


def nodes(path):
    return ast.walk(ast.parse(path.read_text()))


def docstrings(path):
    """Yield the line and text of each docstring of a module, of its attributes too."""
    for node in nodes(path):
        for statement in getattr(node, "body", ()) if isinstance(node, BODIES) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.lineno, str(statement.value.value)


BODIES = ast.Module | ast.ClassDef | ast.FunctionDef
CLAUSES = re.compile(
    r"(What|Who|Where|When|Which|How|Of|By|In|On|At|As|For|From|To|With|Without|That|It|Its|This|These|So|If|Here)\b"
)


def test_docstrings_begin_with_what_the_thing_is_or_does():
    """A noun or a verb comes first: no clause, and no pronoun."""
    found = [f"{path}:{line} {text}" for path in MODULES for line, text in docstrings(path) if CLAUSES.match(text)]
    assert found == []


def private_names():
    """Return the names that begin with one underscore and that the package defines or assigns."""
    found = set()
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


@pytest.mark.slow
def test_tests_and_benchmarks_use_no_private_name():
    private = private_names()
    used = []
    for path in [*sorted(TESTS.rglob("*.py")), *sorted((PACKAGE / "benchmarks").glob("*.py"))]:
        tree = list(nodes(path))
        own = {node.name for node in tree if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        own |= {node.attr for node in tree if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        own |= TORCHS | LIGHTNINGS
        for node in tree:
            names = [node.attr] if isinstance(node, ast.Attribute) else []
            names += [one.name for one in node.names] if isinstance(node, ast.ImportFrom) else []
            used += [f"{path.relative_to(PACKAGE)}:{node.lineno} {name}" for name in names if name in private - own]
    assert used == []


TORCHS = {"_opt_called", "_compiled_call_impl", "_update_count"}
"""Names of torch and torchmetrics that tests look at, and that `torch_private.py` assigns."""
LIGHTNINGS = {
    "_AcceleratorConnector",
    "_IS_INTERACTIVE",
    "_accelerator_connector",
    "_accelerator_flag",
    "_accumulated_batches_reached",
    "_active_loop",
    "_add_prefix",
    "_add_task",
    "_annealing_epochs",
    "_apply_batch_transfer_handler",
    "_attach_model_callbacks",
    "_attach_model_logging_functions",
    "_attr_name",
    "_automatic_optimization",
    "_average_model",
    "_batches_that_stepped",
    "_callback_connector",
    "_callback_metrics",
    "_can_stop_early",
    "_check_and_init_precision",
    "_checkpoint_callback",
    "_checkpoint_connector",
    "_choose_strategy",
    "_combined_loader",
    "_console_kwargs",
    "_current_fx_name",
    "_data_source",
    "_detect_anomaly",
    "_device",
    "_devices_flag",
    "_dtype",
    "_duration",
    "_end_time",
    "_evaluation_loop",
    "_experiment",
    "_extract_stats",
    "_fabric",
    "_find_value",
    "_flush_logs_every_n_steps",
    "_fs",
    "_get_keys",
    "_get_next_version",
    "_get_optimizer_stats",
    "_id",
    "_initialize_train_progress_bar_id",
    "_initialized",
    "_interval",
    "_kwargs",
    "_latest_update_epoch",
    "_latest_update_step",
    "_lightning_optimizers",
    "_loaded_checkpoint",
    "_log_batch_kwargs",
    "_logged_metrics",
    "_logger_connector",
    "_metric_attributes",
    "_mlflow_client",
    "_mode",
    "_model_contains_batch_norm",
    "_model_registry",
    "_name",
    "_num_ready_batches_reached",
    "_num_training_steps",
    "_offset",
    "_on_after_step",
    "_on_before_step",
    "_optimizer",
    "_parallel_devices",
    "_predictions",
    "_prefix",
    "_progress_bar_metrics",
    "_progress_stopped",
    "_reorder_callbacks",
    "_reset_progress_bar_ids",
    "_results",
    "_root_dir",
    "_sanitize_params",
    "_save_dir",
    "_should_accumulate",
    "_should_check_val_epoch",
    "_should_check_val_fx",
    "_should_update",
    "_signal_connector",
    "_start_time",
    "_store",
    "_sub_dir",
    "_swa_epoch_start",
    "_to_lightning_optimizer",
    "_tracking_uri",
    "_update",
    "_val_check_time_interval",
    "_verbose",
    "_verify_is_manual_optimization",
    "_version",
}
"""Private names of Lightning's that public packages use, and that its room therefore has."""


def test_each_room_has_tests_of_its_own():
    homes = PACKAGE, PACKAGE / "trainer", PACKAGE / "compat"
    rooms = {path.parent.name for path in MODULES if path.parent.parent in homes} - {"compat"}
    tested = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert tested - rooms == {"docs", "together", "with_others"}
    assert rooms - tested == set()


def test_no_test_lies_outside_of_a_room():
    assert sorted(path.name for path in TESTS.glob("test_*.py")) == []


@pytest.mark.parametrize("document", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_map_names_files_that_are_there(document):
    named = set(
        re.findall(r"`((?:trainer|callbacks|tasks|compat|tests|docs)/[\w/.]*)`", (PACKAGE / document).read_text())
    )
    wanted = {name for name in named if "NAME" not in name and "ROOM" not in name and name != "tests/__init__.py"}
    assert wanted
    assert [name for name in sorted(wanted) if not (PACKAGE / name).exists()] == []


def test_each_room_is_on_the_map():
    text = (PACKAGE / "docs" / "architecture.md").read_text()
    rooms = {f"{path.parent.relative_to(PACKAGE)}/" for path in MODULES if path.parent.parent.name != "strategies"}
    assert [
        room for room in sorted(rooms) if room not in text and not room.startswith(("trainer/commands/", "compat/"))
    ] == []


def test_no_modules_import_each_other_in_a_circle():
    """Imports within functions count, those for type checkers do not."""
    graph = grimp.build_graph("legato", exclude_type_checking_imports=True, cache_dir=None)
    left = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    while ends := {module for module in left if not left[module] or not any(module in one for one in left.values())}:
        left = {module: imported - ends for module, imported in left.items() if module not in ends}
    assert {module: sorted(imported) for module, imported in left.items()} == {}


NAMED_BY_TYPE = {
    "callbacks.callback": "tasks.task trainer.arguments trainer.checkpoints.convert trainer.view",
    "tasks.data_module": "trainer.checkpoints.restore trainer.view",
    "tasks.task": """callbacks.callback callbacks.checkpoint callbacks.early_stopping callbacks.progress_bar
        trainer.checkpoints.restore trainer.processes.run_in_workers trainer.strategies.bitwise.buffers
        trainer.strategies.servers trainer.strategies.state_dicts trainer.view""",
    "trainer.checkpoints.saver": "trainer.checkpoints.store trainer.view",
    "trainer.optimization.nonfinite": "trainer.optimization.optimization",
    "trainer.optimization.optimization": """trainer.checkpoints.fingerprint trainer.optimization.nonfinite
        trainer.optimization.optimizers""",
    "trainer.optimization.optimizers": "trainer.checkpoints.fingerprint",
    "trainer.processes.environment": "trainer.processes.own_group",
    "trainer.run": "trainer.diagnosis trainer.masked trainer.view",
    "trainer.strategies.pipeline.pipeline": "trainer.strategies.pipeline.batch_run",
    "trainer.strategies.state_dicts": "trainer.checkpoints.restore",
    "trainer.strategies.strategy": """trainer.arguments trainer.checkpoints.contents trainer.optimization.optimization
        trainer.processes.gather trainer.processes.layout_report trainer.processes.watchdog trainer.run trainer.view""",
    "trainer.trainer": """callbacks.callback callbacks.checkpoint callbacks.checkpoint_callback callbacks.early_stopping
        callbacks.monitor callbacks.progress_bar tasks.data_module tasks.task tasks.task_hooks trainer.build
        trainer.checkpoints.contents trainer.checkpoints.convert trainer.checkpoints.restore trainer.checkpoints.saver
        trainer.elastic.membership trainer.hooks trainer.lifecycle trainer.preemption
        trainer.processes.run_in_workers trainer.run""",
}
"""Contracts, and who names each under TYPE_CHECKING although the contract imports it, or something else that does.

Nothing is added to it: a module takes what it needs of the run as arguments, or by a small Protocol of its own.
"""


LISTS = "callbacks", "tasks", "trainer.launchers", "trainer.loggers", "trainer.strategies"
TABLES = {"legato", *(f"legato.{room}" for room in LISTS)}
"""Rooms whose __init__ only lists names, imported when first asked for."""


def reachable(imports, start):
    found, ahead = set(), [start]
    while ahead:
        for module in imports[ahead.pop()] - found:
            found.add(module)
            ahead.append(module)
    return found


@pytest.mark.slow
def test_modules_name_each_other_by_type_only_where_a_contract_is_met():
    whole, at_run_time = (
        {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
        for graph in (
            grimp.build_graph("legato", exclude_type_checking_imports=left_out, cache_dir=None)
            for left_out in (False, True)
        )
    )
    whole |= {name: at_run_time[name] for name in TABLES}
    behind = {name: reachable(whole, name) for name in whole if name != "legato"}
    pairs = {
        (user.removeprefix("legato."), named.removeprefix("legato."))
        for user in behind
        if not user.startswith("legato.compat.")
        for named in whole[user] - at_run_time[user]
        if user in behind[named]
    }
    assert sorted(pairs - {(user, named) for named, users in NAMED_BY_TYPE.items() for user in users.split()}) == []


def test_each_room_has_a_quick_test():
    """What `make quick` leaves out is marked slow, in a file or on a function."""
    quick = set()
    for path in TESTS.glob("*/test_*.py"):
        tree = ast.parse(path.read_text())
        whole = any(isinstance(node, ast.Assign) and ast.unparse(node) == SLOW for node in tree.body)
        tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        marks = [[ast.unparse(one) for one in test.decorator_list] for test in tests]
        if not whole and any("pytest.mark.slow" not in one for one in marks):
            quick.add(path.parent.name)
    assert {path.parent.name for path in TESTS.glob("*/test_*.py")} - quick - {"together"} == set()


SLOW = "pytestmark = pytest.mark.slow"
