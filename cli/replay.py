"""`legato replay`: reads the options, replays, and prints what the steps came to, with the proof."""

import sys
from argparse import Namespace
from bdb import BdbQuit
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import ConfigError, DataError
from ..base.messages import STDERR, STDOUT
from ..base.run_names import require_local
from ..callbacks.callback import Callback
from ..lab.history import RunHistory
from ..lab.origin import differences
from ..lab.replay import Replayed, conclude, new_directory, replay_steps, require_outside
from ..lab.samples import SampleLookup, shown_samples
from ..lab.watchers import DebugStep, StepReport, StopAfterStep
from ..trainer.checkpoints.find import directory_name
from .arguments import read_words

SHOWN_MODULES = 5


@dataclass(frozen=True)
class ReplayArguments:
    """What to replay."""

    run: str
    first: int
    last: int
    debug: bool = False
    replica: int | None = None
    save: Path | None = None
    hindsight: bool = False
    """Whether a range of steps was asked for, whose points are kept beside the run, rather than a step."""


def read_options(options: Namespace) -> tuple[ReplayArguments, list[str]]:
    """Return what to replay, and overrides of the config. Raises ConfigError for other words."""
    for word in options.words:
        if word.partition("=")[0] in ("into", "jobs", "devices"):
            raise ConfigError(f"{word}: a replay runs in one process, into a new folder beside the run's.")
    flags = [f"{name}={text}" for name in ("until", "save") if (text := getattr(options, name)) is not None]
    values, overrides = read_words([*options.words, *flags], ("step", "until", "replica"), ("steps", "save"))
    if ("step" in values) == ("steps" in values):
        raise ConfigError("legato replay takes a run directory and one of step=N and steps=A..B: RUN step=1234.")
    first, _, last = values.get("steps", values.get("step", "")).partition("..")
    last = last or values.get("until", first)
    if "steps" in values and not (first.isdecimal() and last.isdecimal() and ".." in values["steps"]):
        raise ConfigError(f"steps={values['steps']}: expected a range, such as steps=1000..2000.")
    if not 1 <= int(first) <= int(last):
        raise ConfigError(f"Steps count from 1, and the last one is not before the first; got {first} to {last}.")
    save = None
    if "save" in values:
        require_local(values["save"], "save=")
        save = Path(values["save"]).absolute()
    replica = int(values["replica"]) if "replica" in values else None
    return ReplayArguments(
        options.run, int(first), int(last), options.debug, replica, save, "steps" in values
    ), overrides


def run_replay(namespace: Namespace) -> None:
    """Run `legato replay`."""
    options, overrides = read_options(namespace)
    if options.save is not None:
        require_outside(options.save)
    history = RunHistory.at(options.run)
    for line in differences(history.directory, options.first):
        print(f"legato: {line}", file=STDERR, flush=True)
    directory = new_directory(history.directory)
    watchers: list[Callback] = [StepReport(options.first, options.last)]
    if options.debug:
        watchers.append(DebugStep(options.first, options.replica))
    save = None if options.save is None else options.save / directory_name(options.last)
    watchers.append(StopAfterStep(options.last, save))
    steps, every_step = (options.first, options.last), not options.hindsight
    try:
        replayed = replay_steps(history, *steps, directory, watchers, overrides, every_step=every_step)
    except BdbQuit:
        print("The debugger was left; the replay ends here.", file=STDOUT, flush=True)
        return
    if options.hindsight:
        done = f"Replayed steps {replayed.first:,} to {replayed.last:,} of {history.directory}"
        print(f"{done}\nLook at it  tensorboard --logdir {history.directory.parent}", file=STDOUT)
    else:
        print("\n".join(described(history, replayed, options)), file=STDOUT)
    if save is not None:
        print(f"Checkpoint  {save}", file=STDOUT)
    print(f"Replay      {directory}", file=STDOUT)
    conclude(replayed.comparison())


def described(history: RunHistory, replayed: Replayed, options: ReplayArguments) -> Iterator[str]:
    """Yield the lines that tell what the steps came to, and which samples they had."""
    origin = f"the checkpoint of step {replayed.source.step:,}" if replayed.source else "the start of the run"
    yield f"Replayed steps {replayed.first:,} to {options.last:,} of {history.directory}, from {origin}"
    lookup = SampleLookup(history)
    for record in replayed.steps():
        rates = ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(record["learning_rates"]))
        loss = "none" if record["loss"] is None else f"{record['loss']:.9g}"
        norm = f"{record['gradient_norm']:.6g}"
        yield f"Step {record['step']:,}: loss {loss}, gradient norm {norm}, learning rate {rates}"
        largest = sorted(record["modules"].items(), key=lambda item: -item[1])[:SHOWN_MODULES]
        shown = (f"{name or 'the task'} {norm:.4g}" for name, norm in largest)
        yield f"  largest gradients: {', '.join(shown)}"
        try:
            place, step = lookup.place(record["step"]), lookup.at(record["step"])
            yield from list(shown_samples(history.directory, place, step, options.replica))[1:]
        except DataError as error:
            yield f"  samples: {error}"
    sys.stdout.flush()
