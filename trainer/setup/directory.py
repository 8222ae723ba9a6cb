"""Run directory and checkpoint of a call: rank 0 decides for all."""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ...base.errors import CheckpointError, ConfigError, did_you_mean
from ...base.run_names import EVALUATIONS, require_local
from ...callbacks.checkpoint import Checkpoint
from ...callbacks.checkpoint_callback import CheckpointCallback
from ...tasks.task import Task
from ..checkpoints import find
from ..checkpoints.manifest import load_manifest
from ..request import Request
from ..resume.saver import new_identity
from ..run import Call
from ..runs import places
from ..runs.directory import is_run
from ..runs.places import FRESH, StoredRun
from ..runs.run_file import identity_of
from .parts import with_callbacks_of

if TYPE_CHECKING:
    from ...base.contracts import Trainer

log = logging.getLogger("legato")


def find_directory(call: Call, request: Request) -> tuple[Path | None, bool, dict[str, Any] | None]:
    """Find the run directory; return the checkpoint to start from, whether it is of this run, and its contents.

    Rank 0 decides for all. If the newest checkpoint, which it has chosen, is damaged, it chooses the one before.
    """
    trainer, strategy, damaged = call.trainer, call.strategy, list[Path]()
    while True:
        decided = Decision()
        if strategy.place.rank == 0:
            try:
                decided.directory, decided.source = decide_directory(trainer, request, damaged)
                decided.config_from = request.resume.directory if isinstance(request.resume, StoredRun) else None
                decided.is_chosen = request.source_is_chosen
                decided.goes_on = is_same_run(decided.directory, decided.source)
                # a fit that counts on from the one before (`Trainer.new_state`) is the same run
                same = trainer.saver.run_id if trainer.global_step else ""
                decided.identity = same or identity_of(decided.directory) or new_identity()
            except (ConfigError, CheckpointError) as error:
                decided.problem = error
        decided = strategy.collectives.broadcast(decided)
        # an exception that rank 0 alone raised would leave the others waiting in the next collective
        if decided.problem is not None:
            raise decided.problem
        if decided.config_from is not None and request.resume == "auto":
            raise ConfigError(
                f"resume=auto takes the config of {decided.config_from} on rank 0, which is not there for rank "
                f"{strategy.place.rank}. Share the folder of the runs, or give each node a copy of that run's config."
            )
        trainer.run_dir, call.watchdog.token = decided.directory, decided.token
        if request.stage == "fit":
            trainer.saver.run_id = decided.identity  # unless the checkpoint to resume from has one
        if trainer.is_global_zero:
            log.debug("Run directory %s", decided.directory)
        if decided.source is None:
            return None, False, None
        try:
            saved = trainer.saver.format.read(
                decided.source,
                strategy.collectives,
                weight_names(call.task),
                strategy.state_dicts.read_in_parts,
            )
        except CheckpointError as error:
            if not decided.is_chosen:
                raise
            damaged.append(decided.source)
            if trainer.is_global_zero:
                log.warning("The checkpoint %s is passed over, it is not whole. %s", decided.source.name, error)
            trainer.run_dir = trainer.given_dir
        else:
            break
    if trainer.is_global_zero:
        log.info("%s from %s", "Going on" if request.stage == "fit" else "Weights", decided.source)
    return decided.source, decided.goes_on, saved


def weight_names(task: Task) -> set[str]:
    """Return the names of a task's weights, past a `state_dict` of its own, which may need what `setup` makes."""
    return set(nn.Module.state_dict(task))


@dataclass
class Decision:
    """Rank 0's choice of run directory and checkpoint, which it broadcasts."""

    identity: str = ""
    directory: Path | None = None
    source: Path | None = None
    """The checkpoint to read."""
    goes_on: bool = False
    """Whether that is of the run in this directory."""
    is_chosen: bool = False
    """Whether an older one will do."""
    problem: Exception | None = None
    config_from: Path | None = None
    """The run whose config rank 0 has taken for `resume=auto`."""
    token: str = field(default_factory=new_identity)
    """A word that no other run has."""


def decide_directory(
    trainer: "Trainer", request: Request, damaged: Collection[Path] = ()
) -> tuple[Path | None, Path | None]:
    """Return the run directory, made if needed, and the checkpoint to start from, which is none of the `damaged` ones.

    The sizes of its files have been checked; their checksums are when they are read.
    """

    def check(path: Path) -> bool:
        return path not in damaged and bool(find.check_sizes(path))

    directory: Path | None = None
    source: Path | None = None
    resume, identity = named_checkpoint(trainer, request.resume), ""
    if resume == "auto":
        resume = StoredRun(Path(trainer.default_root_dir), trainer.run_name, None, "auto")
    if isinstance(resume, StoredRun):
        saver, folders = trainer.saver, folders_elsewhere(trainer, request.task)
        identity = next(filter(None, map(identity_of, resume.directories())), "")
        directory, source = resume.to_resume(partial(saver.hold, stage="fit"), saver.release, check, folders)
        request.source_is_chosen = True
    elif resume is not None:
        path = local_checkpoint(resume, "The checkpoint to resume from", "'auto', 'last', 'best' or nothing.")
        source = path if path.is_file() else find.resolve(path, check)
        request.source_is_chosen = source != path
    if request.weights is not None:  # before a directory is made: where there are none, nothing is left behind
        source = find_weights(trainer, request, check)
    directory = trainer.run_dir or directory
    last = None if directory == trainer.given_dir else directory
    if source is not None and last is not None and last.parent.parent.name == EVALUATIONS:
        directory = None  # of the trainer's last evaluation, perhaps of another run's checkpoint
    if directory is None:
        directory = evaluation_directory(trainer, request.stage, source)
    if directory is None:
        # A run that starts again because it left no complete checkpoint is still that run, and may overwrite its files.
        directory = new_directory(trainer, identity or new_identity(), request.stage)
    if directory is not None and trainer.given_dir is None:  # a given one is locked by its owner, or it is a trial's
        trainer.saver.hold(directory, request.stage)
    elif directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    return directory, source


