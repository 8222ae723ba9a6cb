"""The study of a run from Python: its history, whether a config or a script began it, its samples and replays.

run = legato.runs.open("digits")         # or a path, here and below
legato.lab.samples(run, 21)              # a record for each batch
legato.lab.replay(run, 21).steps()       # loss, gradient norms and learning rates
legato.lab.verify(run).is_proven         # segments between checkpoints, computed again
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from ..base.run_names import CONFIG
from ..trainer.runs.directory import RunDirectory, find_run
from .history import RunHistory, StudiedRun
from .replay_steps import Make, Replayed, new_directory, replay_steps
from .sample_lookup import SampleLookup
from .script import ScriptHistory, restoring_process
from .verification import VERIFIED, Verification
from .watchers import StepReport, StopAfterStep

AnyRun = str | Path | RunDirectory
"""A run as `legato.runs.open` returns it, or as it takes it."""


def samples(run: AnyRun, step: int) -> list[dict[str, Any]]:
    """Return which samples a step had: replica, batch, loader and indices of each batch; nothing is run.

    Indices are None for a stream, and the loader is "" where there is one.
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
    """Compute steps of a run again, on one process; the run itself stays as it is.

    Training begins at the newest checkpoint before `step`, without loggers and callbacks that write, and stops after
    `until`. What is logged is compared with the run's metrics.jsonl, and the result printed.

    Args:
        run: a run of `legato.runs`, its path or its name.
        step: the first step, counted from 1.
        until: the last one; `step` by default.
        make: of a run of a notebook: makes trainer, task and data as the notebook made them for the run, and returns
            them as `trainer.fit` takes them: `(trainer, task, loader)`, with a validation loader and a data module
            after it. They are the replay's; one process will do (`devices=1`), whatever the run had.

    Returns the replay, whose `steps()` has loss, gradient norms by module and learning rates of each step.

    Raises ConfigError where `make` does not return a new trainer and a task, and LegatoError where the replay is not
    what the run did.
    """
    if not isinstance(step, int):
        raise ConfigError(f"step is a number, got {step!r}. Write legato.lab.replay(run, 21, make=make).")
    last = step if until is None else until
    with restoring_process():
        if make is None:
            history: RunHistory = (studied := history_of(run))
            require_steps(history, step, last)
            made = studied.make(step, last)()
        else:
            made = made_new(make)
            history = RunHistory(run.path if isinstance(run, RunDirectory) else find_run(run).path)
            require_steps(history, step, last)
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
    """Compute random segments of a run between its checkpoints again, and write a certificate; the run stays as it is.

    Args:
        run: a run of `legato.runs`, its path or its name.
        segments: how many; None for all.
        seed: of the draw; a new one by default, which the certificate states.
        devices: processes that compute them; by default others than the run had where the bits must be the same.
        out: folder of the certificate; by default a new one beside the run.

    Returns the verification: `is_proven`, and for each of its `segments` what differs.

    Raises ConfigError where the run has no segment that can be computed again.
    """
    with restoring_process():
        history = history_of(run)
        verification = Verification(history, segments, seed, devices)
        directory = new_directory(history.directory, VERIFIED) if out is None else Path(out).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        for _ in verification.compute(directory):
            pass  # each one is kept
        verification.write_certificate(directory)
    return verification


def require_steps(history: RunHistory, first: int, last: int) -> None:
    """Raise ConfigError for steps that the run does not have."""
    if not 1 <= first <= last <= history.last_step:
        raise ConfigError(
            f"Steps {first} to {last} of {history.directory}: they count from 1, the last one is not before the first, "
            f"and the newest that is known of this run is {history.last_step}."
        )


def made_new(make: Make) -> Sequence[Any]:
    """Return what a function of the user's makes. Raises ConfigError where that is not a new trainer and a task."""
    made = make() if callable(make) else None
    if not isinstance(made, Sequence) or len(made) < 2 or getattr(made[0], "run", made) is not None:
        came = "one that returned other things, or a trainer that has run" if callable(make) else type(make).__name__
        raise ConfigError(
            f"legato.lab.replay takes a function that makes a new trainer, the task and the data; got {came}. Write "
            f"legato.lab.replay(run, step, make=make), where make() returns (trainer, task, loader)."
        )
    return made


def history_of(run: AnyRun, overrides: Sequence[str] = ()) -> StudiedRun:
    """Return the history of a run; its `make` and `unstarted` make the objects of a step.

    overrides: such as "trainer.devices=2"; of a run by a config any of its keys.

    Raises ConfigError where there is no such run.
    """
    directory = run.path if isinstance(run, RunDirectory) else find_run(run).path
    if not (directory / CONFIG).is_file():
        return ScriptHistory(directory, overrides)
    # what builds a config lies above this room
    history: StudiedRun = import_module("..cli.history", __package__).ConfigHistory(directory, overrides)
    return history
