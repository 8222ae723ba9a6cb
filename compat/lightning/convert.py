"""`legato convert`: converts a checkpoint to a file that Lightning can resume from."""

from argparse import Namespace
from pathlib import Path

from ...base.errors import CheckpointError
from ...trainer.checkpoints import reading, storage
from .checkpoint import to_file, write
from .lightning_files import setting

SUFFIX = ".ckpt"


def run_convert(arguments: Namespace) -> None:
    """Run `legato convert`."""
    source, target = Path(arguments.source), Path(arguments.target)
    if source.is_file():
        raise CheckpointError(
            f"{source} is a file, not a checkpoint folder. To resume from a Lightning checkpoint, use "
            "`legato lightning SCRIPT`. To load only its weights, use load_from_checkpoint."
        )
    epoch, step = convert_checkpoint(source, target)
    print(f"epoch {epoch}, step {step}  {target}")


def convert_checkpoint(source: Path, target: Path) -> tuple[int, int]:
    """Convert a checkpoint to Lightning's format and return its epoch and step.

    If `source` is a folder of checkpoints, its latest complete checkpoint is converted. Raises CheckpointError if there
    is no checkpoint, if `target` exists, or if `target` has the wrong suffix.
    """
    storage.require_new(target)
    if target.suffix != SUFFIX:
        raise CheckpointError(f"{target}: the name of a Lightning checkpoint must end in {SUFFIX}.")
    contents = reading.read(source)
    state = contents.get("state")
    if state is not None and not setting(contents, "training.automatic_optimization", default=True):
        contents["global_step"] = state["optimizer_steps"]  # Lightning counts optimizer steps in manual optimization
    write(target, to_file(contents))
    return int(contents["epoch"]), int(contents["global_step"])