def new_directory(trainer: "Trainer", identity: str, stage: str) -> Path | None:
    """Make the directory of a new run; None where nothing is to be written."""
    if not trainer.fast_dev_run and (trainer.loggers or trainer.enable_checkpointing):
        return places.create(Path(trainer.default_root_dir), trainer.run_name, identity, stage)
    return None


def evaluation_directory(trainer: "Trainer", stage: str, source: Path | None) -> Path | None:
    """Make a directory for an evaluation in that of the run whose checkpoint it takes: RUN/evaluations/STAGE/version_N.

    None where that run is not below `default_root_dir`, where its directory is not writable, and where nothing is to be
    written.
    """
    writes = bool(trainer.loggers) or trainer.enable_checkpointing
    if stage == "fit" or source is None or not writes:
        return None
    root = Path(trainer.default_root_dir).resolve()
    above = (one for one in source.resolve().parents if root in one.parents and is_run(one))
    versions = filter(is_run, reversed(places.versions(root, trainer.run_name)))
    elsewhere = (version for version in versions if is_same_run(version, source))
    run = next(above, None) or next(elsewhere, None)
    try:
        return None if run is None else places.create(run / EVALUATIONS, stage, new_identity(), stage)
    except ConfigError as error:
        log.info("This evaluation has a directory of its own. %s", error)
        return None


def is_same_run(directory: Path | None, source: Path | None) -> bool:
    """Return whether a checkpoint is of the run in a run directory, in whatever folder it is."""
    if directory is None or source is None:
        return False
    if directory.resolve() in source.resolve().parents:
        return True
    identity = identity_of(directory)
    return bool(identity) and source.is_dir() and load_manifest(source).run == identity


def is_elsewhere(directory: Path | None, source: Path) -> bool:
    """Return whether a checkpoint is of the run in a run directory, but is in another folder."""
    return is_same_run(directory, source) and directory not in source.parents


def folders_elsewhere(trainer: "Trainer", task: Task) -> list[Path]:
    """Return the folders outside of the run directory with checkpoints from which a run can resume."""
    task.trainer = trainer  # which configure_callbacks may ask
    savers = [saver for saver in with_callbacks_of(task, trainer.callbacks) if isinstance(saver, CheckpointCallback)]
    elsewhere = [saver for saver in savers if saver.dirpath and saver.is_elsewhere]
    return [Path(str(saver.dirpath)) for saver in elsewhere if not saver.save_weights_only]


def find_weights(trainer: "Trainer", request: Request, check: find.Check) -> Path:
    """Return the checkpoint that an evaluation takes its weights from."""
    if isinstance(request.weights, StoredRun):
        request.task.trainer = trainer  # which configure_callbacks may ask
        callbacks = with_callbacks_of(request.task, trainer.callbacks)
        given = [one.dirpath for one in callbacks if isinstance(one, Checkpoint)]
        return request.weights.weights([folder for folder in given if folder is not None])
    path = local_checkpoint(
        str(named_checkpoint(trainer, request.weights)), "The checkpoint", f"'last' or 'best'; {FRESH}"
    )
    source = path if path.is_file() else find.resolve(path, check)
    request.source_is_chosen = source != path
    return source


def local_checkpoint(word: str | Path, argument: str, others: str) -> Path:
    """Return a checkpoint's path; raises CheckpointError, with what else it may be, if nothing is there."""
    require_local(word, argument)
    if not Path(word).exists():
        hint = did_you_mean(str(word), ("auto", "last", "best", "none"))
        raise CheckpointError(f"There is no checkpoint at {word}.{hint} Expected a path, {others}")
    return Path(word)


def named_checkpoint(trainer: "Trainer", name: Any) -> Any:
    """Turn "last" and "best" into the paths that the Checkpoint callback knows."""
    if name not in ("last", "best"):
        return name
    callback = trainer.checkpoint_callback
    path = None if callback is None else callback.best_model_path if name == "best" else callback.last_model_path
    if not path and callback is not None and callback.last_model_path:
        raise CheckpointError(
            f"There is no 'best' checkpoint: none was saved with a finite value of {callback.monitor!r}. Say "
            f"ckpt_path='last', or give a path."
        )
    if not path:
        raise CheckpointError(f"There is no {name!r} checkpoint: this trainer has written none. Give a path.")
    return str(path)
