"""Checkpoints in Lightning's format: files of plain containers and tensors that `torch.load` can read.

The file has Lightning's keys. The additional state that Legato needs for an exact resume (replicas, positions in the
data, the epoch's sums and the fingerprint) is stored under the `legato` key, which Lightning ignores. Values that
contain code, such as a module among the hyperparameters, are stored as nested pickles, which `torch.load` reads only
with weights_only=False. By default, `read` omits nested pickles that this process did not write.
"""

import hashlib
import logging
import os
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from io import BytesIO
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...base.errors import CheckpointError
from ...tasks.hyperparameters import plain_containers
from ...trainer.checkpoints.foreign import plain_names, read_contents
from ...trainer.checkpoints.shards import ShardBlock, shard_block
from ...trainer.checkpoints.storage import whole_file
from ...trainer.resume.parameter_names import named, numbered
from ...trainer.resume.rebuild import averaged_weights, averaging_state
from .lightning_files import AVERAGING, FORMAT_VERSION, LIGHTNING, SCALER, TRAINED, contents_of, loops_of

log = logging.getLogger("legato")

KEY = "legato"
LEFT_OUT, BUILT = "hyper_parameters_left_out", "hyper_parameters_built"
"""Keys in a checkpoint that list the hyperparameters that are code, and those built from a config."""
OF_LEGATO = {
    *("state", "run_id", "fingerprint", "optimizer_names", "metrics", "callback_metrics", "data", "versions", "config"),
}
"""Keys of a checkpoint's contents that are stored under KEY; all others belong to Lightning or the program."""
written: set[str] = set()
"""SHA-256 hashes of the pickles that this process has written."""
load_pickle: Any = torch.UntypedStorage(0).__reduce__()[0]
"""The function that torch's pickles call to read a nested pickle."""


class Code:
    """A value that `torch.load` would reject. It is stored as a pickle that weights_only=True does not unpickle."""

    def __init__(self, pickled: bytes) -> None:
        self.pickled = pickled

    def __reduce__(self) -> tuple[Any, ...]:
        """Make `torch.load` restore the original value when it reads the file with weights_only=False."""
        return load_pickle, (self.pickled,)


