"""Programs that start in 20 ms, not in 3 s: forked from a server that has torch loaded. Else like subprocess.Popen."""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

from legato.trainer.processes import environment
from legato.trainer.processes.signals import END_SIGNALS


class Forked:
    """A function in a process and session of its own; what it and its children print is kept in files.

    An uncaught exception ends it with exit code 1 and a traceback, KeyboardInterrupt too, which a script ends by 130.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        cwd: Path | None = None,
        env: Mapping[str, str] = os.environ,
        stderr: str | None = None,
    ) -> None:
        """`stderr`: the name of a terminal in its place."""
        environment.warm_up()
        self.folder = Path(tempfile.mkdtemp())
        streams = [str(self.folder / "stdout"), stderr or str(self.folder / "stderr")]
        given = function, arguments, streams, str(cwd or Path.cwd()), dict(env)
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

    def kill(self) -> None:
        """Kill it and what it has started, if it still runs."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; return what it printed to the standard output and as errors."""
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.process), timeout or 0.0)
        texts = [path.read_text() if path.exists() else "" for path in (self.folder / "stdout", self.folder / "stderr")]
        return texts[0], texts[1]


def completed(
    function: Callable[..., Any], *arguments: Any, timeout: float = 100, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Call a function in a process of its own and wait for its end. `options` are those of Forked."""
    process = Forked(function, *arguments, **options)
    try:
        said, errors = process.communicate(timeout)
        return subprocess.CompletedProcess(arguments, process.returncode, said, errors)
    finally:
        process.kill()


def run_source(source: str, *arguments: str) -> None:
    """Run the text of a script, in which warnings are errors."""
    warnings.simplefilter("error")
    sys.argv = ["script", *arguments]
    exec(compile(source, "script", "exec"), {"__name__": "__main__"})


def run_script(path: Path | str, *arguments: str) -> None:
    """Run a script as `python` does."""
    sys.argv = [str(path), *map(str, arguments)]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(str(path), run_name="__main__")


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
    util.spawnv_passfds = _start_server
    for number, path in enumerate(streams, 1):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    code: Any = 0
    try:
        function(*arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()  # with no frame of an error alive: as at the end of a script
    sys.exit(code)


_start_program = util.spawnv_passfds


def _start_server(path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Fork the server that workers of this process are forked from; started by itself it would import torch again."""
    if "multiprocessing.forkserver" not in arguments[-1]:
        return _start_program(path, arguments, descriptors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which such a server has none of
        if child := os.fork():
            return child
    try:
        last = 2
        for descriptor in [*sorted(descriptors), os.sysconf("SC_OPEN_MAX")]:
            os.closerange(last + 1, descriptor)
            last = descriptor
        for number in END_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        del sys.modules["legato.trainer.processes.fork_server"]  # imported again, it blocks signals here
        exec(arguments[-1], {})
    finally:
        os._exit(0)
