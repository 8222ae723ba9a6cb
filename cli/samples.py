"""`legato samples RUN step=N [replica=R] [--show] [--blame]`: lists the samples in a step.

`legato samples RUN index=N [until=N]` lists the steps that used a sample.
"""

from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..base.errors import ConfigError, NonFiniteError
from ..base.messages import STDOUT
from ..lab.blame import BLAME, Blame, shown_blame
from ..lab.history import StudiedRun
from ..lab.replay_steps import read_lines, replay_steps
from ..lab.sample_lookup import SampleLookup, chosen_batches, shown_batches, shown_samples, shown_steps
from ..lab.study import history_of
from ..lab.watchers import StopAfterStep
from .arguments import read_words


def run_samples(options: Namespace) -> None:
    """Print the samples in a step, or the steps that used a sample."""
    values, overrides = read_words(options.words, ("step", "replica", "until"), ("index",))
    if ("step" in values) == ("index" in values) or (options.blame and "index" in values):
        raise ConfigError("legato samples needs a run and step=N or index=N, for example: legato samples RUN step=1234")
    step, replica, until = (int(values[name]) if name in values else None for name in ("step", "replica", "until"))
    history = history_of(options.run, overrides)
    lookup = SampleLookup(history, history.unstarted)
    if step is None:
        index: Any = values["index"]
        # the indices of a dataset may be strings
        index = int(index) if index.lstrip("-").isdecimal() else index
        print("\n".join(shown_steps(lookup, index, until, replica)))
        return
    if options.blame:
        blame(history, step, replica)
        return
    place = lookup.place(step)
    batches = lookup.loaded(step) if options.show else lookup.at(step)
    lines = list(shown_samples(history.directory, place, batches, replica))
    if options.show:
        lines += shown_batches(history.unstarted(step).task, chosen_batches(batches, replica))
    print("\n".join(lines))


def blame(history: StudiedRun, step: int, replica: int | None) -> None:
    """Print the loss and gradient norm of each sample in a step, and the proof from the replay that computed them."""
    watchers, ended = [Blame(step, replica), StopAfterStep(step)], None
    with TemporaryDirectory() as folder:
        try:
            replayed = replay_steps(history, history.make(step, step)(), (step, step), Path(folder), watchers)
        except NonFiniteError as error:  # users most often ask about the step that failed with a NaN
            ended = error
        rows = read_lines(Path(folder) / BLAME)
    print("\n".join(shown_blame(history.directory, step, rows)), file=STDOUT, flush=True)
    if ended is not None:
        print(f"Proof       none: {ended}", file=STDOUT)
    else:
        replayed.conclude()
