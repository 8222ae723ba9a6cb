"""`legato new NAME`: creates a project with a task, data, a callback, configs and a test, without importing torch."""

import keyword
import re
import shlex
import sys
from argparse import Namespace
from pathlib import Path

from ...base.errors import ConfigError
from ...base.run_names import path_problem, require_local

PROJECT = Path(__file__).resolve().parent / "project"
"""Template files of a project. The package's name replaces `__NAME__` in file names and contents."""
PLACEHOLDER, SUFFIX = "__NAME__", ".template"
HIDDEN = {Path("gitignore"): Path(".gitignore")}
"""Files whose names get a leading dot in a project. Package builds omit files that start with a dot."""
TAKEN = {"legato", "torch", "numpy", "tests", "configs"}
"""Names that a project cannot have, because it imports or contains modules with these names."""
CONFIG_OF_PROJECT = "configs/train.yaml"


def run_new(options: Namespace) -> None:
    """Run `legato new`."""
    if not options.name.strip():
        raise ConfigError("legato new requires a project name. Example: legato new my_project")
    require_local(options.name, "The project's folder")
    folder = Path(options.name)
    written = write_project(folder)
    print("\n".join(f"  {folder / path}" for path in written))
    enter = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    print(f"\nTrain it:  {enter}legato fit {CONFIG_OF_PROJECT}")
    print("Test it:   python -m pytest")


def write_project(folder: Path) -> list[Path]:
    """Write a project to `folder`, with a package of the same name. Return the files written, relative to `folder`.

    Raises ConfigError if the name is invalid, or if `folder` exists and is not empty.
    """
    folder_name = folder.absolute().name  # also for "."
    name = folder_name.replace("-", "_")
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or keyword.iskeyword(name) or name.lower() in TAKEN:
        raise ConfigError(
            f"{folder_name!r} cannot be a project name. A name must consist of letters, digits and underscores, "
            f"begin with a letter, and differ from {', '.join(sorted(TAKEN))}."
        )
    if name in sys.stdlib_module_names:
        raise ConfigError(
            f"{folder_name!r} is a module in Python's standard library, which the project's package would shadow. "
            f"Choose another name, such as {name}_net."
        )
    # checks the longest file name in the project, since file systems limit names to 255 bytes
    if (problem := path_problem(str(folder / f"{folder_name}{SUFFIX}"))) is not None:
        raise ConfigError(f"The project's name {problem}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} already exists and is not empty. Choose another name.")
    written = []
    for source in sorted(path for path in PROJECT.rglob(f"*{SUFFIX}") if path.is_file()):
        path = Path(str(source.relative_to(PROJECT)).removesuffix(SUFFIX).replace(PLACEHOLDER, name))
        path = HIDDEN.get(path, path)
        try:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text(encoding="utf-8").replace(PLACEHOLDER, name)
            (folder / path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot write {folder / path}: {error.strerror or error}.") from error
        written.append(path)
    return written
