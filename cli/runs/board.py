"""`legato board`: TensorBoard for the runs below a folder, on a free port that only this machine reaches."""

import threading
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...base.environment import get_variable, set_variable
from ...base.errors import ConfigError
from ...base.messages import STDOUT
from ...trainer.processes.signals import handling_end_signals
from ...trainer.runs.directory import find_runs


def run_board(arguments: Namespace) -> None:
    """Serve the runs until Ctrl-C. Raises ConfigError if the folder is none, or the port is taken."""
    find_runs(Path(arguments.dir))
    with handling_end_signals(_interrupt), suppress(KeyboardInterrupt):
        url = serve(arguments.dir, arguments.port)
        print(f"TensorBoard  {url}  (Ctrl-C ends it)", file=STDOUT, flush=True)
        threading.Event().wait()


def _interrupt(number: int) -> None:
    """End as Ctrl-C does, so that TensorBoard's own processes end, too."""
    raise KeyboardInterrupt


def serve(folder: str, port: int) -> str:
    """Start TensorBoard in this process; return its address. Raises ConfigError if the port is taken."""
    from tensorboard import default, program

    if get_variable("TF_CPP_MIN_LOG_LEVEL") is None:
        set_variable("TF_CPP_MIN_LOG_LEVEL", "3")
    board: Any = program.TensorBoard(default.get_plugins())
    options = ["--logdir", folder, "--host", "127.0.0.1", "--port", str(port), "--reload_multifile", "true"]
    # In this process, where its server would be one more that has to be ended.
    board.configure(argv=["tensorboard", *options, "--load_fast", "false"])
    try:
        url: str = board.launch()
    except program.TensorBoardServerException as error:
        raise ConfigError(f"TensorBoard did not start: {' '.join(str(error).split())}") from error
    return url
