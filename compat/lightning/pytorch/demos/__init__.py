"""Lightning's demos, imported from the Lightning package if it is installed."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from legato.compat.lightning.stand_in import FOLDER

_installed = PathFinder.find_spec("lightning", [path for path in sys.path if path != FOLDER])
_folders = (_installed and _installed.submodule_search_locations) or ()
__path__ = [str(Path(folder, "pytorch", "demos")) for folder in _folders]
