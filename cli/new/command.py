"""`legato new NAME`: writes a project with a task, data, a callback, configs and a test. No torch."""

import keyword
import re
import shlex
import sys
from argparse import Namespace
from pathlib import Path

from ...base.errors import ConfigError
from ...base.run_names import path_problem, require_local

PROJECT = Path(__file__).resolve().parent / "project"
"""The files of a project; `__NAME__` in their names and texts is replaced by the name of its package."""
PLACEHOLDER, SUFFIX = "__NAME__", ".template"
HIDDEN = {Path("gitignore"): Path(".gitignore")}
"""Files whose names begin with a dot in a project, and would be left out of a package."""
TAKEN = {"legato", "torch", "numpy", "tests", "configs"}
"""Names that a package of a project cannot have: they mean something else there."""
CONFIG_OF_PROJECT = "configs/train.yaml"


def run_new(options: Namespace) -> None:
    """Run `legato new`."""
    if not options.name.strip():
        raise ConfigError("legato new takes one argument: the name of the project, which becomes a folder here.")
    require_local(options.name, "The project's folder")
    folder = Path(options.name)
    written = write_project(folder)
    print("\n".join(f"  {folder / path}" for path in written))
    enter = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    print(f"\nTrain it:  {enter}legato fit {CONFIG_OF_PROJECT}")
    print("Test it:   python -m pytest")


def write_project(folder: Path) -> list[Path]:
    """Write a project; return its files, relative to `folder`, whose name becomes that of its package.

    Raises ConfigError where the name cannot be a package's, or `folder` is there and not empty.
    """
    called = folder.absolute().name  # that of `.` too
    name = called.replace("-", "_")
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or keyword.iskeyword(name) or name.lower() in TAKEN:
        raise ConfigError(
            f"{called!r} cannot be the name of a project: its package needs a name of letters, digits and "
            f"underscores that begins with a letter and is none of {', '.join(sorted(TAKEN))}."
        )
    if name in sys.stdlib_module_names:
        raise ConfigError(
            f"{called!r} is the name of a module of Python's own, which programs would import instead of the project "
            f"or find the project in place of. Choose another, such as {name}_net."
        )
    # of the longest file in it, since a file system refuses names of more than 255 bytes
    if (problem := path_problem(str(folder / f"{called}{SUFFIX}"))) is not None:
        raise ConfigError(f"The project's name {problem}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already, and nothing in it is replaced. Choose another name.")
    written = []
    for source in sorted(path for path in PROJECT.rglob(f"*{SUFFIX}") if path.is_file()):
        path = Path(str(source.relative_to(PROJECT)).removesuffix(SUFFIX).replace(PLACEHOLDER, name))
        path = HIDDEN.get(path, path)
        try:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text(encoding="utf-8").replace(PLACEHOLDER, name)
            (folder / path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{folder / path} could not be written: {error.strerror or error}.") from error
        written.append(path)
    return written
