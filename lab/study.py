"""Tools for studying a run in Python. The run may have been started from a config or by a script.

run = legato.runs.open("digits")         # or a path, here and below
legato.lab.samples(run, 21)              # one record per batch
legato.lab.replay(run, 21).steps()       # loss, gradient norms and learning rates
legato.lab.verify(run).is_proven         # random segments between checkpoints, recomputed
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from ..base.messages import STDERR, STDOUT
from ..base.run_names import CONFIG
from ..trainer.runs.directory import RunDirectory, find_run
from .history import RunHistory, StudiedRun
from .replay_steps import Make, Replayed, check_steps, new_directory, replay_steps
from .sample_lookup import SampleLookup
from .script import ScriptHistory, restoring_process
from .verification import VERIFIED, Verification
from .watchers import StepReport, StopAfterStep

AnyRun = str | Path | RunDirectory | StudiedRun
"""A run, its path, its name or its history."""


def samples(run: AnyRun, step: int) -> list[dict[str, Any]]:
    """Return the replica, batch number, loader and sample indices of each batch in a step, without running the step.

    The indices are None for a stream. If there is a single loader, its name is "".
    """
    with restoring_process():
        history = history_of(run)
        batches = SampleLookup(history, history.unstarted).at(step).batches
    return [
        {"replica": item.replica, "batch": item.batch_idx, "loader": loader, "indices": indices}
        for item in batches
        for loader, indices in (item.indices_by_loader or dict[str, Any]({"": None})).items()
    ]


def replay(run: AnyRun, step: int, until: int | None = None, *, make: Make | None = None) -> Replayed:
    """Recompute steps of a run in a single process, without changing the run.

    The replay starts from the newest checkpoint before `step`, without loggers or callbacks that write files, and stops
    after `until`. It compares its logged values with the run's metrics.jsonl and prints the result.

    Args:
        run: A run from `legato.runs`, its path or its name.
        step: First step, counted from 1.
        until: Last step. Default: `step`.
        make: Function that creates the trainer, task and data as the notebook did. Only needed for a run started in a
            notebook. Must return `(trainer, task, loader)`, optionally followed by a validation loader and a data
            module. The trainer needs only `devices=1`, even if the run used more devices.

    Returns the replay. The replay's `steps()` returns the loss, gradient norms by module and learning rates for each
    step.

    Raises ConfigError if `make` does not return a new trainer and at least a task, and LegatoError if the replay does
    not match the run.
    """
    last = step if until is None else until
    check_steps(step, last)
    with restoring_process():
        if make is None:
            history: RunHistory = (studied := history_of(run))
            made = studied.make(step, last)()
        else:
            made, history = made_new(make), RunHistory(path_of(run))
        watchers = [StepReport(step, last), StopAfterStep(last)]
        replayed = replay_steps(history, made, (step, last), new_directory(history.directory), watchers)
    replayed.conclude()
    return replayed


def verify(
    run: AnyRun,
    segments: int | None = 5,
    *,
    seed: int | None = None,
    devices: int | None = None,
    out: str | Path | None = None,
) -> Verification:
    """Recompute random segments between a run's checkpoints and write a certificate, without changing the run.

    The estimated cost is printed first, and the certificate at the end.

    Args:
        run: A run from `legato.runs`, its path or its name.
        segments: Number of segments. None: all.
        seed: Seed for choosing the segments. Default: a random seed, which is recorded in the certificate.
        devices: Number of processes that recompute the segments. Default: if results must be bitwise identical, a
            number that differs from the run's.
        out: Folder for the certificate. Default: a new folder next to the run.

    Returns the verification, with `is_proven` and `segments`. Each segment lists its `differences`.

    Raises ConfigError if none of the run's segments can be recomputed.
    """
    with restoring_process():
        verification = Verification(history_of(run), segments, seed, devices)
        print(verification.cost(), file=STDOUT, flush=True)
        directory = new_directory(verification.history.directory, VERIFIED) if out is None else Path(out).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        for segment in verification.compute(directory):
            print("Recomputed steps {:,} to {:,}".format(*segment.steps), file=STDERR, flush=True)
        print(verification.write_certificate(directory), file=STDOUT)
        print(f"Written   {directory}/certificate.json and .txt", file=STDOUT, flush=True)
    return verification


def made_new(make: Make) -> Sequence[Any]:
    """Return the trainer, task and data from `make`. Raises ConfigError if `make` returns anything else."""
    made = make() if callable(make) else None
    if not isinstance(made, Sequence) or len(made) < 2 or getattr(made[0], "run", made) is not None:
        came = "a function that returned something else or a used trainer" if callable(make) else type(make).__name__
        raise ConfigError(
            f"legato.lab.replay needs a function that creates a new trainer, task and data, got {came}. Call "
            f"legato.lab.replay(run, step, make=make), where make() returns (trainer, task, loader)."
        )
    return made


def path_of(run: AnyRun) -> Path:
    """Return a run's directory. Raises ConfigError if there is no such run."""
    if isinstance(run, StudiedRun):
        return run.directory
    return run.path if isinstance(run, RunDirectory) else find_run(run).path


def history_of(run: AnyRun, overrides: Sequence[str] = ()) -> StudiedRun:
    """Return the history of a run. The history's `make` and `unstarted` methods create the objects for a step.

    Args:
        overrides: Settings such as "trainer.devices=2". For a run that was started from a config, any config key is
            accepted.

    Raises ConfigError if the run does not exist.
    """
    if isinstance(run, StudiedRun):
        return run
    directory = path_of(run)
    if not (directory / CONFIG).is_file():
        return ScriptHistory(directory, overrides)
    # cli/, which builds configs, lies above lab/ in the layers
    history: StudiedRun = import_module("..cli.history", __package__).ConfigHistory(directory, overrides)
    return history
