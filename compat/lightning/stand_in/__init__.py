"""`import lightning` means Legato: the folder that goes to the front of the path of a program and its processes.

In it lie packages named `lightning`, `pytorch_lightning` and `lightning_fabric`. Each, when it is imported, puts the
module of `legato.compat.lightning` in its place.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from ....base.errors import ConfigError
from ....trainer.processes.environment import lead_python_path
from ..file_functions import take_files

FOLDER = str(Path(__file__).parent)
ROOT = __name__.rpartition(".")[0]
STANDS_FOR = {"lightning": ROOT, "pytorch_lightning": f"{ROOT}.pytorch", "lightning_fabric": f"{ROOT}.fabric"}


DEMOS = "pytorch.demos"
"""Lightning's demonstrations are programs for it, and stay what they are where it is installed."""


class Aliases(MetaPathFinder, Loader):
    """Finds `lightning.x` as the module `legato.compat.lightning.x` itself, not as a second copy."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of Lightning's, else None."""
        top, _, below = fullname.partition(".")
        if top not in STANDS_FOR:
            return None
        real = f"{STANDS_FOR[top]}.{below}" if below else STANDS_FOR[top]
        if real.startswith(f"{ROOT}.{DEMOS}"):
            return _find_demo(fullname, real.removeprefix(f"{ROOT}."))
        try:
            module = import_module(real)
        except ModuleNotFoundError as error:
            if error.name != real:
                raise
            return None
        return ModuleSpec(
            fullname, self, is_package=hasattr(module, "__path__"), loader_state=(module, module.__spec__)
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of Legato for this name."""
        module: ModuleType = spec.loader_state[0]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import system has replaced by the alias."""
        spec = module.__spec__
        if spec is not None and isinstance(spec.loader, Aliases):
            module.__spec__ = spec.loader_state[1]


def _find_demo(fullname: str, below: str) -> ModuleSpec | None:
    """Return the spec of one of Lightning's demonstrations, read from the installed package as any user's module."""
    installed = PathFinder.find_spec("lightning", [path for path in sys.path if path != FOLDER])
    for folder in (installed and installed.submodule_search_locations) or ():
        file = Path(folder, *below.split("."))
        if file.is_dir():
            return spec_from_file_location(fullname, file / "__init__.py", submodule_search_locations=[str(file)])
        if file.with_suffix(".py").is_file():
            return spec_from_file_location(fullname, file.with_suffix(".py"))
    return None


def install() -> None:
    """Let `lightning`, `pytorch_lightning` and `lightning_fabric` mean this package, also in processes started later.

    Functions for files take checkpoints as files from now on; see file_functions.py.

    Raises ConfigError if the real Lightning has been imported already.
    """
    for top, real in STANDS_FOR.items():
        module = sys.modules.get(top)
        if module is not None and module.__name__ != real:
            raise ConfigError(
                f"{top} is imported already, from {getattr(module, '__file__', None)}. Call "
                f"legato.compat.lightning.install() before the first import of it."
            )
    if not any(isinstance(finder, Aliases) for finder in sys.meta_path):
        sys.meta_path.insert(0, Aliases())
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    lead_python_path(FOLDER)
    take_files()
    _share_rank()


def is_installed() -> bool:
    """Return whether this process, or the one that started it, has called `install`."""
    return FOLDER in sys.path


def _share_rank() -> None:
    """Give lightning_utilities this process's rank, as importing Lightning does: loggers ask for it there."""
    try:
        from lightning_utilities.core import rank_zero
    except ImportError:
        return
    rank_zero.rank_zero_only = import_module(f"{ROOT}.rank_zero").rank_zero_only


if is_installed():  # in a process that the program has started, which may never import Lightning by name
    take_files()
