"""`legato replay`: recomputes steps of a run, and prints the results and the proof."""

from argparse import Namespace
from bdb import BdbQuit
from collections.abc import Iterator
from pathlib import Path

from ..base.errors import ConfigError, DataError
from ..base.location import location_of
from ..base.messages import STDERR, STDOUT
from ..base.run_names import require_local
from ..callbacks.callback import Callback
from ..lab.history import StudiedRun
from ..lab.operations import Operations, read_operations
from ..lab.origin import differences
from ..lab.replay_steps import Replayed, check_steps, new_directory, replay_steps
from ..lab.sample_lookup import SampleLookup, shown_samples
from ..lab.study import history_of
from ..lab.watchers import DebugStep, StepReport, StopAfterStep
from ..trainer.checkpoints.find import directory_name
from ..trainer.runs.directory import is_run
from .arguments import read_words

SHOWN_MODULES = 5


def run_replay(options: Namespace) -> None:
    """Run `legato replay`."""
    values, overrides = read_words(options.words, ("step", "until", "replica"), ("save",))
    if "step" not in values:
        raise ConfigError("legato replay needs a run and a step, for example: legato replay RUN step=1000 until=2000")
    first, last = int(values["step"]), int(values.get("until", values["step"]))
    check_steps(first, last)
    replica = int(values["replica"]) if "replica" in values else None
    save = checkpoint_path(values["save"], last) if "save" in values else None
    history = history_of(options.run, overrides)
    for line in differences(history, first):
        print(f"legato: {line}", file=STDERR, flush=True)
    make, directory = history.make(first, last), new_directory(history.directory)
    watchers: list[Callback] = [StepReport(first, last), StopAfterStep(last, save)]
    if options.debug:
        watchers.insert(1, DebugStep(first, replica))
    if options.operations:
        watchers.insert(1, Operations(first))
    try:
        replayed = replay_steps(history, make(), (first, last), directory, watchers)
    # quitting the debugger is not a failure
    except BdbQuit:
        print("The replay ended in the debugger.", file=STDOUT, flush=True)
        return
    print("\n".join(described(history, replayed, replica)), file=STDOUT)
    if save is not None:
        print(f"Checkpoint  {save}", file=STDOUT)
    if options.operations:
        Path(options.operations).write_text(read_operations(directory), encoding="utf-8")
        print(f"Operations  {options.operations}", file=STDOUT)
    print(f"Replay      {directory}", file=STDOUT)
    if options.operations:  # meant for comparing a code change, so a difference is not a failure
        print(replayed.describe(), file=STDOUT)
    else:
        replayed.conclude()


def checkpoint_path(word: str, step: int) -> Path:
    """Return the path for saving a checkpoint. Raises ConfigError for a folder inside a run directory."""
    return outside_of_runs(word, "save=") / directory_name(step)


def outside_of_runs(word: str, option: str) -> Path:
    """Return the folder specified by an option. Raises ConfigError if it is inside a run directory."""
    require_local(word, option)
    folder = Path(word).absolute()
    # resolved, since a link may point into a run, whose files a replay would replace
    inside = next((path for path in (folder.resolve(), *folder.resolve().parents) if is_run(path)), None)
    if inside is not None:
        raise ConfigError(
            f"{option}{word} is inside the run directory {inside}, which must not change. Choose another folder, or "
            f"omit {option.rstrip(' =')}."
        )
    return folder


def described(history: StudiedRun, replayed: Replayed, replica: int | None) -> Iterator[str]:
    """Yield lines that describe the results and samples of the replayed steps."""
    origin = f"the checkpoint of step {replayed.source.step:,}" if replayed.source else "the start of the run"
    yield f"Replayed steps {replayed.first:,} to {replayed.last:,} of {location_of(history.directory)}, from {origin}"
    lookup = SampleLookup(history, history.unstarted)
    for record in replayed.steps():
        rates = ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(record["learning_rates"]))
        loss = "none" if record["loss"] is None else f"{record['loss']:.9g}"
        norm = f"gradient norm {record['gradient_norm']:.6g}"
        yield f"Step {record['step']:,}: loss {loss}, {norm}, learning rate {rates}"
        # usually a single layer causes a bad step
        largest = sorted(record["modules"].items(), key=lambda item: -item[1])[:SHOWN_MODULES]
        norms = (f"{name or 'the task'} {norm:.4g}" for name, norm in largest)
        yield f"  largest gradients: {', '.join(norms)}"
        try:
            place, step = lookup.place(record["step"]), lookup.at(record["step"])
            yield from list(shown_samples(history.directory, place, step, replica))[1:]
        except DataError as error:
            yield f"  samples: {error}"
