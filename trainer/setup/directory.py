"""Where a call begins: the run directory, and the checkpoint that a run resumes from or takes its weights from."""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ...base.errors import CheckpointError, ConfigError, did_you_mean
from ...base.location import Address, Location, local_folder, location_of, to_location
from ...base.run_names import EVALUATIONS
from ...callbacks.checkpoint import Checkpoint
from ...callbacks.checkpoint_callback import CheckpointCallback
from ...tasks.task import Task
from ..checkpoints import find
from ..checkpoints.storage import is_file
from ..request import Request
from ..resume.saver import new_identity
from ..run import Call
from ..runs import places
from ..runs.places import FRESH, StoredRun
from ..runs.run_file import identity_of
from .parts import with_callbacks_of

if TYPE_CHECKING:
    from ...base.contracts import Trainer

log = logging.getLogger("legato")


@dataclass
class Start:
    """Where a call begins, as one process decides for all."""

    directory: Path | None = None
    """The run directory; None: nothing is written."""
    source: Location | None = None
    """The checkpoint to read."""
    is_newest: bool = False
    """Whether that is the newest of a folder, of which an older one will do where it is damaged."""
    same_run: bool = False
    """Whether it is of the run in the run directory."""
    identity: str = ""
    """Id of the run."""
    config_from: Path | None = None
    """The run whose config was taken for `resume=auto`."""
    location: Location | None = None
    """Where the run directory lies: itself, or in a store."""
    token: str = field(default_factory=new_identity)
    """A word that no other run has."""


def find_start(call: Call, request: Request) -> tuple[Start, dict[str, Any] | None]:
    """Find the checkpoint, read it, and make the run directory; return where the call begins, and the contents.

    Rank 0 decides for all. If the newest checkpoint, which it has chosen, is damaged, it chooses the one before.
    """
    trainer, strategy, damaged = call.trainer, call.strategy, list[Location]()
    ranks, saved = strategy.collectives, None
    while True:
        start = ranks.from_first(lambda: find_source(trainer, request, damaged))
        if start.config_from is not None and request.source == "auto":
            raise ConfigError(
                f"resume=auto takes the config of {start.config_from} on rank 0, which is not there for rank "
                f"{strategy.place.rank}. Share the folder of the runs, or give each node a copy of that run's config."
            )
        if start.source is None:
            break
        try:
            names, in_parts = weight_names(call.task), strategy.state_dicts.read_in_parts
            saved = trainer.saver.read(start.source, ranks, names, in_parts)
            break
        except CheckpointError as error:
            if not start.is_newest:
                raise
            damaged.append(start.source)
            if trainer.is_global_zero:
                log.warning("The checkpoint %s is passed over, it is not whole. %s", start.source.name, error)
    # after the checkpoint is read: where it cannot be, no directory is left behind
    start = ranks.from_first(partial(with_directory, trainer, request, start))
    if start.directory is not None and isinstance(start.location, Address):
        start.directory = local_folder(start.location)  # of this node
        start.directory.mkdir(parents=True, exist_ok=True)
    trainer.run_dir, call.watchdog.token = start.directory, start.token
    if request.stage == "fit":
        trainer.saver.run_id = start.identity  # unless the checkpoint to resume from has one
    if trainer.is_global_zero:
        log.debug("Run directory %s", start.location)
        if start.source is not None:
            log.info("%s from %s", "Going on" if request.stage == "fit" else "Weights", start.source)
    return start, saved


def weight_names(task: Task) -> set[str]:
    """Return the names of a task's weights, past a `state_dict` of its own, which may need what `setup` makes."""
    return set(nn.Module.state_dict(task))


def find_source(trainer: "Trainer", request: Request, damaged: Collection[Location] = ()) -> Start:
    """Return the checkpoint to start from, none of the `damaged` ones, and the run directory that a resume locks.

    The sizes of its files have been checked; their checksums are when they are read.
    """

    def check(path: Location) -> bool:
        return path not in damaged and bool(find.check_sizes(path))

    wanted, is_fit, saver = request.source, request.stage == "fit", trainer.saver
    if wanted is None:
        return Start()
    if is_fit and wanted == "auto":
        wanted = StoredRun(to_location(trainer.default_root_dir), trainer.run_name, None, "auto")
    if not isinstance(wanted, StoredRun):
        path = named_checkpoint(trainer, wanted, is_fit)
        source = path if is_file(path) else find.resolve(path, check)
        return Start(source=source, is_newest=source != path)
    folders = folders_elsewhere(trainer, request)
    if not is_fit:
        return Start(source=wanted.weights(folders))
    identity = next(filter(None, map(identity_of, wanted.directories())), "")
    directory, newest = wanted.to_resume(partial(saver.hold, stage="fit"), saver.release, check, folders)
    return Start(directory, newest, is_newest=True, identity=identity, config_from=wanted.directory)


