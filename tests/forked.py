"""Programs that start in 20 ms, not in 3 s: forked from a server that has torch loaded. Else like subprocess.Popen."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from legato.trainer.processes import environment


class Forked:
    """A function in a process and session of its own; what it and its children print is kept in files.

    An uncaught exception ends it with exit code 1 and a traceback, KeyboardInterrupt too, which a script ends by 130.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        env: Mapping[str, str] = os.environ,
        stderr: str | None = None,
    ) -> None:
        """`stderr`: the name of a terminal in its place."""
        environment.warm_up()
        self.folder = Path(tempfile.mkdtemp())
        streams = [str(self.folder / "stdout"), stderr or str(self.folder / "stderr")]
        given = function, arguments, streams, os.getcwd(), dict(env)
        self.process = multiprocessing.get_context("forkserver").Process(target=_enter, args=given)
        self.process.start()
        self.pid: int = self.process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        return self.process.exitcode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; return what it printed to the standard output and as errors."""
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.process), timeout or 0.0)
        texts = [path.read_text() if path.exists() else "" for path in (self.folder / "stdout", self.folder / "stderr")]
        return texts[0], texts[1]


def run_source(source: str, *arguments: str) -> None:
    """Run the text of a script, in which warnings are errors."""
    warnings.simplefilter("error")
    sys.argv = ["script", *arguments]
    exec(compile(source, "script", "exec"), {"__name__": "__main__"})


def run_module(name: str, *arguments: str) -> None:
    """Run a module as `python -m` does."""
    sys.argv = [name, *arguments]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _enter(
    function: Callable[..., Any], arguments: tuple[Any, ...], streams: list[str], cwd: str, env: dict[str, str]
) -> None:
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # as a script has it; else loaders took the server's method
    for number, path in enumerate(streams, 1):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    function(*arguments)
