"""The starting point of a call: its run directory, and the checkpoint it resumes from or loads weights from."""

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
    """The run directory, checkpoint and run id that a call starts with, chosen by one process for all processes."""

    directory: Path | None = None
    """The run directory, or None if nothing is written."""
    source: Location | None = None
    """The checkpoint to read."""
    is_newest: bool = False
    """Whether the checkpoint is the newest in its folder. If it is damaged, an older one is used."""
    same_run: bool = False
    """Whether the checkpoint belongs to the run in the run directory."""
    identity: str = ""
    """Id of the run."""
    config_from: Path | None = None
    """The run whose config `resume=auto` uses."""
    location: Location | None = None
    """Location of the run directory: the directory itself, or a URL in an object store."""
    token: str = field(default_factory=new_identity)
    """Unique token for this launch."""


def find_start(call: Call, request: Request) -> tuple[Start, dict[str, Any] | None]:
    """Find and read the checkpoint, and create the run directory. Return the `Start` and the checkpoint's contents.

    Rank 0 decides for all ranks. If the newest checkpoint in a folder is damaged, rank 0 chooses the next older one.
    """
    trainer, strategy, damaged = call.trainer, call.strategy, list[Location]()
    ranks, saved = strategy.collectives, None
    while True:
        start = ranks.from_first(lambda: find_source(trainer, request, damaged))
        if start.config_from is not None and request.source == "auto":
            raise ConfigError(
                f"resume=auto uses the config from {start.config_from} on rank 0, but rank {strategy.place.rank} "
                f"cannot find that run. Share the runs folder between nodes, or copy that run's config to each node."
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
                log.warning("Skipping the damaged checkpoint %s. %s", start.source.name, error)
    # after the checkpoint is read, so that a failure leaves no directory behind
    start = ranks.from_first(partial(with_directory, trainer, request, start))
    if start.directory is not None and isinstance(start.location, Address):
        start.directory = local_folder(start.location)  # this node's folder
        start.directory.mkdir(parents=True, exist_ok=True)
    trainer.run_dir, call.watchdog.token = start.directory, start.token
    if request.stage == "fit":
        trainer.saver.run_id = start.identity  # replaced by the id in the checkpoint to resume from, if any
    if trainer.is_global_zero:
        log.debug("Run directory %s", start.location)
        if start.source is not None:
            log.info("%s from %s", "Resuming" if request.stage == "fit" else "Loading weights", start.source)
    return start, saved


def weight_names(task: Task) -> set[str]:
    """Return the names of a task's weights without calling `state_dict`, which may need objects created in `setup`."""
    return set(nn.Module.state_dict(task))


def find_source(trainer: "Trainer", request: Request, damaged: Collection[Location] = ()) -> Start:
    """Return the checkpoint to start from, skipping `damaged` ones, and the run directory to lock if the run resumes.

    This function checks the sizes of the checkpoint's files. Their checksums are verified when the files are read.
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
    """Add the run directory to a `Start`. Create and lock the directory if needed."""
    directory, source, stage = trainer.run_dir or start.directory, start.source, request.stage
    last = None if directory == trainer.assigned_dir else directory
    if source is not None and last is not None and last.parent.parent.name == EVALUATIONS:
        directory = None  # the directory of the last evaluation, perhaps with another run's checkpoint
    if directory is None and (trainer.loggers or trainer.enable_checkpointing):
        if stage != "fit" and source is not None:
            directory = evaluation_directory(trainer, stage, source)
        # a run that starts over because it has no complete checkpoint keeps its identity, and may overwrite its files
        identity, root = start.identity or new_identity(), to_location(trainer.default_root_dir)
        directory = directory or places.create(root, trainer.run_name, identity, stage)
    if directory is not None and trainer.assigned_dir is None:  # an assigned one has a lock, or belongs to a trial
        trainer.saver.hold(directory, stage)
    elif directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    start.directory, start.same_run = directory, places.is_same_run(directory, source)
    start.location = None if directory is None else location_of(directory)
    # a fit that continues the previous fit's counts (`Trainer.new_state`) is the same run
    before = trainer.saver.run_id if trainer.global_step else ""
    start.identity = before or identity_of(directory) or new_identity()
    return start


def evaluation_directory(trainer: "Trainer", stage: str, source: Location) -> Path | None:
    """Create an evaluation's directory inside the run whose checkpoint it uses: RUN/evaluations/STAGE/version_N.

    Return None if that run is not inside `default_root_dir`, or if its directory is not writable.
    """
    run = places.run_of(source, to_location(trainer.default_root_dir), trainer.run_name)
    try:
        return None if run is None else places.create(location_of(run) / EVALUATIONS, stage, new_identity(), stage)
    except ConfigError as error:
        log.info("This evaluation uses a separate run directory. %s", error)
        return None


def folders_elsewhere(trainer: "Trainer", request: Request) -> list[Location]:
    """Return the folders outside the run directory that may contain checkpoints to resume from or to evaluate."""
    is_fit = request.stage == "fit"
    request.task.trainer = trainer  # configure_callbacks may use it
    callbacks = with_callbacks_of(request.task, trainer.callbacks)
    # a checkpoint saved after an error is not evaluated, and a run cannot resume from weights alone
    savers = [saver for saver in callbacks if isinstance(saver, CheckpointCallback if is_fit else Checkpoint)]
    elsewhere = [saver for saver in savers if saver.dirpath and saver.is_elsewhere]
    return [to_location(str(saver.dirpath)) for saver in elsewhere if not (is_fit and saver.save_weights_only)]


def named_checkpoint(trainer: "Trainer", name: Any, is_fit: bool) -> Location:
    """Return the location of a checkpoint, given as a path, or as the Checkpoint callback's "last" or "best"."""
    callback = trainer.checkpoint_callback
    last, best = ("", "") if callback is None else (callback.last_model_path, callback.best_model_path)
    if name == "best" and last and not best:
        raise CheckpointError(
            f"There is no 'best' checkpoint: none was saved with a finite value of {callback.monitor!r}. Pass "
            f"ckpt_path='last', or a path."
        )
    path = {"last": last, "best": best}.get(str(name), name)
    if not path:
        raise CheckpointError(f"There is no {name!r} checkpoint: this trainer has not written one. Pass a path.")
    place = to_location(path)
    if isinstance(place, Path) and not place.exists():
        hint = did_you_mean(str(path), ("auto", "last", "best", "none"))
        keywords = "'auto', 'last', 'best' or nothing." if is_fit else f"'last' or 'best'; {FRESH}"
        raise CheckpointError(f"There is no checkpoint at {path}.{hint} Expected a path, {keywords}")
    return place
