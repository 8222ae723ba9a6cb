"""`legato replay`: reads the options, replays, and prints what the steps came to, with the proof."""

from argparse import Namespace
from bdb import BdbQuit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, DataError
from ..base.messages import STDERR, STDOUT
from ..base.run_names import require_local
from ..callbacks.callback import Callback
from ..lab.origin import differences
from ..lab.replay import Replayed, new_directory, replay_steps
from ..lab.samples import SampleLookup, shown_samples
from ..lab.watchers import DebugStep, StepReport, StopAfterStep
from ..trainer.checkpoints.find import directory_name
from ..trainer.runs.directory import is_run
from .arguments import read_words
from .history import ConfigHistory

SHOWN_MODULES = 5
GONE = ("into", "jobs", "devices")


def run_replay(options: Namespace) -> None:
    """Run `legato replay`."""
    values, overrides = read_options(options)
    first, last = steps_of(values)
    replica = int(values["replica"]) if "replica" in values else None
    save = None
    if "save" in values:
        require_local(values["save"], "save=")
        require_outside(Path(values["save"]))
        save = Path(values["save"]).absolute() / directory_name(last)
    history = ConfigHistory.at(options.run, overrides)
    for line in differences(history, first):
        print(f"legato: {line}", file=STDERR, flush=True)
    make, directory = history.make(first, last), new_directory(history.directory)
    watchers: list[Callback] = [StepReport(first, last), StopAfterStep(last, save)]
    if options.debug:
        watchers.insert(1, DebugStep(first, replica))
    try:
        replayed = replay_steps(history, make(), (first, last), directory, watchers)
    except BdbQuit:
        print("The debugger was left; the replay ends here.", file=STDOUT, flush=True)
        return
    if "steps" in values:
        print(f"Replayed steps {replayed.first:,} to {last:,} of {history.directory}", file=STDOUT)
        print(f"Look at it  tensorboard --logdir {history.directory.parent}", file=STDOUT)
    else:
        print("\n".join(described(history, replayed, replica)), file=STDOUT)
    if save is not None:
        print(f"Checkpoint  {save}", file=STDOUT)
    print(f"Replay      {directory}", file=STDOUT)
    replayed.comparison().conclude()


def read_options(options: Namespace) -> tuple[dict[str, str], list[str]]:
    """Return what to replay, and overrides of the config. Raises ConfigError for other words."""
    for word in options.words:
        if word.partition("=")[0] in GONE:
            raise ConfigError(f"{word}: a replay runs in one process, into a new folder beside the run's.")
    flags = [f"{name}={text}" for name in ("until", "save") if (text := getattr(options, name)) is not None]
    return read_words([*options.words, *flags], ("step", "until", "replica"), ("steps", "save"))


def steps_of(values: dict[str, str]) -> tuple[int, int]:
    """Return the first and the last step to replay: step=N until=M, or steps=A..B."""
    if ("step" in values) == ("steps" in values):
        raise ConfigError("legato replay takes a run directory and one of step=N and steps=A..B: RUN step=1234.")
    first, dots, last = values.get("steps", values.get("step", "")).partition("..")
    if "steps" in values and not (first.isdecimal() and last.isdecimal() and dots):
        raise ConfigError(f"steps={values['steps']}: expected a range, such as steps=1000..2000.")
    last = last or values.get("until", first)
    if not 1 <= int(first) <= int(last):
        raise ConfigError(f"Steps count from 1, and the last one is not before the first; got {first} to {last}.")
    return int(first), int(last)


def require_outside(folder: Path) -> None:
    """Raise ConfigError for a folder inside of a run directory, whose files a replay would replace."""
    inside = next((path for path in (folder.resolve(), *folder.resolve().parents) if is_run(path)), None)
    if inside is not None:
        raise ConfigError(
            f"save={folder} is inside of the run directory {inside}, which a replay does not change. Name a folder "
            f"elsewhere, or leave save= out."
        )


def described(history: ConfigHistory, replayed: Replayed, replica: int | None) -> Iterator[str]:
    """Yield the lines that tell what the steps came to, and which samples they had."""
    origin = f"the checkpoint of step {replayed.source.step:,}" if replayed.source else "the start of the run"
    yield f"Replayed steps {replayed.first:,} to {replayed.last:,} of {history.directory}, from {origin}"
    lookup = SampleLookup(history, history.unstarted)
    for record in replayed.steps():
        yield described_step(record)
        largest = sorted(record["modules"].items(), key=lambda item: -item[1])[:SHOWN_MODULES]
        norms = (f"{name or 'the task'} {norm:.4g}" for name, norm in largest)
        yield f"  largest gradients: {', '.join(norms)}"
        try:
            place, step = lookup.place(record["step"]), lookup.at(record["step"])
            yield from list(shown_samples(history.directory, place, step, replica))[1:]
        except DataError as error:
            yield f"  samples: {error}"


def described_step(record: dict[str, Any]) -> str:
    """Return loss, gradient norm and learning rates of a step as a line."""
    rates = ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(record["learning_rates"]))
    loss = "none" if record["loss"] is None else f"{record['loss']:.9g}"
    return f"Step {record['step']:,}: loss {loss}, gradient norm {record['gradient_norm']:.6g}, learning rate {rates}"
