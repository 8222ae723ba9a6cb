"""`legato board`: TensorBoard for the runs below a folder, on a free port that only this machine reaches."""

import signal
import tempfile
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...messages import STDOUT
from ...processes.environment import get_variable, set_variable
from ...run_directory import find_runs

BOARD_EVENTS = "tensorboard"
"""The folder of event files in a run directory, which is not a part of the run's name."""
LOOK_EVERY = 5.0
"""Seconds between two looks for new runs."""


def run_board(arguments: Namespace) -> None:
    """Serve the runs until Ctrl-C. Raises ConfigError if the folder is none, or the port is taken."""
    root = Path(arguments.dir)
    find_runs(root)
    with tempfile.TemporaryDirectory(prefix="legato-board-") as folder, ended_by_signals():
        # links to event folders alone: TensorBoard would walk through all checkpoints below the runs, and name each run
        # by its folder of events
        links = Path(folder)
        link_runs(root, links)
        url = serve(links, arguments.port)
        print(f"TensorBoard  {url}  (Ctrl-C ends it)", file=STDOUT, flush=True)
        with suppress(KeyboardInterrupt):
            waiting = threading.Event()
            while not waiting.wait(LOOK_EVERY):
                link_runs(root, links)


def link_runs(root: Path, links: Path) -> None:
    """Make a link under each run's name to its event files, in place of those of runs that are gone."""
    wanted = {}
    for run in find_runs(root) if root.is_dir() else ():
        if (run.path / BOARD_EVENTS).is_dir():
            wanted[links / run.name] = (run.path / BOARD_EVENTS).resolve()
    for link, events in wanted.items():
        if not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(events)
    for link in [path for path in links.rglob("*") if path.is_symlink() and path not in wanted]:
        link.unlink()


def serve(links: Path, port: int) -> str:
    """Start TensorBoard in this process; return its address. Raises ConfigError if the port is taken."""
    from tensorboard import default, program

    if get_variable("TF_CPP_MIN_LOG_LEVEL") is None:
        set_variable("TF_CPP_MIN_LOG_LEVEL", "3")
    board: Any = program.TensorBoard(default.get_plugins())
    options = ["--logdir", str(links), "--host", "127.0.0.1", "--port", str(port), "--reload_multifile", "true"]
    # In this process, where its server would be one more that has to be ended.
    board.configure(argv=["tensorboard", *options, "--load_fast", "false"])
    try:
        url: str = board.launch()
    except program.TensorBoardServerException as error:
        raise ConfigError(f"TensorBoard did not start: {' '.join(str(error).split())}") from error
    return url


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this context as Ctrl-C does, so that the links are removed."""

    def end(number: int, _: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
