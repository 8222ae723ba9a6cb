"""Module-level names of the package: one idea each."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


PACKAGE = Path(__file__).parents[2]
ROOMS = ("trainer", "callbacks", "tasks", "configs")

SHARED = {
    "__all__": "Python's list of public names",
    "_HOMES": "the table of names that are imported when first asked for",
    "log": "the logger of the package",
    "T": "a type variable",
    "Value": "a type variable",
    "TaskType": "a type variable for Task, in the class method and the function behind it",
    "DataModuleType": "a type variable for DataModule, likewise",
    "Batch": "what the loader of a ready-made task yields; each task has its own",
    "NEVER": "infinity, for a time that does not come",
    "_END": "the sentinel of an iterator that has ended",
}
"""Names that several modules have, each with the reason."""


def names_of(path: Path) -> set[str]:
    """Return the classes, functions and variables that a module defines, public and private."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


def test_no_two_modules_have_a_name_in_common() -> None:
    modules = defaultdict(list)
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            for name in names_of(path):
                modules[name].append(str(path.relative_to(PACKAGE)))
    homonyms = {name: paths for name, paths in modules.items() if len(paths) > 1}
    assert not {name: paths for name, paths in homonyms.items() if name not in SHARED}
    assert not SHARED.keys() - homonyms.keys(), "no longer shared: take them off the list"