def with_directory(trainer: "Trainer", request: Request, start: Start) -> Start:
    """Complete a start by its run directory, which is made if needed, and locked."""
    directory, source, stage = trainer.run_dir or start.directory, start.source, request.stage
    last = None if directory == trainer.assigned_dir else directory
    if source is not None and last is not None and last.parent.parent.name == EVALUATIONS:
        directory = None  # of the trainer's last evaluation, perhaps of another run's checkpoint
    if directory is None and (trainer.loggers or trainer.enable_checkpointing):
        if stage != "fit" and source is not None:
            directory = evaluation_directory(trainer, stage, source)
        # A run that starts again because it left no complete checkpoint is still that run, and may overwrite its files.
        identity, root = start.identity or new_identity(), to_location(trainer.default_root_dir)
        directory = directory or places.create(root, trainer.run_name, identity, stage)
    if directory is not None and trainer.assigned_dir is None:  # a given one is locked by its owner, or it is a trial's
        trainer.saver.hold(directory, stage)
    elif directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    start.directory, start.same_run = directory, places.is_same_run(directory, source)
    start.location = None if directory is None else location_of(directory)
    # a fit that counts on from the one before (`Trainer.new_state`) is the same run
    before = trainer.saver.run_id if trainer.global_step else ""
    start.identity = before or identity_of(directory) or new_identity()
    return start


def evaluation_directory(trainer: "Trainer", stage: str, source: Location) -> Path | None:
    """Make a directory for an evaluation in that of the run whose checkpoint it takes: RUN/evaluations/STAGE/version_N.

    None where that run is not below `default_root_dir`, and where its directory is not writable.
    """
    run = places.run_of(source, to_location(trainer.default_root_dir), trainer.run_name)
    try:
        return None if run is None else places.create(location_of(run) / EVALUATIONS, stage, new_identity(), stage)
    except ConfigError as error:
        log.info("This evaluation has a directory of its own. %s", error)
        return None


def folders_elsewhere(trainer: "Trainer", request: Request) -> list[Location]:
    """Return the folders outside of the run directory with checkpoints that a run can resume from, or be evaluated."""
    is_fit = request.stage == "fit"
    request.task.trainer = trainer  # which configure_callbacks may ask
    callbacks = with_callbacks_of(request.task, trainer.callbacks)
    # what is saved at an error is none to evaluate; weights alone are none to resume from
    savers = [saver for saver in callbacks if isinstance(saver, CheckpointCallback if is_fit else Checkpoint)]
    elsewhere = [saver for saver in savers if saver.dirpath and saver.is_elsewhere]
    return [to_location(str(saver.dirpath)) for saver in elsewhere if not (is_fit and saver.save_weights_only)]


def named_checkpoint(trainer: "Trainer", name: Any, is_fit: bool) -> Location:
    """Return the place of a checkpoint: one that exists, or "last" or "best", which the Checkpoint callback knows."""
    callback = trainer.checkpoint_callback
    last, best = ("", "") if callback is None else (callback.last_model_path, callback.best_model_path)
    if name == "best" and last and not best:
        raise CheckpointError(
            f"There is no 'best' checkpoint: none was saved with a finite value of {callback.monitor!r}. Say "
            f"ckpt_path='last', or give a path."
        )
    path = {"last": last, "best": best}.get(str(name), name)
    if not path:
        raise CheckpointError(f"There is no {name!r} checkpoint: this trainer has written none. Give a path.")
    place = to_location(path)
    if isinstance(place, Path) and not place.exists():
        hint = did_you_mean(str(path), ("auto", "last", "best", "none"))
        others = "'auto', 'last', 'best' or nothing." if is_fit else f"'last' or 'best'; {FRESH}"
        raise CheckpointError(f"There is no checkpoint at {path}.{hint} Expected a path, {others}")
    return place
