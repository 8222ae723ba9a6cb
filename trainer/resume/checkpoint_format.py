"""CheckpointFormat: how a run's checkpoints are stored. The one seam for another file format."""

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
    """Stores checkpoints in another format than Legato's directories: `Trainer(checkpoint_format=MyFormat())`.

    `contents` is a dict of plain containers, numbers, strings and tensors on any device; what `write` was given, `read`
    must return for a resume to be exact. Where the strategy shards states, a tensor of it is a DTensor of which each
    rank has a part. A format is pickled when a run starts processes of its own.
    """

    def name(self, step: int) -> str:
        """Return the name of the checkpoint of a step that nobody named; an absolute path puts it elsewhere."""
        ...

    def write(self, path: Path, contents: Mapping[str, Any], ranks: Ranks, run: str) -> None:
        """Write a checkpoint, completely or not at all, in place of an older one of this name.

        Args:
            path: the checkpoint to write; its folder may be missing.
            contents: the state of the run.
            ranks: those that call this together: all where states are sharded, else rank 0 alone.
            run: the id of the run, which `remove` is given later.

        Raises CheckpointError, on every rank, if a value cannot be stored or writing fails.
        """
        ...

    def read(self, path: Path, ranks: Ranks, names: Collection[str], in_parts: Collection[str]) -> dict[str, Any]:
        """Return the contents of a checkpoint, tensors on the host; every one of `ranks` calls it.

        Args:
            path: the checkpoint, which was verified by nobody yet.
            ranks: the processes of the run.
            names: names in the task's state dict, for files of other programs that add a prefix.
            in_parts: keys under which a rank needs only its own slices of sharded tensors; whole ones will do.

        Raises CheckpointError, on every rank, for a checkpoint that is damaged.
        """
        ...

    def remove(self, path: Path, run: str) -> None:
        """Delete a checkpoint that this run wrote. Raises CheckpointError for anything else."""
        ...


class DirectoryFormat:
    """Legato's own format: a directory for each checkpoint, verified by sums, sharded, without pickle."""

    # Calls only: what a checkpoint is lies in checkpoints/, which knows no run and no trainer.

    def name(self, step: int) -> str:
        """Return `step-00001200`."""
        return find.directory_name(step)

    def write(
        self, path: Location, contents: Mapping[str, Any], ranks: Ranks, run: str, frozen: Collection[str] = ()
    ) -> None:
        """Write the shards of each of `ranks`, and the manifest last; `frozen`: see `commit.write`."""
        commit.write(path, contents, ranks=ranks, run=run, frozen=frozen)

    def read(self, path: Location, ranks: Ranks, names: Collection[str], in_parts: Collection[str]) -> dict[str, Any]:
        """Verify and read a directory, or a file of another program, such as a state dict of `torch.save`."""
        if not storage.is_file(path):
            return read_checkpoint(path, in_parts, ranks)
        with storage.local_file(path) as file:
            return read_contents(file, names)

    def remove(self, path: Location, run: str) -> None:
        """Delete the directory, if this run's id is in its manifest."""
        storage.remove(path, run)
