"""Functions of the standard library that take a checkpoint as a file, for as long as a program for Lightning runs.

A checkpoint is a directory under the name that the program gave it. To open, copy, rename, remove or look for it as for
a file fails, or puts it into an older checkpoint of that name. Here these calls treat a complete checkpoint, on either
side, as the one file that the program means, and do with everything else what they always did.
"""

import builtins
import errno
import inspect
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import FrameType
from typing import IO, Any, TypeVar

from ...base.run_names import MANIFEST

if sys.platform != "win32":
    import fcntl

T = TypeVar("T")
File = TypeVar("File", bound=IO[bytes])
OWN = __name__.partition(".")[0]
PASSED_ON = frozenset({OWN, "shutil", "pathlib"})
"""Packages whose calls are passed on: this one, and those that call these functions for others."""
SENDERS = frozenset({"wandb"})
"""Packages that hand a path to a process of another language, which reads their copy: it is a file."""
OPENER = 5
"""Place of open's argument `opener` behind the mode."""
is_real_file, open_real = os.path.isfile, io.open
taken: dict[tuple[Any, str], Any] = {}
"""The functions that were replaced, by their owner and name."""


def is_complete(path: Any) -> bool:
    """Return whether a path is a checkpoint with all its files."""
    if not isinstance(path, (str, os.PathLike)) or not is_real_file(os.path.join(os.fspath(path), MANIFEST)):
        return False
    from ...base.errors import CheckpointError
    from ...trainer.checkpoints.find import check_sizes

    try:
        return bool(check_sizes(Path(os.fspath(path))))
    except (CheckpointError, OSError):
        return False


def is_programs_call() -> bool:
    """Return whether the program, or a library, has called the function that asks."""
    frame = inspect.currentframe()
    caller = frame and frame.f_back and frame.f_back.f_back
    return caller is None or package_of(caller) not in PASSED_ON


def package_of(frame: FrameType) -> str:
    """Return the name of the package that a frame runs code of."""
    return str(frame.f_globals.get("__name__")).partition(".")[0]


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let no other process put checkpoints there in the context: each rank of a run may copy one to the same name."""
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # of a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_plain_folder(path: Any) -> bool:
    """Return whether a path is a folder that is no complete checkpoint."""
    return os.path.isdir(path) and not is_complete(path)


def in_place_of(target: Path, action: Callable[[Path], T]) -> T:
    """Do what puts something at a path where a checkpoint, a file or nothing is, which comes back if that fails.

    The action is given a folder beside it.
    """
    with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
        old = Path(beside, "old")
        with suppress(FileNotFoundError):
            os.rename(target, old)
        try:
            return action(Path(beside))
        except BaseException:
            with suppress(FileNotFoundError):
                os.rename(target, Path(beside, "failed"))
            with suppress(FileNotFoundError):
                os.rename(old, target)
            raise


def copying(original: Callable[..., Any], into_folders: bool) -> Callable[..., Any]:
    """Return shutil.copy, copy2 or copyfile for checkpoints: in place of what is there, whole or not at all."""

    def put(source: Any, place: Any, options: dict[str, Any], beside: Path) -> Any:
        stage = beside / "new"
        if is_complete(source):
            shutil.copytree(source, stage)
        else:
            original(source, stage, **options)
        os.rename(stage, place)
        return place

    @wraps(original)
    def copy(src: Any, dst: Any, **options: Any) -> Any:
        if not ((is_complete(src) or is_complete(dst)) and is_programs_call()):
            return original(src, dst, **options)
        if called_by() in SENDERS and is_real_file(dst):
            with open_real(src, "rb", opener=open_checkpoint) as file, open_real(dst, "wb") as copied:
                shutil.copyfileobj(file, copied)
            return dst
        with alone_in(Path(dst).parent):
            place = os.path.join(dst, os.path.basename(src)) if into_folders and is_plain_folder(dst) else dst
            if is_plain_folder(place):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), place)
            if os.path.exists(place) and os.path.samefile(src, place):
                raise shutil.SameFileError(f"{src!r} and {place!r} are the same file")
            return in_place_of(Path(place), partial(put, src, place, options))

    return copy


def moving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return os.rename, os.replace or shutil.move for checkpoints, or a method of Path: in place of what is there."""

    @wraps(original)
    def move(src: Any, dst: Any, *arguments: Any, **options: Any) -> Any:
        action = partial(original, src, dst, *arguments, **options)
        of_folders = options.keys() & {"src_dir_fd", "dst_dir_fd"}  # which the paths are relative to
        if of_folders or not ((is_complete(src) or is_complete(dst)) and is_programs_call()):
            return action()
        with alone_in(Path(dst).parent):
            replaces = is_complete(dst) or (is_complete(src) and is_real_file(dst))
            if not replaces or not os.path.lexists(src) or os.path.samefile(src, dst):
                return action()
            return in_place_of(Path(dst), lambda _: action())

    return move


