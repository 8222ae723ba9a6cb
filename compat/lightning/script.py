"""`legato lightning train.py [arguments]`: a script written for Lightning runs on Legato, unchanged."""

import os
import runpy
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ...base.errors import ConfigError, LegatoError
from .stand_in import install

FROZEN_RUNPY = "<frozen runpy>"
USAGE = "legato lightning SCRIPT.py [arguments], or legato lightning -m MODULE [arguments]"
HELP = f"""usage: {USAGE}

Runs a program that was written for PyTorch Lightning, unchanged: in it, and in every process that it starts, lightning,
lightning.pytorch and pytorch_lightning mean Legato. The arguments are the program's. What differs:
docs/from-lightning.md."""


def run_lightning(arguments: Sequence[str]) -> None:
    """Run a script, or with `-m` a module, in which `lightning` and `pytorch_lightning` mean Legato.

    Raises ConfigError if there is no such script.
    """
    words = list(arguments)
    as_module = words[:1] == ["-m"]
    if as_module:
        words.pop(0)
    if not as_module and words[:1] in (["--help"], ["-h"]):
        print(HELP)
        return
    if not words:
        raise ConfigError(f"Which script? {USAGE}")
    if not as_module and not Path(words[0]).is_file():
        raise ConfigError(f"There is no script {words[0]}. {USAGE}")
    install()
    sys.argv = words
    # python -m puts the current folder first, which python SCRIPT does not
    sys.path[:] = [path for path in sys.path if path != ""]
    sys.path.insert(0, os.getcwd() if as_module else str(Path(words[0]).resolve().parent))
    try:
        if as_module:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.abspath(words[0]), run_name="__main__")  # so that `__file__` is what Python makes it
    except Exception as error:
        # a script's user expects Python's own report, from the first line of the script on
        traceback = _from_script(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        if told := of_legato(error, words):
            print(told, file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _from_script(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that led to the script."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in (__file__, runpy.__file__, FROZEN_RUNPY):
        traceback = traceback.tb_next
    return traceback


def of_legato(error: BaseException, words: Sequence[str]) -> str:
    """Return what to do about an error within Legato that it does not raise on purpose; "" for others."""
    own, installed = str(Path(__file__).parents[2]) + os.sep, tuple(sysconfig.get_paths().values())
    frames = traceback.extract_tb(error.__traceback__)
    there = [frame for frame in frames if frame.filename.startswith(own) or not frame.filename.startswith(installed)]
    last = there[-1] if there else None
    if isinstance(error, LegatoError) or last is None or not last.filename.startswith(own):
        return ""
    if (last.line or "").startswith("raise"):  # in words that say what to do
        return ""
    place = f"{Path(last.filename).relative_to(own)}:{last.lineno}"
    return (
        f"legato: this error arose within Legato ({place}), where the program should run as under Lightning. "
        f"`python {' '.join(words)}` runs it under Lightning itself; docs/from-lightning.md says what differs. Please "
        f"report it with the lines above."
    )
