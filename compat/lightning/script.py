"""`legato lightning train.py [arguments]`: runs an unchanged Lightning script on Legato."""

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

Runs a program written for PyTorch Lightning without changes. In the program and all processes it
starts, lightning, lightning.pytorch and pytorch_lightning import Legato. The arguments are passed to the program. For
differences from Lightning, see docs/from-lightning.md."""


def run_lightning(arguments: Sequence[str]) -> None:
    """Run a script or, with `-m`, a module, using Legato in place of `lightning` and `pytorch_lightning`.

    Raises ConfigError if the script does not exist.
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
        raise ConfigError(f"The script {words[0]} does not exist. {USAGE}")
    install()
    sys.argv = words
    # python -m puts the current folder first, unlike python SCRIPT
    sys.path[:] = [path for path in sys.path if path != ""]
    sys.path.insert(0, os.getcwd() if as_module else str(Path(words[0]).resolve().parent))
    try:
        if as_module:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.abspath(words[0]), run_name="__main__")  # Python also makes `__file__` absolute
    except Exception as error:
        # users expect Python's traceback, starting in their script
        traceback = _from_script(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        if advice := advice_for(error, words):
            print(advice, file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _from_script(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that starts in the script."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in (__file__, runpy.__file__, FROZEN_RUNPY):
        traceback = traceback.tb_next
    return traceback


def advice_for(error: BaseException, words: Sequence[str]) -> str:
    """Return advice if an unexpected error occurred within Legato, or an empty string for any other error."""
    home, installed = str(Path(__file__).parents[2]) + os.sep, tuple(sysconfig.get_paths().values())
    frames = traceback.extract_tb(error.__traceback__)
    calls = [frame for frame in frames if frame.filename.startswith(home) or not frame.filename.startswith(installed)]
    last = calls[-1] if calls else None
    if isinstance(error, LegatoError) or last is None or not last.filename.startswith(home):
        return ""
    if (last.line or "").startswith("raise"):  # the message already contains advice
        return ""
    place = f"{Path(last.filename).relative_to(home)}:{last.lineno}"
    return (
        f"legato: this error occurred within Legato ({place}). The program should run as it does with Lightning: "
        f"`python {' '.join(words)}`. docs/from-lightning.md lists known differences. Please report the error with the "
        "lines above."
    )