# --- what a file may contain ------------------------------------------------------------------------------------------
def _plain_classes() -> list[Any]:
    """Return the classes that `torch.load` may load besides torch's own. Loading them never executes arbitrary code."""
    kinds = {type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OVM"}
    classes: list[Any] = [timedelta, PosixPath, np.ndarray, np.dtype, *kinds]
    # a nested pickle is not read
    classes.append((Code, f"{load_pickle.__module__}.{load_pickle.__qualname__}"))
    # the functions that pickles of arrays and array scalars call
    classes += [np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
    with suppress(ImportError):
        from omegaconf import DictConfig, ListConfig, base, nodes

        classes += [DictConfig, ListConfig, base.ContainerMetadata, base.Metadata, nodes.AnyNode, Any, defaultdict]
        classes += [dict, list, int, float, str, bool]
    return classes


def _wrapped(name: str, value: Any) -> Any:
    """Return a value, wrapped in Code if `torch.load` would reject it. Pickling errors are propagated."""
    # only torch knows which values its reader rejects, and it checks only files
    buffer = BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    if not torch.serialization.get_unsafe_globals_in_checkpoint(buffer):
        return value
    written.add(hashlib.sha256(buffer.getvalue()).hexdigest())
    return Code(buffer.getvalue())


def _is_nested(key: str, value: Any) -> bool:
    """Return whether the key in a file maps to a dict of the program's values."""
    return isinstance(value, dict) and (key.endswith("hyper_parameters") or key in ("callbacks", KEY))


def _wrap_code(values: Mapping[str, Any], is_outer: bool = True) -> dict[str, Any]:
    """Return a file's contents, with values that `torch.load` would reject wrapped in Code."""
    wrapped = {}
    for key, value in values.items():
        try:
            wrapped[key] = _wrap_code(value, False) if is_outer and _is_nested(key, value) else _wrapped(key, value)
        except Exception as error:  # any error that one of the program's classes raises when it is pickled
            log.warning("The checkpoint does not contain %s, which cannot be pickled: %s", key, error)
    return wrapped


# --- between the contents of a run's checkpoint and those of a file ---------------------------------------------------
def is_omegaconf(value: Any) -> bool:
    """Return whether a value is an OmegaConf config."""
    return type(value).__module__.startswith("omegaconf.")


def to_file(contents: Mapping[str, Any], data_module: Any = None) -> dict[str, Any]:
    """Convert the contents of a checkpoint to Lightning's format. Legato's state is stored under KEY."""
    of_legato = {key: contents[key] for key in OF_LEGATO if key in contents}
    saved = {key: value for key, value in contents.items() if key not in OF_LEGATO}
    scale, data = saved.pop("precision", None), saved.pop("datamodule", None)
    if "optimizer_states" in saved:
        pairs = [(state, *numbered("optimizer", state, None)) for state in saved["optimizer_states"]]
        # Lightning's part of the file numbers the parameters; Legato's part contains their names, if they have any
        of_legato["optimizer_names"] = [
            [group["params"] for group in state["param_groups"]] if groups else None for state, _, groups in pairs
        ]
        saved["optimizer_states"] = [state for _, state, _ in pairs]
    for prefix in ("", "datamodule_"):
        for key in (LEFT_OUT, BUILT):
            saved.pop(prefix + key, None)
        if not saved.get(f"{prefix}hyper_parameters"):
            saved.pop(f"{prefix}hyper_parameters", None)
        else:
            saved.setdefault(f"{prefix}hparams_name", "kwargs")
    saved |= {LIGHTNING: FORMAT_VERSION, "loops": loops_of(contents) if "state" in contents else {}}
    saved |= {SCALER: scale} if scale else {}
    saved |= {type(data_module).__qualname__: data} if data and data_module is not None else {}
    averaging = averaging_state(contents)
    if averaging is not None:
        saved[TRAINED], saved[AVERAGING] = contents["state_dict"], {"n_averaged": torch.tensor(averaging["updates"])}
        saved["state_dict"] = averaged_weights(contents)
    return {**saved, KEY: of_legato}


def from_file(trainer: Any, path: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the contents of a Legato or Lightning file to those of a run's checkpoint."""
    if KEY in saved:
        contents = {key: value for key, value in saved.items() if key != KEY} | dict(saved[KEY])
        if "state" in contents:
            contents["state_dict"] = saved.get(TRAINED, saved["state_dict"])
            contents["precision"] = saved.get(SCALER, {})
            pairs = zip(saved["optimizer_states"], contents.pop("optimizer_names"), strict=True)
            contents["optimizer_states"] = [named(state, names) for state, names in pairs]
    elif LIGHTNING in saved:
        contents = contents_of(trainer, path, _with_averages(saved))
    else:
        return dict(saved)
    name = type(trainer.current_run.datamodule).__qualname__
    return {**contents, "datamodule": saved[name]} if saved.get(name) else contents


def _with_averages(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Add averaged weights, which Lightning stores separately, to the states of the callbacks that average weights."""
    states = dict(saved.get("callbacks") or {})
    for key, state in states.items() if TRAINED in saved else ():
        if isinstance(state, dict) and "latest_update_step" in state:
            tensors = {name: value for name, value in saved["state_dict"].items() if isinstance(value, Tensor)}
            averages = {name: value for name, value in tensors.items() if value.is_floating_point()}
            count = int(saved.get(AVERAGING, {}).get("n_averaged", 0))
            states[key] = {**state, "updates": count, "averages": averages}
    return {**saved, "callbacks": states} if "callbacks" in saved else dict(saved)


def with_hyperparameters(contents: Mapping[str, Any], owners: Mapping[str, Any]) -> dict[str, Any]:
    """Return checkpoint contents whose hyperparameters have the program's types, including code and OmegaConf
    containers.

    Values that a hook has changed are preserved. `owners` maps key prefixes to the module and the data module.
    """
    contents = dict(contents)
    for prefix, owner in owners.items():
        values = contents.get(f"{prefix}hyper_parameters")
        if values is None or owner is None:
            continue
        left_out = contents.get(prefix + LEFT_OUT) or ()
        if is_omegaconf(owner.hparams) and values == plain_containers(owner.hparams):
            contents[f"{prefix}hyper_parameters"] = owner.hparams
            continue
        values = dict(values)
        for name, value in owner.hparams.items():
            is_unchanged = is_omegaconf(value) and values.get(name) == plain_containers(value)
            if is_unchanged or (name in left_out and name not in values):
                values[name] = value
        contents[f"{prefix}hyper_parameters"] = values
    return contents


# --- files ------------------------------------------------------------------------------------------------------------
def write(path: Path, saved: dict[str, Any]) -> None:
    """Write a file atomically. Raises CheckpointError on failure."""
    # the file is renamed when it is complete, so a reader never sees a partial file
    with whole_file(path) as partial, torch.serialization.safe_globals(_plain_classes()):
        try:
            torch.save(saved, partial)
            has_code = bool(torch.serialization.get_unsafe_globals_in_checkpoint(partial))
        except OSError:
            raise
        except Exception:  # a value that cannot be pickled, or a full disk, which makes the next attempt fail too
            has_code = True
        if has_code:
            try:
                torch.save(_wrap_code(saved), partial)
            except RuntimeError as error:  # raised by torch's writer, for example on a full disk
                raise OSError(str(error)) from error
        # sync before the rename, or a power cut could leave an empty file under the final name
        descriptor = os.open(partial, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def write_module(path: Path, module: Any) -> None:
    """Write a file containing the weights of a module that is not part of a run."""
    write(path, {"state_dict": module.state_dict(), LIGHTNING: FORMAT_VERSION})


def read(source: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
    """Read a file. With weights_only=False, which only the program can set, code in the file may be executed."""
    is_trusted = weights_only is False
    if isinstance(source, (str, Path)):
        _require_undamaged(Path(source))
    try:
        with torch.serialization.safe_globals(_plain_classes()):
            saved = torch.load(source, map_location=map_location, weights_only=True)
    except Exception:  # a file from Lightning or another library that contains code
        if not is_trusted:
            raise
        if hasattr(source, "seek"):
            source.seek(0)
        return torch.load(source, map_location=map_location, weights_only=False)
    return _read_code(saved, is_trusted) if isinstance(saved, dict) else saved


def _read_code(saved: dict[str, Any], is_trusted: bool) -> dict[str, Any]:
    """Read nested pickles that are trusted or were written by this process. Omit all others and log a warning."""
    places = [("", saved, key) for key in saved]
    places += [(key, values, name) for key, values in saved.items() if _is_nested(key, values) for name in values]
    left_out = []
    for key, holder, name in places:
        code = holder[name]
        # a pickle from this process is as trustworthy as the process; its hash shows that the file is the same
        if isinstance(code, Code) and (is_trusted or hashlib.sha256(code.pickled).hexdigest() in written):
            holder[name] = torch.load(BytesIO(code.pickled), map_location="cpu", weights_only=False)
        elif isinstance(code, Code):
            del holder[name]
            if key.endswith("hyper_parameters"):
                saved.setdefault(key.removesuffix("hyper_parameters") + LEFT_OUT, []).append(name)
            else:
                left_out.append(f"{key}.{name}".lstrip("."))
    if left_out:
        log.warning("Skipped code in the checkpoint: %s. To load it, pass weights_only=False.", ", ".join(left_out))
    return saved


def _require_undamaged(path: Path) -> None:
    """Raise CheckpointError if a file is damaged. Torch itself does not verify the file's checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, FileNotFoundError, IsADirectoryError):
        return  # a file from an old torch version or another program; torch reports any error
    if damaged:
        raise CheckpointError(f"{path} is damaged: the checksum of {damaged} does not match.")


def run_of(path: Path) -> str | None:
    """Return the id of the run that wrote a file, or None if no run wrote it. The tensors are not read."""
    # a file that cannot be read is not from this run, and the run must not touch it
    with suppress(Exception), torch.serialization.safe_globals(_plain_classes()):
        return str(torch.load(path, map_location="cpu", weights_only=True, mmap=True)[KEY]["run_id"])
    return None


def in_one_piece(value: Any, ranks: Any) -> Any:
    """Return nested values with all sharded tensors gathered on rank 0. Every rank in `ranks` must call this."""
    block = value if isinstance(value, ShardBlock) else shard_block(value) if isinstance(value, Tensor) else None
    if block is not None:
        parts = ranks.gather_objects((block.offset, block.block.cpu()))
        tensor = torch.empty(block.shape if ranks.rank == 0 else (0,), dtype=block.block.dtype)
        for offset, shard in parts if ranks.rank == 0 else ():
            tensor[tuple(slice(start, start + size) for start, size in zip(offset, shard.shape, strict=True))] = shard
        return tensor
    if type(value) in (dict, OrderedDict):
        return type(value)((key, in_one_piece(item, ranks)) for key, item in value.items())
    return type(value)(in_one_piece(item, ranks) for item in value) if type(value) in (list, tuple) else value


# --- of a run ---------------------------------------------------------------------------------------------------------
class LightningFile:
    """Checkpoint format for runs in Lightning compatibility mode: one file that Lightning can load."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.states: tuple[Any, Mapping[str, Any]] | None = None
        """Data module and callback states in the checkpoint being evaluated, until they are loaded."""
        self.weights_only: bool | None = None
        """The weights_only value that the program passed for reading the checkpoint."""

    def name(self, step: int) -> str:
        """Return the path of the checkpoint that a run saves when it receives a stop signal, as in Lightning."""
        return os.path.join(os.path.abspath(self.trainer.default_root_dir), f"hpc_ckpt_{step}.ckpt")

    def write(self, path: Path, contents: Mapping[str, Any], ranks: Any, run: str) -> None:
        """Gather all shards on rank 0 and write the file there."""
        current = self.trainer.current_run
        # Lightning's format has no shards: rank 0 gathers them one tensor at a time
        gathered = in_one_piece(dict(contents), ranks)

        def write_all() -> None:
            hyperparameters = with_hyperparameters(gathered, {"": current.task, "datamodule_": current.datamodule})
            write(path, to_file({**hyperparameters, "run_id": run}, current.datamodule))

        ranks.from_first(write_all)

    def read(self, path: Path, ranks: Any, names: Collection[str], in_parts: Collection[str]) -> dict[str, Any]:
        """Read a checkpoint from Legato or Lightning, or the weights from another program's file.

        If the checkpoint contains averaged weights, return those unless a callback continues the averaging.
        """
        contents = self._read(path, ranks, names, in_parts)
        added = self.trainer.current_run.task.configure_callbacks() or []
        callbacks = [*self.trainer.callbacks, *(added if isinstance(added, (list, tuple)) else [added])]
        contents["state_dict"] = averaged_weights(contents, [callback.state_key for callback in callbacks])
        self.states = contents.get("datamodule"), contents.get("callbacks", {})
        return contents

    def load_states(self) -> None:
        """Unless already loaded, load the data module and callback states from the checkpoint being evaluated."""
        data, callbacks = self.states or (None, {})
        self.states = None
        if data and self.trainer.datamodule is not None:
            self.trainer.datamodule.load_state_dict(data)
        for callback in self.trainer.callbacks:
            if callback.state_key in callbacks:
                callback.load_state_dict(callbacks[callback.state_key])

    def _read(self, path: Path, ranks: Any, names: Collection[str], in_parts: Collection[str]) -> dict[str, Any]:
        if path.is_dir():
            raise CheckpointError(f"{path} is a Legato checkpoint. Convert it: legato convert {path} FILE.ckpt")
        try:
            saved = read(path, weights_only=self.weights_only)
        except CheckpointError:
            raise
        except Exception:  # a file from another program, whose reader reports the error
            saved = None
        if not isinstance(saved, dict) or "state_dict" not in saved:
            return read_contents(path, names)
        contents = from_file(self.trainer, path, saved)
        contents["state_dict"] = plain_names(path, contents["state_dict"], names)
        return contents

    def remove(self, path: Path, run: str) -> None:
        """Delete a file that this run wrote. Raises CheckpointError for any other file."""
        if run_of(path) != run:
            reason = "another run wrote it" if path.exists() else "it does not exist"
            raise CheckpointError(f"{path} was not removed: {reason}.")
        path.unlink()
