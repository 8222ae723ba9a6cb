"""Saver: writes and removes all of a trainer's checkpoints."""

import errno
import logging
import os
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.checkpoint_index import INDEX, CheckpointIndex
from ...base.environment import restart_count
from ...base.errors import CheckpointError, ConfigError, LegatoError
from ...base.location import Address, Location, location_of, to_location
from ...base.run_names import CHECKPOINTS, not_writable, require_local, run_directory_gone
from ..checkpoints import find
from ..checkpoints.background import Writer
from ..checkpoints.codec import flatten
from ..checkpoints.storage import folder_at
from ..optimization.diagnosis import require_finite
from ..processes.ranks import Ranks
from ..processes.save_progress import SAVES
from ..runs import record as run_record
from ..runs.lock import RunLock
from ..runs.object_lock import ObjectLock
from ..runs.remote import RemoteLock, lock_of
from ..runs.run_file import config_of
from .checkpoint_format import CheckpointFormat, DirectoryFormat
from .contents import contents, contents_after_workers, frozen_weights, training_states
from .left_out import tell_left_out

if TYPE_CHECKING:
    from ...base.contracts import Trainer

log = logging.getLogger("legato")

UNWRITABLE = (
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ESTALE,
    errno.ENOSPC,
    errno.EDQUOT,
)
"""Operating system errors that indicate that a folder is not writable."""


