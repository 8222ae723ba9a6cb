"""Programs that start in 20 ms, not in 3 s: forked from a server that has torch loaded. Else like subprocess.Popen.

So do the Python programs that such a program starts by subprocess: trials of a sweep, torchrun's workers. As a script,
`python forked.py WORDS` is `python WORDS` but for that.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

from legato.trainer.processes.launch import warm_up
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
        warm_up()
        self.folder = Path(tempfile.mkdtemp())
        streams = [str(self.folder / "stdout"), stderr or str(self.folder / "stderr")]
        target_arguments = function, arguments, streams, str(cwd or Path.cwd()), dict(env)
        self.process = multiprocessing.get_context("forkserver").Process(target=_enter, args=target_arguments)
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
        output, errors = process.communicate(timeout)
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)
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
    sys.argv, sys.orig_argv = [name, *arguments], [sys.executable, "-m", name, *arguments]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_program(*words: str) -> None:
    """Run what `python` runs with these words: -c SOURCE, -m MODULE or a script, after it its arguments."""
    first, *rest = map(str, words)
    sys.orig_argv = [sys.executable, first, *rest]  # of which Lightning compatibility mode starts other ranks
    if first == "-m":
        run_module(*rest)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        run_script(first, *rest)


def _enter(
    function: Callable[..., Any], arguments: tuple[Any, ...], streams: list[str], cwd: str, env: dict[str, str]
) -> None:
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # as a script has it; else loaders took the server's method
    _fork_programs()
    for number, path in enumerate(streams, 1):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.exit(_end_code(function, *arguments))


def _fork_programs() -> None:
    util.spawnv_passfds = _start_server
    vars(subprocess)["_fork_exec"] = _start_python


def _end_code(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function as a program; return what it exits with."""
    code: Any = 0
    try:
        function(*arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()  # with no frame of an error alive: as at the end of a script
    return code


_start_program = util.spawnv_passfds


def _start_server(path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Fork the server that workers of this process are forked from; started by itself it would import torch again."""
    if "multiprocessing.forkserver" not in arguments[-1]:
        return _start_program(path, arguments, descriptors)
    if child := _fork():
        return child
    try:
        _shed(descriptors)
        sys.modules.pop("legato.trainer.processes.fork_server", None)  # imported again, it blocks signals here
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def _fork() -> int:
    """Fork, with signals blocked, in the child until `_shed`: Python swallows what a handler raises at a fork."""
    late, handlers = list[int](), {}
    if threading.current_thread() is threading.main_thread():
        for number in END_SIGNALS:  # blocked in this thread, they may still reach another one, for which this one acts
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, lambda number, frame: late.append(number))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which are not in the child
        before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        child = os.fork()
    if child:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in late:
            os.kill(os.getpid(), number)
    return child


def _shed(descriptors: Iterable[int]) -> None:
    """Close all other files but the standard ones and give up signal handlers, in a child: as exec does."""
    last = 2
    for descriptor in [*sorted(descriptors), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(last + 1, descriptor)
        last = descriptor
    signal.set_wakeup_fd(-1)
    for number in END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)


_fork_exec = getattr(subprocess, "_fork_exec", None)  # since Python 3.11


def _start_python(*arguments: Any) -> int:
    """Fork where subprocess.Popen starts Python, which would import torch again."""
    command, _, _, kept, cwd, environment, *streams, _, _, _, session = arguments[:16]
    words = [os.fsdecode(word) for word in command]
    settings = list(takewhile(lambda word: "=" in word, words[1:])) if words[0] == "env" else []
    if settings:  # as a sweep gives devices to its trials
        del words[: 1 + len(settings)]
    while words[1:2] == ["-u"]:
        del words[1]
    plain = arguments[16] == -1 and len(kept) == 1  # no process group, pass_fds
    if words[:1] != [sys.executable] or words[1:2] in ([], ["-X"], ["-W"]) or not plain:
        return int(_fork_exec(*arguments))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if child := _fork():
        return child
    try:
        for target, source in enumerate(streams[number] for number in (0, 3, 5)):
            if source not in (-1, target):
                os.dup2(source, target)
        _shed(())
        if session:
            os.setsid()
        if cwd is not None:
            os.chdir(cwd)
        if environment is not None:
            os.environb.clear()
            os.environb.update(pair.split(b"=", 1) for pair in environment)
        os.environ.update(setting.split("=", 1) for setting in settings)
        if callable(arguments[-2]):  # preexec_fn
            arguments[-2]()
        sys.stdin = os.fdopen(0, closefd=False)
        atexit._clear()
        util._finalizer_registry.clear()
        atexit.register(util._exit_function)
        resource_tracker._resource_tracker._fd = forkserver._forkserver._forkserver_pid = None
        code = _end_code(run_program, *words[1:])
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if isinstance(code, str):
            print(code, file=sys.stderr, flush=True)
        os._exit(code if isinstance(code, int) else int(code is not None))
    finally:
        os._exit(1)


if __name__ == "__main__":
    import legato.trainer.strategies.ddp
    import legato.trainer.trainer  # noqa: F401

    _fork_programs()
    run_program(*sys.argv[1:])
