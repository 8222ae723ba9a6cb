"""Sends functions, results and exceptions with tracebacks between a process and its workers, using cloudpickle.

The pickled files are in a private folder and are read within seconds by a process that belongs to the same user and
run. The folder is then removed, so no pickled data is kept.
"""

import io
import logging
import multiprocessing
import os
import pickle
import re
import signal
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from ...base.errors import ConfigError, LegatoError, WorkerError
from ...base.messages import let_be_seen

log = logging.getLogger("legato")

# errors that gloo, NCCL and the store raise after another rank has exited; they are never the cause of a failure
_BROKEN_CONNECTION = re.compile(
    "gloo/|NCCL|Connection (closed|reset) by peer|Broken pipe|Socket Timeout|Timed out wait|Wait timeout"
)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler for functions and results, with special handling for classes in some modules.

    Classes from the modules in `named` are sent by name, because the receiver has the original classes and must not
    receive copies. Classes from the modules in `placed` are sent by value and registered in their module.
    """

    def __init__(self, file: io.BytesIO, named: frozenset[str], placed: frozenset[str]) -> None:
        super().__init__(file, protocol=5)
        self._named, self._placed = named, placed

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj.__module__ in self._named and "<" not in obj.__qualname__:
            return _named_class, (obj.__module__, obj.__qualname__)
        if _needs_its_process(obj):
            raise ConfigError(
                f"A MosaicML {type(obj).__name__} was created before the worker processes started, but its shared "
                "memory belongs to the process that created it. Create it in train_dataloader() or setup(), which each "
                "process calls, or start the script with torchrun."
            )
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            # such as torch.backends.cudnn, which cloudpickle does not recognize as a module
            return import_module, (obj.__name__,)
        if (type(obj).__module__, type(obj).__qualname__) == ("torch.nn.parameter", "Parameter"):
            # torch's pickling leaves an empty dict of hooks, so each backward pass would call Python per parameter
            return _parameter, (obj.data, obj.requires_grad, vars(obj))
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and obj.__module__ in self._placed and obj.__qualname__.isidentifier():
            make, arguments, *state = reduced
            return _place, (obj.__qualname__, obj.__module__, make, arguments), *state
        return reduced


def _needs_its_process(obj: Any) -> bool:
    """Return whether an object is a MosaicML dataset, which each process must create itself.

    If the dataset were copied, the ranks would wait for each other during the first epoch.
    """
    kind = getattr(sys.modules.get("streaming.base.dataset"), "StreamingDataset", None)
    return kind is not None and isinstance(obj, kind)


def _named_class(module: str, name: str) -> Any:
    return attrgetter(name)(sys.modules[module])


def _parameter(data: Any, requires_grad: bool, attributes: dict[str, Any]) -> Any:
    from torch import nn

    parameter = nn.Parameter(data, requires_grad)
    vars(parameter).update(attributes)
    return parameter


def pack(content: Any, named: frozenset[str] = frozenset(), placed: frozenset[str] = frozenset()) -> bytes:
    """Pickle `content` and return the bytes. For `named` and `placed`, see `_Pickler`."""
    file = io.BytesIO()
    _Pickler(file, named, placed).dump(content)
    return file.getvalue()


def unpack(path: Path, index: int = 0) -> Any:
    """Return the object at position `index` in a file packed by one of this run's processes."""
    with path.open("rb") as file:
        for _ in range(index):
            pickle.load(file)
        return pickle.load(file)


@contextmanager
def pickled_by_value() -> Iterator[frozenset[str]]:
    """In this context, pickle by value the objects of modules workers cannot import. Yields the modules' names.

    These modules are the caller's script or notebook, and modules that a tool loaded from a file (as in pytest's
    importlib mode).
    """
    registered = cloudpickle.list_registry_pickle_by_value()
    files = _module_files()
    names = files.keys() - _importable(files).keys()
    added = [sys.modules[name] for name in names - registered]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield frozenset(names) | registered | {"__main__"}
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


