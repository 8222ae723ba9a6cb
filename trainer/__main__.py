"""The command line: `legato fit CONFIG.yaml key=value ...`, and `python -m legato.trainer`, which is the same."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, LegatoError, did_you_mean
from .messages import STDERR, STDOUT

if TYPE_CHECKING:
    from .config.build import ConfiguredRun
    from .config.check import Config
    from .trainer import Trainer

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@dataclass(frozen=True)
class Command:
    """One word after `legato`: what it does, and the function that does it with the arguments that follow."""

    summary: str
    run: Callable[[Sequence[str]], None]


def fit(arguments: Sequence[str]) -> None:
    """Train, and say where the results are."""
    from .processes.signals import exit_at_once, handling_end_signals

    config = _load_config(arguments, "fit")
    with handling_end_signals(exit_at_once):  # but while fit itself attends to signals
        run = _build_run(config)
        run.trainer.fit(run.task, datamodule=run.data, resume=_resume(run))
        if run.trainer.is_global_zero:
            print(summary(run.trainer), file=STDOUT, flush=True)


def validate(arguments: Sequence[str]) -> None:
    """Evaluate on the validation data."""
    _evaluate(arguments, "validate")


def test(arguments: Sequence[str]) -> None:
    """Evaluate on the test data."""
    _evaluate(arguments, "test")


def predict(arguments: Sequence[str]) -> None:
    """Write predictions to the run directory."""
    run = _build_run(_load_config(arguments, "predict"))
    found = run.trainer.predict(run.task, datamodule=run.data, ckpt_path=_weights(run))
    if run.trainer.is_global_zero and found:
        from .commands.predictions import write_predictions

        folder = run.trainer.run_dir or Path(run.trainer.default_root_dir) / run.trainer.run_name
        print(f"Predictions  {write_predictions(found, folder)}", file=STDOUT, flush=True)


def show_config(arguments: Sequence[str]) -> None:
    """Print the resolved config with the origin of each value."""
    from .config.check import load_config

    print(load_config(arguments).text(origins=True), end="")


def check_command(arguments: Sequence[str]) -> None:
    """Try everything that can fail later."""
    from .commands.check.check import run_check

    run_check(arguments)


def plan(arguments: Sequence[str]) -> None:
    """Show what a run would do on any layout, without starting it."""
    from .commands.plan.plan import run_plan

    run_plan(arguments)


def export_command(arguments: Sequence[str]) -> None:
    """Write a checkpoint's weights to one file."""
    from .checkpoints.foreign import run_export

    run_export(arguments)


