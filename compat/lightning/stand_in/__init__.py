"""The folder that `install()` puts at the front of the import path so that `import lightning` imports Legato.

The folder contains packages named `lightning`, `pytorch_lightning` and `lightning_fabric`. When one of them is
imported, it registers the modules of `legato.compat.lightning` under its name.
"""

import sys
from importlib import import_module
from pathlib import Path

from ....base.environment import lead_python_path
from ....base.errors import ConfigError

FOLDER = str(Path(__file__).parent)
ROOT = __name__.rpartition(".")[0]
STANDS_FOR = {"lightning": ROOT, "pytorch_lightning": f"{ROOT}.pytorch", "lightning_fabric": f"{ROOT}.fabric"}


def register_name(top: str) -> None:
    """Register Legato's modules in sys.modules under the corresponding names in the package `top`."""
    trees = [f"{ROOT}.pytorch", f"{ROOT}.fabric"]
    for tree in trees:
        import_module(tree)
    package = STANDS_FOR[top]
    for name, module in list(sys.modules.items()):
        in_a_tree = name == ROOT or any(f"{name}.".startswith(f"{tree}.") for tree in trees)
        if in_a_tree and f"{name}.".startswith(f"{package}."):
            sys.modules[top + name.removeprefix(package)] = module


def install() -> None:
    """Make `lightning`, `pytorch_lightning` and `lightning_fabric` import this package, including in child processes.

    Raises ConfigError if Lightning itself has already been imported.
    """
    for top, real in STANDS_FOR.items():
        module = sys.modules.get(top)
        if module is not None and module.__name__ != real:
            raise ConfigError(
                f"{top} is already imported from {getattr(module, '__file__', None)}. Call "
                f"legato.compat.lightning.install() before the first import of {top}."
            )
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    lead_python_path(FOLDER)