class Saver:
    """Writes, cleans up and removes a trainer's checkpoints, one operation at a time.

    Every operation first waits for a background save to finish. Otherwise, the two operations could delete each other's
    files and, if states are sharded, would use one process group from two threads.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.format: CheckpointFormat = trainer.checkpoint_format or DirectoryFormat()
        self.writer = Writer()
        self.run_id = ""
        """Id of the run, stored in the manifest of each checkpoint. A resumed run keeps its id."""
        self.locks: dict[Location, RunLock | ObjectLock] = {}
        """Locks of the folders that this process may write to."""
        self._run_dir: os.stat_result | None = None
        """`stat` of the run directory at the start of the run."""

    def __getstate__(self) -> dict[str, Any]:
        """Drop the writer and this machine's locks when the trainer is sent to another process."""
        locks = {place: lock for place, lock in self.locks.items() if isinstance(lock, RemoteLock | ObjectLock)}
        return {**vars(self), "writer": Writer(), "locks": locks, "_run_dir": None}

    # --- locks ------------------------------------------------------------------------------------------------------
    def hold(self, folder: Location, stage: str, patient: bool = False) -> None:
        """Lock a folder until `release`. Raises ConfigError if another run has locked it."""
        # a folder has one lock, even if it is reached through different links
        folder = folder.resolve()
        if folder not in self.locks:
            lock = lock_of(folder, stage)
            lock.take(patient)
            self.locks[folder] = lock
            if stage == "fit":  # an earlier fit may have died mid-save; with the lock held, nobody else writes here
                place = folder if isinstance(folder, Address) else location_of(folder)
                for checkpoints in (place, place / CHECKPOINTS):
                    folder_at(checkpoints).sweep()

    def remember_run_dir(self, folder: Path | None) -> None:
        """Remember the run directory's identity, to detect later whether another folder has taken its name."""
        self._run_dir = None if folder is None else folder.stat()

    def hold_for_all(self, folder: Location, patient: bool = False) -> None:
        """Lock a checkpoint folder on rank 0. All ranks must call this.

        Args:
            patient: True if another process has become rank 0. Rank 0 then waits longer for the lock to be released.

        Raises ConfigError, on every rank, if another run has locked the folder, or if a new run would overwrite another
        run's checkpoints in it.
        """

        def hold() -> None:
            try:
                folder_at(folder).make()
                self.hold(folder, "fit", patient)
            except OSError as error:
                raise ConfigError(str(error)) from error
            if is_new and any(not find.is_checkpoint_of(self.run_id, path) for path in find.checkpoints_in(folder)):
                raise ConfigError(
                    f"Checkpoint: dirpath {str(folder)!r} contains checkpoints from another run, which this run would "
                    f"overwrite. Resume that run, choose another folder, or omit dirpath to use the run directory."
                )

        is_new = self.trainer.global_step == 0 and not patient and restart_count() == 0
        if not self.trainer.is_global_zero:
            self.release(folder)
        self.trainer.strategy.collectives.from_first(hold)

    def release(self, *folders: Location) -> None:
        """Release the locks on the given folders, by default on all folders."""
        for folder in [folder.resolve() for folder in folders] or list(self.locks):
            if folder in self.locks:
                self.locks.pop(folder).release()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Within this context, replace an OSError with a ConfigError if the run directory is not writable."""
        self.require_run_dir()
        try:
            yield
        except OSError as error:
            self.require_run_dir()
            folder = self.trainer.run_dir
            if folder is None or error.errno not in UNWRITABLE:
                raise
            raise not_writable(folder, error.strerror) from error

    def require_run_dir(self) -> None:
        """Raise ConfigError if the run directory was deleted, moved or replaced."""
        folder = self.trainer.run_dir
        if folder is None or self._run_dir is None:
            return
        with suppress(OSError):
            # compare identities, because another run may have created a new folder with the same name
            if os.path.samestat(folder.stat(), self._run_dir):
                return
        raise run_directory_gone(folder)

    # --- saving -----------------------------------------------------------------------------------------------------
    def require_storable(self) -> None:
        """Raise CheckpointError if a checkpoint cannot store the run's state. All ranks must call this before training.

        Values that on_save_checkpoint adds are checked only during a save, because the hook may need attributes that
        are only set during training.
        """
        run, trainer, savers = self.trainer.current_run, self.trainer, self.trainer.checkpoint_callbacks
        if not isinstance(self.format, DirectoryFormat) or not savers or trainer.fast_dev_run:
            return
        flatten({"state_dict": trainer.strategy.state_dicts.model(run.task)})
        if all(callback.save_weights_only for callback in savers):
            return
        flatten(training_states(trainer))
        for callback in trainer.callbacks:
            with suppress(AttributeError):  # a user's callback may set its attributes during training
                flatten({"callbacks": {callback.state_key: callback.state_dict()}})

    def save(self, path: Location, weights_only: bool, asynchronous: bool, share_frozen: bool | None = False) -> None:
        """Write a checkpoint of the current state, after any pending logging point. All ranks must call this.

        Args:
            share_frozen: see `Checkpoint`. The default, False, stores all weights in the checkpoint, because the
                checkpoint may be stored anywhere.

        Raises CheckpointError if the save fails or if the previous background save failed. After a failed background
        save, a foreground save still writes its checkpoint before it raises the error.
        """
        self._for_format(path)  # check the path before the background writer gets it
        trainer = self.trainer
        with SAVES.save(), trainer.strategy.timeouts.during("checkpoint"):
            if trainer.strategy.task is None:
                self._write(path, contents_after_workers(trainer, weights_only), False)
                return
            # This step's values are logged before its checkpoint is saved. If the run is killed in between, no
            # logged values are lost or logged twice after a resume.
            if trainer.training and trainer.global_step and trainer.current_run.schedule.is_point():
                trainer.log_step()
            # on all ranks: a checkpoint with NaN weights is useless for resuming
            require_finite(trainer)
            trainer.current_run.require_same_weights()
            trainer.current_run.metrics.share()
            run = trainer.current_run
            with run.optimization.evaluated_weights() if run.is_complete else nullcontext():
                self._save(path, weights_only, asynchronous, share_frozen)
            trainer.strategy.collectives.barrier()

    def _save(self, path: Location, weights_only: bool, asynchronous: bool, share_frozen: bool | None) -> None:
        trainer, run = self.trainer, self.trainer.current_run
        saved = contents(trainer, weights_only)
        if trainer.is_global_zero:
            if isinstance(self.format, DirectoryFormat):  # another format may be able to store them
                tell_left_out({"": run.task, "datamodule_": run.datamodule}, saved)
            # a resumed run treats the points as logged, so they must be on disk before the checkpoint
            with self.writing():
                for logger in trainer.loggers:
                    logger.save()
                self._store_config()
            for lock in self.locks.values():
                if isinstance(lock, RemoteLock):
                    lock.mirror.upload()
        if trainer.strategy.state_dicts.writers.size > 1 or trainer.is_global_zero:
            is_shared = type(self.format) is DirectoryFormat and share_frozen is not False
            frozen = frozen_weights(run.task, saved["state_dict"], share_frozen) if is_shared else set()
            self._write(path, saved, asynchronous, frozen)
            log.debug("Checkpoint %s%s", path, ", in the background" if asynchronous else "")

    def _store_config(self) -> None:
        """Store the config of a resumed run once the run has trained a step."""
        trainer, run = self.trainer, self.trainer.current_run
        text, source = trainer.config_text, run.source
        if text is None or trainer.run_dir is None or run.stage != "fit" or not run.resumes_same_run or source is None:
            return
        step = find.checkpoint_step(to_location(source))
        if trainer.global_step > step and not run_record.is_stored(trainer.run_dir, text):
            run_record.store_config(trainer.run_dir, text, trainer.explicit_config)
            run.run_file.store_config(trainer.run_dir, config_of(text, trainer.explicit_config))

    def save_after_error(self, path: Location, weights_only: bool = False) -> bool:
        """Write a checkpoint of the last finished step from an `on_exception` hook. Return whether it was written.

        A step or validation run in progress is discarded and then repeated when the run resumes. If the run has
        multiple processes, nothing is written, because other processes may have failed or may be in another step.
        """
        trainer, run = self.trainer, self.trainer.current_run
        if run.stage != "fit" or not run.is_complete or not trainer.global_step:
            return False
        if trainer.world_size > 1:
            log.warning("%s was not saved after the error: saving needs all processes, and some may have failed.", path)
            return False
        run.preemption.leave_evaluation()
        # In the middle of a step its gradients and logged values are dropped, because a resumed run repeats the step
        # from its first batch.
        if run.metrics.step == trainer.global_step:
            run.strategy.abandon_step()
            run.metrics.rewind(trainer.global_step)
        try:
            self.save(path, weights_only, asynchronous=False)
        except LegatoError as error:
            log.warning("%s was not saved after the error. %s", path, error)
            return False
        return True

    def _write(self, path: Location, saved: dict[str, Any], asynchronous: bool, frozen: Collection[str] = ()) -> None:
        ranks = self.trainer.strategy.state_dicts.writers
        if self.trainer.running:
            self.require_run_dir()
        # `join`, not `wait`, which raises: this save may be the last chance (after SIGTERM), so an earlier error is
        # raised only after it. Joined before the locks are checked, because a background save checks them, too.
        self.writer.join()
        self._check_locks()
        # the background writer writes only directories; another format is written in the foreground
        is_directory = type(self.format) is DirectoryFormat
        options: dict[str, Any] = {"frozen": frozen, "check_locks": self._check_locks} if is_directory else {}
        if asynchronous and is_directory:
            self.writer.save(path, saved, ranks=ranks, run=self.run_id, **options)  # raises the previous save's error
            return
        try:
            self.format.write(self._for_format(path), saved, ranks, self.run_id, **options)
        except CheckpointError as error:
            try:
                self.writer.check()
            except CheckpointError as earlier:
                raise CheckpointError(f"{error} The previous save failed too. {earlier}") from error
            raise
        self.writer.check()

    def _check_locks(self) -> None:
        """At the start and end of a save, raise CheckpointError if another run has taken one of this run's folders.

        A run on another machine may have done so if this process was suspended for a long time.
        """
        for lock in list(self.locks.values()):
            lock.check()

    def _for_format(self, path: Location) -> Any:
        """Return the path as the format expects it. Raises ConfigError for an address if the format is not Legato's."""
        if not isinstance(self.format, DirectoryFormat):
            require_local(path, "The checkpoint")
        return path

    def read(self, path: Location, ranks: Ranks, names: Collection[str], in_parts: Collection[str]) -> dict[str, Any]:
        """Return the contents of a checkpoint; see `CheckpointFormat.read`."""
        return self.format.read(self._for_format(path), ranks, names, in_parts)

    def own_in(self, folder: Location) -> dict[str, int]:
        """Return the steps of this run's checkpoints in a folder, keyed by checkpoint name."""
        paths = [path for path in find.checkpoints_in(folder) if find.is_checkpoint_of(self.run_id, path)]
        return {path.name: find.checkpoint_step(path) for path in paths}

    def read_index(self, folder: Location) -> CheckpointIndex | None:
        """Return a checkpoint folder's index; None if it is missing or was written by another program."""
        return folder_at(folder).read_index()

    def write_index(self, folder: Location, index: CheckpointIndex) -> None:
        """Write a checkpoint folder's index. Does nothing on ranks other than 0."""
        if not self.trainer.is_global_zero:
            return
        # do not fail here on a single rank: the next save will fail for the same reason on all ranks
        try:
            self.require_run_dir()
            folder_at(folder).make()
            folder_at(folder).write_index(index)
        except ConfigError:
            return
        except OSError as error:
            log.warning("%s could not be written: %s.", folder / INDEX, error.strerror or error)

    # --- removing ---------------------------------------------------------------------------------------------------
    def remove(self, path: Location) -> None:
        """Delete one of this run's checkpoints. Does nothing on ranks other than 0.

        Raises CheckpointError if an earlier save failed, or if the path is not one of this run's checkpoints.
        """
        if self.trainer.is_global_zero:
            self.writer.wait()
            self.format.remove(self._for_format(path), self.run_id)

    def discard(self, path: Location) -> None:
        """Delete a checkpoint that is no longer needed. Warn if it was deleted, moved or changed in the meantime."""
        if self.trainer.is_global_zero:
            self.writer.wait()
            try:
                self.format.remove(self._for_format(path), self.run_id)
            except CheckpointError as error:
                log.warning("%s The run continues and leaves it unchanged.", error)


def new_identity() -> str:
    """Return a new, unique id for a run."""
    return uuid.uuid4().hex
