"""`legato replay`: reads the options, replays, and prints what the steps came to, with the proof."""

import sys
from bdb import BdbQuit
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, DataError, did_you_mean
from ..base.messages import STDERR, STDOUT
from ..base.run_names import require_local
from ..callbacks.callback import Callback
from ..lab.history import RunHistory
from ..lab.origin import differences
from ..lab.replay import Replayed, conclude, new_directory, replay_steps, require_outside
from ..lab.samples import SampleLookup, shown_samples, whole_number
from ..lab.watchers import DebugStep, StepReport, StopAfterStep
from ..trainer.checkpoints.find import directory_name

SHOWN_MODULES = 5


@dataclass(frozen=True)
class ReplayArguments:
    """Options of `legato replay`."""

    run: str
    first: int
    last: int
    debug: bool = False
    replica: int | None = None
    save: Path | None = None
    hindsight: bool = False
    """Whether a range of steps was asked for, whose points are kept beside the run, rather than a step."""

    @classmethod
    def read(cls, arguments: Sequence[str]) -> "tuple[ReplayArguments, list[str]]":
        """Return the options, and the remaining arguments, which are overrides of the config."""
        words, found, rest = list(arguments), dict[str, Any](), list[str]()
        while words:
            argument = words.pop(0)
            name, equals, text = argument.removeprefix("--").partition("=")
            if name in ("until", "save") and not equals and argument.startswith("--") and words:
                equals, text = "=", words.pop(0)
            if argument == "--debug":
                found["debug"] = True
            elif name in ("into", "jobs", "devices") and equals:
                raise ConfigError(
                    f"{argument}: a replay runs in one process, into a folder of its own beside the run's."
                )
            elif name in ("step", "until", "replica") and equals:
                found[name] = whole_number(name, text)
            elif name == "save" and equals:
                require_local(text, "save=")
                found[name] = Path(text).absolute()
            elif name == "steps" and equals:
                first, dots, last = text.partition("..")
                if not dots:
                    raise ConfigError(f"steps={text}: expected a range, such as steps=1000..2000.")
                found["first"], found["last"] = whole_number("steps", first), whole_number("steps", last)
            elif equals and "." in name:
                rest.append(argument)
            elif not equals and "run" not in found and not argument.startswith("-"):
                found["run"] = argument
            else:
                known = ("step", "steps", "until", "debug", "save", "replica")
                hint = did_you_mean(name, known) or f" The options are {', '.join(known)}."
                raise ConfigError(f"{argument!r} is neither an option of replay nor a key of the config.{hint}")
        if "run" not in found or ("step" in found) == ("first" in found):
            raise ConfigError("legato replay takes a run directory and one of step=N and steps=A..B: RUN step=1234.")
        hindsight = "first" in found
        first = found.pop("step", None) or found.pop("first", 0)
        last = found.pop("last", None) or found.pop("until", None) or first
        if not 1 <= first <= last:
            raise ConfigError(f"Steps count from 1, and the last one is not before the first; got {first} to {last}.")
        return cls(**{name: one for name, one in found.items() if name != "until"}, first=first, last=last,
                   hindsight=hindsight), rest  # fmt: skip


def run_replay(arguments: Sequence[str]) -> None:
    """Run `legato replay`."""
    options, overrides = ReplayArguments.read(arguments)
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
