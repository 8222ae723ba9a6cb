"""CheckpointFormat: the interface of checkpoint formats. DirectoryFormat is Legato's own format."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ...base.location import Location
from ..checkpoints import commit, find, storage
from ..checkpoints.foreign import read_contents
from ..checkpoints.reading import read_checkpoint
from ..processes.ranks import Ranks


@runtime_checkable
class CheckpointFormat(Protocol):
    """Stores checkpoints in a format other than Legato's directories: `Trainer(checkpoint_format=MyFormat())`.

    `contents` is a dict of plain containers, numbers, strings and tensors on any device. Resuming is exact only if
    `read` returns the values that `write` received. If the strategy shards states, their tensors are DTensors, and each
    rank has a shard. Legato pickles the format object when it starts a run's processes.
    """

    def name(self, step: int) -> str:
        """Return the default name of a step's checkpoint, or an absolute path outside the run directory."""
        ...

    def write(self, path: Path, contents: Mapping[str, Any], ranks: Ranks, run: str) -> None:
        """Write a checkpoint atomically. An existing checkpoint with the same name is replaced.

        Args:
            path: path of the checkpoint. Its parent folder may not exist yet.
            contents: the state of the run.
            ranks: the ranks that call this together (all ranks if states are sharded, otherwise only rank 0).
            run: id of the run. `remove` later receives the same id.

        Raises CheckpointError, on every rank, if a value cannot be stored or writing fails.
        """
        ...

    def read(self, path: Path, ranks: Ranks, names: Collection[str], in_parts: Collection[str]) -> dict[str, Any]:
        """Return the contents of a checkpoint with tensors in host memory. All ranks in `ranks` must call this.

        Args:
            path: path of the checkpoint, which has not been verified yet.
            ranks: the run's processes.
            names: names in the task's state dict. Files from other programs may add a prefix to the names.
            in_parts: keys of contents for which a rank needs only its slices of sharded tensors. Returning full tensors
                is also allowed.

        Raises CheckpointError, on every rank, if the checkpoint is damaged.
        """
        ...

    def remove(self, path: Path, run: str) -> None:
        """Delete a checkpoint of the run with id `run`. Raises CheckpointError for anything else."""
        ...


class DirectoryFormat:
    """Legato's format: a directory with checksums and no pickled data. Sharded states are stored as shards."""

    # This class only makes calls: checkpoints/ implements the format, without knowledge of runs and trainers.

    def name(self, step: int) -> str:
        """Return `step-00001200`."""
        return find.directory_name(step)

    def write(self, path: Location, contents: Mapping[str, Any], ranks: Ranks, run: str, **options: Any) -> None:
        """Write each rank's shards, then the manifest. For `options`, see `commit.write`."""
        commit.write(path, contents, ranks=ranks, run=run, **options)

    def read(self, path: Location, ranks: Ranks, names: Collection[str], in_parts: Collection[str]) -> dict[str, Any]:
        """Verify and read a directory, or read another program's file, such as a state dict from `torch.save`."""
        if not storage.is_file(path):
            return read_checkpoint(path, in_parts, ranks)
        with storage.local_file(path) as file:
            return read_contents(file, names)

    def remove(self, path: Location, run: str) -> None:
        """Delete the directory if its manifest contains this run's id."""
        storage.remove(path, run)