_IN_EACH_PROCESS = "__main__", "__mp_main__", __name__.partition(".")[0]
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _module_files() -> dict[str, str]:
    """Return the files of all modules that are not installed, except the script and Legato, keyed by module name."""
    # not getattr, with which a lazy module imports others; an alias is checked under the real name
    modules = [(name, getattr(module, "__dict__", {})) for name, module in list(sys.modules.items())]
    named = [(name, content.get("__file__") or "") for name, content in modules if content.get("__name__") == name]
    files = {name: file for name, file in named if name.partition(".")[0] not in _IN_EACH_PROCESS}
    return {name: file for name, file in files.items() if file and not file.startswith(_INSTALLED)}


def _importable(files: Mapping[str, str]) -> dict[str, str]:
    """Return the modules that a new interpreter would import from their files, in the same order."""
    search_path = tuple(map(os.path.abspath, sys.path))  # "" is the working directory, which may change
    return {name: file for name, file in files.items() if _is_importable(name, file, search_path)}


@cache
def _is_importable(name: str, file: str, search_path: tuple[str, ...]) -> bool:
    """Return whether a new interpreter with this search path, the current one, would import the file as the module."""
    spec = _find_spec(name)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(file).resolve()


def _find_spec(name: str) -> ModuleSpec | None:
    """Find a module as a new interpreter would."""
    parent, _, _ = name.rpartition(".")
    package = _find_spec(parent) if parent else None
    path = package.submodule_search_locations if package else None
    if parent and path is None:
        return None
    # not importlib.util.find_spec, which looks into sys.modules: a worker has not imported the modules
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find else None
        if spec is not None:
            return spec  # type: ignore[no-any-return]
    return None


