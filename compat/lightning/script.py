"""`legato lightning train.py [arguments]`: a script written for Lightning runs on Legato, unchanged."""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ...trainer.errors import ConfigError
from ...trainer.messages import STDERR
from .stand_in import install
from .tree import resolved

USAGE = "legato lightning SCRIPT.py [arguments], or legato lightning -m MODULE [arguments]"


def run_lightning(arguments: Sequence[str]) -> None:
    """Run a script, or with `-m` a module, in which `lightning` and `pytorch_lightning` mean Legato.

    Raises ConfigError if there is no such script.
    """
    words = list(arguments)
    as_module = words[:1] == ["-m"]
    if as_module:
        words.pop(0)
    if not words:
        raise ConfigError(f"Which script? {USAGE}")
    if not as_module and not Path(words[0]).is_file():
        raise ConfigError(f"There is no script {words[0]}. {USAGE}")
    install()
    sys.argv = words
    sys.path[:] = [path for path in sys.path if path != ""]
    try:
        if as_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        print(summary(), file=STDERR, flush=True)


def summary() -> str:
    """Return a line that says which names of Lightning the program used, and which of them differ."""
    names = sorted({path.rpartition(".")[2] for path in resolved})
    differ = sorted({path.rpartition(".")[2] for path, entry in resolved.items() if entry.text and entry.home})
    told = f"legato: {', '.join(names) if names else 'nothing'} of Lightning stood for Legato's"
    return told + (f"; different: {', '.join(differ)} (docs/from-lightning.md)." if differ else ".")
