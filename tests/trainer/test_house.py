"""Rules for all of the code: tests lie in the folders of their subjects, and the architecture map names real files."""

import re
from pathlib import Path

import pytest

import legato as lg
from legato.base.arguments import ARGUMENT_NAMES

PACKAGE = Path(lg.__file__).resolve().parent
TESTS = Path(__file__).resolve().parents[1]
ROOMS = ("base", "callbacks", "cli", "compat", "lab", "loggers", "tasks", "trainer")
MODULES = [path for top in ROOMS for path in sorted((PACKAGE / top).rglob("*.py"))]


def test_no_test_lies_outside_of_a_room():
    assert sorted(path.name for path in TESTS.glob("test_*.py")) == []


def test_the_trainer_has_no_flag_for_a_subclass():
    """What two users of a class need differently is a method, or an argument of a public function."""
    values = {name: value for kind in lg.Trainer.__mro__ for name, value in vars(kind).items()}
    assert [name for name, value in values.items() if isinstance(value, bool) and name not in ARGUMENT_NAMES] == []


@pytest.mark.parametrize("document", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_map_names_files_that_are_there(document):
    named = set(re.findall(rf"`((?:{'|'.join(ROOMS)}|tests|docs)/[\w/.]*)`", (PACKAGE / document).read_text()))
    wanted = {name for name in named if "NAME" not in name and "ROOM" not in name and name != "tests/__init__.py"}
    assert wanted
    assert [name for name in sorted(wanted) if not (PACKAGE / name).exists()] == []


def test_each_room_is_on_the_map():
    text = (PACKAGE / "docs" / "architecture.md").read_text()
    rooms = {f"{path.parent.relative_to(PACKAGE)}/" for path in MODULES if path.parent.parent.name != "strategies"}
    assert [room for room in sorted(rooms) if room not in text and not room.startswith(("cli/", "compat/"))] == []


def test_the_tests_that_hold_the_promises_are_there():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (PACKAGE / "docs" / "dev" / "promises.md").read_text())
    assert len(named) > 40
    assert [f"{path}::{name}" for path, name in named if f"def {name}(" not in (PACKAGE / path).read_text()] == []