def _place(name: str, module: str, make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """Create a class that was sent by value and register it in its module, so that plain pickle finds it.

    Loader workers send batches using plain pickle, and batches may contain dataclasses from the caller's script.
    """
    kind, home = make(*arguments), _import_or_make(module)
    if not hasattr(home, name):
        setattr(home, name, kind)
    return kind


def _import_or_make(name: str) -> ModuleType:
    """Return the module with the given name. If there is none, create an empty one and any missing parent packages."""
    parent, _, _ = name.rpartition(".")
    if parent and _find_spec(parent) is None:
        _import_or_make(parent)
    return sys.modules.setdefault(name, ModuleType(name))


def modules_beside_script() -> list[str]:
    """Return the modules that the script imported from its own folder, in import order.

    A worker must also import modules that the script imports only for their side effects, such as registration.
    Modules sent by value are excluded.
    """
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        return []
    folder = str(Path(file).resolve().parent) + os.sep
    return list(_importable({name: path for name, path in _module_files().items() if path.startswith(folder)}))


class Settings:
    """The caller's interpreter settings, torch settings and script modules, for workers to copy."""

    def __init__(self, method: str) -> None:
        from ..switches import read_switches

        chosen = multiprocessing.get_start_method(allow_none=True)
        # the start method of a loader's workers: fork, as in a plain script
        self.start_method = chosen or ("fork" if method == "forkserver" else None)
        self.warnings = list(warnings.filters)
        names = ["", *logging.Logger.manager.loggerDict]
        self.levels = {name: level for name in names if (level := logging.getLogger(name).level)}
        self.shows_messages = bool(logging.getLogger("legato").handlers)
        plain = [handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler]
        self.formatter = (plain[0].formatter or logging.Formatter()) if plain else None
        # without threads, because a worker gets its share of them when it starts
        self.switches = {name: value for name, value in read_switches().items() if name != "threads"}
        self.modules = modules_beside_script()

    def apply(self) -> None:
        """Apply the settings to this process."""
        from ..switches import write_switches

        if self.start_method:
            multiprocessing.set_start_method(self.start_method, force=True)
        warnings.resetwarnings()
        warnings.filters.extend(self.warnings)  # type: ignore[attr-defined]
        if self.formatter:
            handler = logging.StreamHandler()
            handler.setFormatter(self.formatter)
            logging.getLogger().addHandler(handler)
        if self.shows_messages:
            let_be_seen()
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
        write_switches(self.switches)
        for name in self.modules:
            try:
                import_module(name)
            except Exception as error:  # the script's functions may not need the module
                log.warning("A worker cannot import %s, which the script imported: %s", name, error)


@dataclass
class Failure:
    """Failure of a worker."""

    event: str
    """What happened: the predicate of a sentence whose subject is the rank, as in `summary`."""
    text: str = ""
    """Traceback, with the tracebacks of the exceptions that caused it."""
    raised: bytes | None = None
    """The pickled exception and its arguments; None if it cannot be pickled."""
    communication: bool = False
    """True if the worker only noticed that another rank had exited."""
    signal: int = 0
    """Signal that ended the worker (SIGINT for a KeyboardInterrupt); 0 if there is none."""
    is_forced: bool = False
    """True if the worker was killed because it did not respond to `signal`."""
    rank: int = 0
    world_size: int = 1
    when: float = field(default_factory=time.monotonic)
    """Time of the failure in seconds, according to the machine's monotonic clock."""

    @classmethod
    def of_exception(cls, error: BaseException, named: frozenset[str] = frozenset()) -> "Failure":
        """Return the failure for an exception."""
        calls = error.__traceback__
        # leave out the frames of launch.py
        while calls is not None and calls.tb_frame.f_code.co_filename == str(Path(__file__).with_name("launch.py")):
            calls = calls.tb_next
        text = "".join(traceback.format_exception(type(error), error, calls)).rstrip()
        if isinstance(error, SystemExit):
            return cls(f"called sys.exit({error.code!r}) before its work was done", text)
        event = f"failed with {type(error).__name__}"
        try:
            # also the arguments: a constructor that formats them would format the finished message again
            raised = pack((error, error.args), named)
        except Exception:  # pickling the exception's attributes may raise anything; then only the text is sent
            raised = None
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0
        return cls(event, text, raised, is_communication(error), number)

    @classmethod
    def of_exit(cls, exitcode: int | None) -> "Failure":
        """Return the failure for the exit code of a process that wrote no report."""
        if exitcode is None or exitcode >= 0:
            return cls(f"ended with exit code {exitcode} before its work was done")
        name = signal.Signals(-exitcode).name if -exitcode in set(signal.Signals) else str(-exitcode)
        remedy = {
            "SIGKILL": "; the system kills processes when memory runs out (see `dmesg`)",
            "SIGABRT": "; its last messages, if any, are above. gloo aborts a process if ranks call different "
            "collectives, or with different shapes: check each stack for a call that not all ranks make",
            "SIGSEGV": "; the stacks of its threads are above",
        }
        return cls(f"was killed by {name}{remedy.get(name, '')}", signal=-exitcode)

    @property
    def interrupted(self) -> bool:
        """True if the worker exited on its own after Ctrl-C."""
        return self.signal == signal.SIGINT and not self.is_forced

    @property
    def summary(self) -> str:
        """The failure as a sentence."""
        return f"Rank {self.rank} of {self.world_size} {self.event}."

    def to_raise(self) -> BaseException:
        """Return the worker's exception. Its cause is a WorkerError with the rank and the traceback.

        If the exception cannot be unpickled, return only the WorkerError.
        """
        cause = WorkerError(f"{self.summary}\n\n{self.text}" if self.text else self.summary, self.rank)
        try:
            error, arguments = (None, ()) if self.raised is None else pickle.loads(self.raised)
        except Exception:  # for example, the exception's constructor has required arguments
            return cause
        if not isinstance(error, BaseException):
            return cause
        error.args = arguments
        error.__cause__ = cause  # frames cannot be pickled, unlike the text of the traceback
        return error


def is_communication(error: BaseException) -> bool:
    """Return whether an error merely means that another rank has exited."""
    from torch.distributed import DistError

    if isinstance(error, LegatoError) or not isinstance(error, RuntimeError):
        return isinstance(error, ConnectionError)
    return isinstance(error, DistError) or bool(_BROKEN_CONNECTION.search(str(error)))
