"""The command line: `legato fit CONFIG.yaml key=value ...`, and `python -m legato`, which is the same."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..base.errors import ConfigError, LegatoError, did_you_mean
from ..base.messages import STDERR
from .command_line import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, Argument, Command

STATES = ["running", "done", "failed", "preempted", "unknown"]
A_RUN = "a run directory, or a name below runs/, such as digits for its newest run"
TRAINING, CONFIGS, ON_DISK = "training and evaluation", "configs", "runs on disk"
COMMANDS = {
    "new": Command(
        "Write a small project that trains at once: NAME.",
        ".new.command",
        "run_new",
        usage="NAME",
        own_keys={"NAME": "The folder to write, whose name becomes that of the project's package."},
        about=TRAINING,
    ),
    "fit": Command("Train the task.", ".fit", "run_fit", without=["checkpoint"], about=TRAINING, logs=True),
    "validate": Command(
        "Evaluate it on its validation data.",
        ".evaluate",
        "run_validate",
        without=["resume"],
        about=TRAINING,
        logs=True,
    ),
    "test": Command(
        "Evaluate it on its test data.", ".evaluate", "run_test", without=["resume"], about=TRAINING, logs=True
    ),
    "predict": Command(
        "Write its predictions for its prediction data.",
        ".evaluate",
        "run_predict",
        without=["resume"],
        about=TRAINING,
        logs=True,
    ),
    "config": Command(
        "Print the resolved config, with the origin of each value, and stop.",
        ".show_config",
        "show_config",
        about=CONFIGS,
        logs=True,
    ),
    "sweep": Command(
        "Run a config with many values, and show which are best; the same command again goes on.",
        ".sweep",
        "run_sweep",
        arguments=[
            Argument(
                "words",
                metavar="WORD",
                nargs="*",
                help="CONFIG.yaml and key=value, as for fit; key=VALUES is tried with each: "
                "1e-4,1e-3 or range(32,129,32) or log(1e-5,1e-2) or uniform(0,1)",
            ),
            Argument("--random", type=int, metavar="N", help="N trials with random values"),
            Argument("--optuna", type=int, metavar="N", help="N trials with values that Optuna chooses"),
            Argument("--jobs", type=int, default=1, metavar="N", help="trials at a time (1), each with its GPUs"),
            Argument("--metric", metavar="NAME", help="what is compared (what a callback monitors)"),
            Argument("--mode", choices=("min", "max"), help="whether less or more of it is better"),
        ],
        more="legato sweep digits.yaml task.lr=1e-3,1e-2 task.channels=range(8,33,8) --jobs 2",
        about=TRAINING,
        logs=True,
    ),
    "check": Command(
        "Run a few steps of every stage to find what would fail later.",
        ".check.check",
        "run_check",
        about=CONFIGS,
        logs=True,
    ),
    "plan": Command(
        "Show how a run would be laid out, and what each process would hold.",
        ".plan",
        "run_plan",
        arguments=[
            Argument("words", metavar="WORD", nargs="*", help="CONFIG.yaml and key=value, as for fit"),
            Argument("--memory", metavar="SIZE", help="tell whether it fits into a device of 80GB"),
        ],
        about=CONFIGS,
        logs=True,
    ),
    "samples": Command(
        "Tell which samples a step of a run had: RUN step=N [replica=R] [--show]; or when: RUN index=N.",
        "..lab.samples",
        "run_samples",
        usage="RUN step=N [replica=R] [--show] [key=value ...], or RUN index=N [until=N]",
        own_keys={
            "RUN": "A run directory.",
            "step=N": "Which samples this optimizer step had.",
            "replica=R": "Of this replica only.",
            "--show": "The batches, too, loaded again.",
            "index=N": "In which steps this sample was seen.",
            "until=N": "Up to this step.",
            "key=value": "Overrides of the run's config.",
        },
        about=ON_DISK,
        logs=True,
    ),
    "replay": Command(
        "Compute steps of a run again: RUN step=N [until=M] [--debug] [save=DIR]; RUN steps=A..B callbacks.NAME...",
        ".replay",
        "run_replay",
        usage="RUN step=N [until=M] [--debug] [save=DIR], or RUN steps=A..B callbacks.NAME=...",
        own_keys={
            "RUN": "A run directory.",
            "step=N, until=M": "The first and the last step to compute again.",
            "steps=A..B": "A range of steps, whose points are kept beside the run.",
            "replica=R": "Tell of this replica only.",
            "--debug": "Stop in pdb within the step.",
            "save=DIR": "Where to write a checkpoint of the end.",
            "key=value": "Overrides of the run's config.",
        },
        about=ON_DISK,
        logs=True,
    ),
    "export": Command(
        "Write a checkpoint to one file: its weights (x.safetensors), or its model (x.onnx, x.pt2).",
        ".export",
        "run_export",
        arguments=[
            Argument("checkpoint", metavar="CHECKPOINT", help=f"a checkpoint, or the newest one of {A_RUN}"),
            Argument("out", metavar="OUT", help="the file to write: x.safetensors, x.onnx or x.pt2"),
            Argument(
                "config",
                metavar="CONFIG",
                nargs="*",
                default=[],
                help="config and overrides of the model (the run's own)",
            ),
        ],
        more=(
            "A model is the task's forward, with example_input_array as its input, or the inputs of the data's first\n"
            "batch; its first dimension may vary. The file is loaded again, and its outputs compared with the task's."
        ),
        about=ON_DISK,
        logs=True,
    ),
    "convert": Command(
        "Write a checkpoint as Lightning's file, or the reverse: CHECKPOINT OUT.ckpt, or FILE.ckpt DIRECTORY.",
        ".convert",
        "run_convert",
        arguments=[
            Argument("source", metavar="SOURCE", help=f"x.ckpt, a checkpoint, or the newest one of {A_RUN}"),
            Argument("target", metavar="TARGET", help="the file of Lightning's to write, x.ckpt; or the checkpoint"),
        ],
        about=ON_DISK,
    ),
    "runs": Command(
        "List runs: state, step, best value, duration, and by what they differ.",
        ".runs.runs",
        "run_runs",
        arguments=[
            Argument("dir", metavar="DIR", nargs="?", default="runs", help="the folder with runs below it (runs)"),
            Argument("--all", action="store_true", help="all runs, not the newest 50"),
            Argument("--state", choices=STATES, help="only runs in this state"),
            Argument(
                "--sort",
                choices=["time", "name", "best", "step", "duration"],
                default="time",
                help="order; the newest, best or longest comes last (time)",
            ),
            Argument("--json", action="store_true", help="all of it as JSON, for programs"),
        ],
        about=ON_DISK,
    ),
    "show": Command(
        "Show one run: its state, config, metrics as charts, last error and files.",
        ".runs.show",
        "run_show",
        arguments=[
            Argument("run", metavar="RUN", nargs="?", default="runs", help=f"{A_RUN} (the newest below runs/)"),
            Argument("--metric", metavar="NAME", help="the metric to chart in large (the best one)"),
        ],
        about=ON_DISK,
    ),
    "compare": Command(
        "Compare runs: configs that differ, metrics side by side.",
        ".runs.compare",
        "run_compare",
        arguments=[
            Argument("runs", metavar="RUN", nargs="+", help=f"two or more of these: {A_RUN}"),
            Argument("--bits", action="store_true", help="find the first step and tensor at which two runs differ"),
        ],
        about=ON_DISK,
    ),
    "board": Command(
        "Look at runs in TensorBoard, on a free port of this machine, until Ctrl-C.",
        ".runs.board",
        "run_board",
        arguments=[
            Argument("dir", metavar="DIR", nargs="?", default="runs", help="the folder with runs below it (runs)"),
            Argument("--port", type=int, default=0, metavar="N", help="the port (a free one)"),
        ],
        about=ON_DISK,
    ),
    "clean": Command(
        "Delete empty and failed runs, and old checkpoints; asks before.",
        ".runs.clean",
        "run_clean",
        arguments=[
            Argument("dir", metavar="DIR", nargs="?", default="runs", help="the folder with runs below it (runs)"),
            Argument(
                "--only",
                action="append",
                choices=["empty", "failed", "checkpoints"],
                help="only this kind; may be given again",
            ),
            Argument("--dry-run", action="store_true", help="only list what would be deleted"),
            Argument("--yes", action="store_true", help="delete without a question"),
        ],
        more=(
            "empty: runs without a step, a checkpoint or a logged value; failed: runs that ended with an error;\n"
            "checkpoints: of other runs all but the best and the newest. A run that is under way is left alone."
        ),
        about=ON_DISK,
    ),
    "lightning": Command(
        "Run a script written for PyTorch Lightning, unchanged: SCRIPT.py [arguments].",
        "..compat.lightning.script",
        "run_lightning",
        helps_itself=True,
    ),
    "completion": Command(
        "Print a script that completes commands, keys and values in bash, zsh or fish.",
        ".completion",
        "run_completion",
        arguments=[
            Argument("shell", metavar="SHELL", nargs="?", choices=["bash", "zsh", "fish"], help="bash, zsh or fish"),
            Argument("--line", metavar="LINE", help="print what may complete this line, as the scripts ask"),
        ],
        more='bash: eval "$(legato completion bash)"\nzsh:  eval "$(legato completion zsh)"\n'
        "fish: legato completion fish | source",
    ),
    "help": Command(
        "Explain a key of a config: its type, default and meaning, and where it acts.",
        ".help",
        "run_help",
        arguments=[
            Argument("topic", metavar="KEY", nargs="?", help="a key, a class that a config may name, or a command"),
            Argument(
                "config", metavar="CONFIG", nargs="*", default=[], help="files and overrides whose classes are meant"
            ),
        ],
        more="legato help trainer.accumulate_grad_batches\nlegato help EarlyStopping\nlegato help task.lr digits.yaml",
        about=CONFIGS,
    ),
}

GONE = {
    "tune": "legato tune is gone. Try values of a setting with `legato sweep CONFIG.yaml trainer.threads=1,2 --metric "
    "throughput/samples_per_second --mode max` (docs/how-to/speed.md).",
}
"""Commands that Legato had, and what to do instead."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for a failed run, 2 for a wrong config, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_standard_files()
    try:
        _find_modules_here()
        code = _dispatch(words)
        # here, where a closed pipe is handled: at its exit Python would tell of an ignored exception, and return 120
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _print_error(error, EXIT_USAGE)
    except LegatoError as error:
        return _print_error(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as head, has exited
        # what is still buffered goes nowhere: Python flushes once more at its exit, and would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        _tell_other_ranks(error, EXIT_FAILED)
        raise


def _open_standard_files() -> None:
    """Open the standard files that the program was started without.

    Their numbers would else be those of the next files to be opened, and what a library prints would get into them.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def _find_modules_here() -> None:
    """Put the current folder on the path of modules, as `python -m` does; a console script starts with its own."""
    try:
        here = str(Path.cwd())
    except FileNotFoundError as error:
        raise ConfigError("The current folder is not there any more. Change to one that is.") from error
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help") or words == ["help"]:
        from .help import overview

        print(overview(COMMANDS))
        return 0 if words else EXIT_USAGE
    if words[0] == "--version":
        from ..base.version import __version__

        print(f"legato {__version__}")
        return 0
    name, *rest = words
    if name in GONE:
        raise ConfigError(GONE[name])
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f" The commands are {', '.join(COMMANDS)}."
        raise ConfigError(f"{name!r} is not a command.{hint}")
    asked = rest[0] if name == "help" and rest and rest[0] in COMMANDS else None
    if {"-h", "--help"} & set(rest) and not COMMANDS[name].helps_itself:
        asked = name
    if asked is not None:
        from .help import command_help

        print(command_help(asked, COMMANDS[asked]))
        return 0
    COMMANDS[name].run(name, rest)
    return 0


def _print_error(error: LegatoError, code: int) -> int:
    notes: list[str] = getattr(error, "__notes__", [])
    print("\n".join([f"legato: {error}", *notes]), file=STDERR, flush=True)
    _tell_other_ranks(error, code)
    return code


def _tell_other_ranks(error: Exception, code: int) -> None:
    """Tell the other processes of a launcher of an error that came before this one met them."""
    from ..trainer.processes.environment import tell_failure

    text = str(error) if isinstance(error, LegatoError) else f"{type(error).__name__}: {error}"
    with suppress(LegatoError):
        tell_failure(text, code == EXIT_USAGE)


if __name__ == "__main__":
    sys.exit(main())