def removing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return os.remove, os.unlink or Path.unlink for checkpoints."""

    @wraps(original)
    def remove(path: Any, *arguments: Any, **options: Any) -> None:
        of_folder = options.get("dir_fd") is not None  # which the path is relative to
        if not of_folder and not os.path.islink(path) and is_complete(path) and is_programs_call():
            from ...trainer.checkpoints.storage import remove as remove_checkpoint

            remove_checkpoint(Path(path))
        else:
            original(path, *arguments, **options)

    return remove


def finding(original: Callable[..., bool]) -> Callable[..., bool]:
    """Return os.path.isfile or Path.is_file for checkpoints."""

    @wraps(original)
    def is_file(path: Any, **options: Any) -> bool:
        return original(path, **options) or (is_complete(path) and is_programs_call())

    return is_file


def measuring(original: Callable[..., int]) -> Callable[..., int]:
    """Return os.path.getsize for checkpoints: the length of the file that `open` gives, as an upload needs it."""

    @wraps(original)
    def get_size(filename: Any) -> int:
        if not (is_complete(filename) and is_programs_call()):
            return original(filename)
        with open_real(filename, "rb", opener=open_checkpoint) as file:
            return os.fstat(file.fileno()).st_size

    return get_size


def as_file(path: Any, file: File) -> File:
    """Write a checkpoint directory to an open file, as `torch.save` writes it; return it, to be read from there."""
    from ...trainer.checkpoints import reading
    from ...trainer.resume import convert, pickled

    return pickled.pickled(convert.as_lightning(reading.read_checkpoint(Path(os.fspath(path)))), file)


def open_checkpoint(path: Any, flags: int) -> int:
    """Return a descriptor of a file without a name that holds what `legato convert` writes of a checkpoint."""
    with TemporaryFile() as file:
        return os.dup(as_file(path, file).fileno())


def opening(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return open or Path.open for checkpoints, which are read as the file that `legato convert` writes."""

    @wraps(original)
    def open_file(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        try:
            return original(file, mode, *arguments, **options)
        except IsADirectoryError:
            has_opener = len(arguments) > OPENER or options.get("opener") is not None
            if has_opener or set("wax+") & set(mode) or not is_complete(file) or called_by() == OWN:
                raise
        return open_real(file, mode, *arguments, **{**options, "opener": open_checkpoint})

    return open_file


def called_by() -> str:
    """Return the name of the package that has called a function of this module, by itself or by a method of Path."""
    frame = inspect.currentframe()
    while frame is not None and (frame.f_globals.get("__name__") == __name__ or package_of(frame) == "pathlib"):
        frame = frame.f_back
    return "" if frame is None else package_of(frame)


def take_files() -> None:
    """Let these functions take checkpoints as files, in this process."""
    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        *((shutil, name, copying(getattr(shutil, name), name != "copyfile")) for name in ("copy", "copy2", "copyfile")),
        *((owner, name, moving(getattr(owner, name))) for owner in (os, Path) for name in ("rename", "replace")),
        (shutil, "move", moving(shutil.move)),
        *((owner, name, removing(getattr(owner, name))) for owner, name in ((os, "remove"), (os, "unlink"))),
        (Path, "unlink", removing(Path.unlink)),
        (os.path, "isfile", finding(os.path.isfile)),
        (Path, "is_file", finding(Path.is_file)),
        (os.path, "getsize", measuring(os.path.getsize)),
        (builtins, "open", opens := opening(io.open)),
        (io, "open", opens),
        (Path, "open", opening(Path.open)),
    ]
    for owner, name, function in [] if taken else replacements:
        taken[owner, name] = getattr(owner, name)
        function.__module__ = owner.__module__ if isinstance(owner, type) else owner.__name__  # by which it is pickled
        setattr(owner, name, function)


def give_back_files() -> None:
    """Let these functions be what they were."""
    for (owner, name), function in taken.items():
        setattr(owner, name, function)
    taken.clear()


def way_out(error: BaseException | None) -> str:
    """Return what to do instead where an error comes from a checkpoint that was opened as a file; "" for others."""
    while error is not None:
        path = getattr(error, "filename", None)
        if isinstance(error, IsADirectoryError) and is_complete(path):
            return (
                f"legato: {path} is a checkpoint, and a checkpoint is a directory. torch.load and open(PATH, 'rb') "
                f"read it; `legato convert {path} out.ckpt` writes it as a file (docs/from-lightning.md)."
            )
        error = error.__cause__ or error.__context__
    return ""
