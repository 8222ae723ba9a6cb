"""Studies a run from Python, whether a config or a script began it.

run = legato.runs.open("digits")         # or a path, here and below
legato.lab.samples(run, 21)              # a record for each batch
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
"""A run as `legato.runs.open` returns or takes it, or its history."""


def samples(run: AnyRun, step: int) -> list[dict[str, Any]]:
    """Return the samples of a step, without running it: replica, batch, loader and indices of each batch.

    A stream's indices are None. The loader is "" if there is only one.
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
    """Recompute steps of a run on one process, without changing the run.

    Training begins at the newest checkpoint before `step`, without loggers and callbacks that write, and stops after
    `until`. Compares the logged values with the run's metrics.jsonl, and prints the result.

    Args:
        run: a run of `legato.runs`, its path or its name.
        step: the first step, counted from 1.
        until: the last step; default: `step`.
        make: only for a run of a notebook: a function that makes trainer, task and data as the notebook did, and
            returns them as `trainer.fit` takes them: `(trainer, task, loader)`, optionally with a validation loader
            and a data module. `devices=1` is enough, however many the run had.

    Returns the replay, whose `steps()` returns loss, gradient norms by module and learning rates of each step.

    Raises ConfigError if `make` does not return a new trainer and a task, and LegatoError if the replay differs from
    the run.
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
    """Recompute random segments of a run between its checkpoints, and write a certificate; the run does not change.

    Prints the cost before it begins, and the certificate at the end.

    Args:
        run: a run of `legato.runs`, its path or its name.
        segments: number of segments; None: all.
        seed: seed of the draw; default: a new one, which the certificate states.
        devices: number of processes that recompute them; default: another number than the run had, if the bits must
            be the same.
        out: folder of the certificate; default: a new one beside the run.

    Returns the verification: `is_proven`, and `segments`, each with its `differences`.

    Raises ConfigError if no segment of the run can be recomputed.
    """
    with restoring_process():
        verification = Verification(history_of(run), segments, seed, devices)
        print(verification.cost(), file=STDOUT, flush=True)
        directory = new_directory(verification.history.directory, VERIFIED) if out is None else Path(out).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        for segment in verification.compute(directory):
            print("Steps {:,} to {:,} are computed".format(*segment.steps), file=STDERR, flush=True)
        print(verification.write_certificate(directory), file=STDOUT)
        print(f"Written   {directory}/certificate.json and .txt", file=STDOUT, flush=True)
    return verification


def made_new(make: Make) -> Sequence[Any]:
    """Return the trainer, task and data that `make` makes. Raises ConfigError if it makes no new trainer and task."""
    made = make() if callable(make) else None
    if not isinstance(made, Sequence) or len(made) < 2 or getattr(made[0], "run", made) is not None:
        came = "one that returned other things, or a trainer that has run" if callable(make) else type(make).__name__
        raise ConfigError(
            f"legato.lab.replay takes a function that makes a new trainer, the task and the data; got {came}. Write "
            f"legato.lab.replay(run, step, make=make), where make() returns (trainer, task, loader)."
        )
    return made


def path_of(run: AnyRun) -> Path:
    """Return the directory of a run. Raises ConfigError if there is no such run."""
    if isinstance(run, StudiedRun):
        return run.directory
    return run.path if isinstance(run, RunDirectory) else find_run(run).path


def history_of(run: AnyRun, overrides: Sequence[str] = ()) -> StudiedRun:
    """Return the history of a run; its `make` and `unstarted` make the objects of a step.

    overrides: such as "trainer.devices=2"; any key for a run with a config.

    Raises ConfigError if there is no such run.
    """
    if isinstance(run, StudiedRun):
        return run
    directory = path_of(run)
    if not (directory / CONFIG).is_file():
        return ScriptHistory(directory, overrides)
    # cli/, which builds configs, lies above lab/ in the layers
    history: StudiedRun = import_module("..cli.history", __package__).ConfigHistory(directory, overrides)
    return history