COMMANDS = {
    "fit": Command("Train the task.", fit),
    "validate": Command("Evaluate it on its validation data.", validate),
    "test": Command("Evaluate it on its test data.", test),
    "predict": Command("Write its predictions for its prediction data.", predict),
    "config": Command("Print the resolved config, with the origin of each value, and stop.", show_config),
    "check": Command("Try a few steps of everything that can fail later, and leave nothing behind.", check_command),
    "plan": Command("Show what would run where: nodes=N devices=N [rank=R step=S epoch=E].", plan),
    "export": Command("Write a checkpoint's weights to one file: CHECKPOINT OUT.safetensors.", export_command),
}
"""Every subcommand. Functions import what they need when they run, so that a mistake does not wait for torch."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for a failed run, 2 for a wrong config, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # A console script starts with its own folder on the path; users' modules are in the current one, as for python -m.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _print_error(error, EXIT_USAGE)
    except LegatoError as error:
        return _print_error(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def summary(trainer: "Trainer") -> str:
    """The end of a fit: final metrics, the run directory, the best checkpoint, and how to look at it."""
    metrics = {name: f"{float(value):.6g}" for name, value in sorted(trainer.callback_metrics.items())}
    rows = [("Metric", "Final value"), *metrics.items()] if metrics else []
    checkpoint = trainer.checkpoint_callback
    best = getattr(checkpoint, "best_model_path", "") if checkpoint is not None else ""
    if trainer.run_dir is not None:
        rows += [("Run directory", str(trainer.run_dir))]
    if best:
        rows += [("Best checkpoint", str(best))]
    if trainer.run_dir is not None:
        rows += [("Look at it", f"tensorboard --logdir {shlex.quote(str(trainer.run_dir))}")]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def usage(command: str | None = None) -> str:
    """The text of `legato --help`, or of `legato COMMAND --help`."""
    if command is None:
        lines = ["legato COMMAND CONFIG.yaml [MORE.yaml ...] [key=value ...]", ""]
        lines += [f"  {name:<10}{one.summary}" for name, one in COMMANDS.items()]
        return "\n".join([*lines, "", "legato COMMAND --help lists every key of a config."])
    from .config.check import launcher_arguments, trainer_arguments
    from .config.read import MOVED, SECTION_OF, SECTIONS, ready_configs
    from .launchers import LAUNCHERS

    ready = ", ".join(ready_configs()) or "none"
    if command == "export":
        return f"legato export CHECKPOINT OUT.safetensors\n\n{COMMANDS[command].summary}"
    lines = [f"legato {command} CONFIG.yaml [MORE.yaml ...] [key=value ...]", "", COMMANDS[command].summary, ""]
    lines += ["Files are merged left to right, then overrides such as trainer.max_epochs=3 and callbacks.NAME=null."]
    lines += [
        "A file may name others to start from: extends: [base.yaml]. ${trainer.max_epochs} stands for that value."
    ]
    lines += [f"Ready configs, found anywhere: {ready}.", "", "Keys of a config:"]
    lines += [f"  {name:<12}{doc}" for name, doc in SECTIONS.items()]
    lines += ["", "Keys under trainer:"]
    for one in trainer_arguments():
        if one.name not in MOVED and one.name not in SECTION_OF:
            lines += [f"  {one}", *(f"      {line}" for line in one.doc.splitlines())]
    for name in LAUNCHERS:
        lines += ["", f"Keys under launcher: with name={name}:"]
        for one in launcher_arguments(name):
            lines += [f"  {one}", *(f"      {line}" for line in one.doc.splitlines())]
    return "\n".join(lines)


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else EXIT_USAGE
    if words[0] == "--version":
        from .. import __version__

        print(f"legato {__version__}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f" The commands are {', '.join(COMMANDS)}."
        raise ConfigError(f"{name!r} is no command.{hint}")
    if {"-h", "--help"} & set(rest):
        print(usage(name))
        return 0
    COMMANDS[name].run(rest)
    return 0


def _load_config(arguments: Sequence[str], command: str) -> "Config":
    """Read the config; where it names a launcher, let that start the command elsewhere, and end here."""
    from .config.check import load_config

    config = load_config(arguments)
    if config.values.get("launcher") is not None:
        from .launchers.launcher import make_launcher

        launcher = make_launcher(config)
        assert launcher is not None
        if config.directory is not None:
            _tie_to_run(config, command)
        sys.exit(launcher.launch(command, config))
    return config


def _tie_to_run(config: "Config", command: str) -> None:
    """Let a run's own config mean that run also where a launcher takes the values elsewhere, and not the file."""
    from .checkpoints.store import newest_checkpoint

    values, run = config.values, _build_run(config)
    if command == "fit" and values["resume"] == "auto":
        newest = newest_checkpoint(Path(run.trainer.default_root_dir), run.trainer.run_name)
        if newest is not None and not newest[0].samefile(config.directory or ""):
            raise ConfigError(
                f"resume=auto with a launcher goes on with the newest run of {run.trainer.run_name!r}, {newest[0]}, "
                f"and not with {config.directory}, whose config this is. Give resume=PATH, or leave the launcher out."
            )
    elif command != "fit" and values["checkpoint"] in (None, "best", "last"):
        values["checkpoint"] = os.path.abspath(_weights(run).weights(run.trainer.checkpoint_callbacks))


def _build_run(config: "Config") -> "ConfiguredRun":
    from .config.build import build_config

    return build_config(config)


def _evaluate(arguments: Sequence[str], stage: str) -> None:
    run = _build_run(_load_config(arguments, stage))
    method: Any = getattr(run.trainer, stage)
    method(run.task, datamodule=run.data, ckpt_path=_weights(run))


def _resume(run: "ConfiguredRun") -> Any:
    """Where fit goes on from: "auto" with a run's own config means that run, else the newest of the name."""
    return run.stored("auto") if run.resume == "auto" and run.directory is not None else run.resume


def _weights(run: "ConfiguredRun") -> Any:
    """The checkpoint to evaluate: without one, the best of the run that is meant; of a fresh task only where asked."""
    if run.checkpoint == "none":
        return None
    return run.stored(run.checkpoint or "") if run.checkpoint in (None, "best", "last") else run.checkpoint


def _print_error(error: LegatoError, code: int) -> int:
    notes: list[str] = getattr(error, "__notes__", [])
    print("\n".join([f"legato: {error}", *notes]), file=STDERR, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
