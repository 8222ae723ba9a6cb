"""Hyperparameters: the arguments of `__init__`, saved so that a checkpoint can rebuild the object."""

import inspect
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

from ..base.errors import TaskError


class AttributeDict(dict[str, Any]):
    """A dict whose keys can be read as attributes: `hparams.lr`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            # not KeyError, so that hasattr, and getattr with a default, work
            raise AttributeError(f"No hyperparameter {name!r}; saved are: {', '.join(self)}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Hyperparameters:
    """Mixin with `save_hyperparameters()` and `hparams`."""

    @property
    def hparams(self) -> AttributeDict:
        """The saved hyperparameters; empty if none were saved."""
        # not in __init__: a task may save hyperparameters before it calls super().__init__()
        kept: AttributeDict = self.__dict__.setdefault("_hparams", AttributeDict())
        return kept

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save the arguments of the calling `__init__` in `hparams`, in every checkpoint and in the loggers.

        A checkpoint holds no code: modules, classes, functions and other objects are in `hparams` alone.
        Hand them to `load_from_checkpoint`, which names them.

        args: names of arguments to save, or one mapping, namespace or dataclass whose items are saved; default: all.
        logger: False to leave them out of the loggers.

        Raises TaskError for an unknown name.
        """
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        current = inspect.currentframe()
        found = self._init_arguments(frame or (current.f_back if current else None))
        if len(args) == 1 and not isinstance(args[0], str):
            # remember the argument's name: load_from_checkpoint passes all items as that one argument
            names = [name for name, value in found.items() if value is args[0]]
            self.__dict__["_hparams_name"] = names[0] if names else None
            found = _mapping_items(args[0])
        elif args:
            unknown = [name for name in args if name not in found]
            if unknown:
                raise TaskError(
                    f"save_hyperparameters: {unknown[0]!r} is not an argument of __init__ ({sorted(found)})."
                )
            found = {name: found[name] for name in args}
        self.__dict__["_log_hyperparams"] = logger
        for name in ignored:  # a base class's call sees and saves the arguments of its subclasses
            self.hparams.pop(name, None)
        self.hparams.update({name: value for name, value in found.items() if name not in ignored})

    def record_configs(self, configs: Mapping[str, tuple[Any, Any]]) -> None:
        """Record what arguments of `__init__` were built from: by name the argument and its config, plain data.

        Checkpoints and loggers are given the config in place of the object.
        """
        self.__dict__["_hparams_configs"] = dict(configs)

    def logged_hyperparameters(self) -> dict[str, Any] | None:
        """Return what loggers are given of this object when a run begins, in plain dicts and lists; None: nothing."""
        return plain_hyperparameters(self) if self.__dict__.get("_log_hyperparams", True) else None

    def _init_arguments(self, frame: FrameType | None) -> dict[str, Any]:
        """Return the arguments of all running `__init__` of this object (the outermost wins).

        Other methods of the object may be in between, such as a dataclass's `__post_init__`.
        """
        found: dict[str, Any] = {}
        # from the innermost __init__ outwards, so that what a subclass was given replaces what it handed on
        while frame is not None:
            values = inspect.getargvalues(frame)
            # beyond this object's frames: another object's __init__ may have built this one
            if not values.args or values.locals.get(values.args[0]) is not self:
                break
            if frame.f_code.co_name == "__init__":
                found |= {name: values.locals[name] for name in values.args[1:]}
                if values.keywords:
                    found |= values.locals[values.keywords]
            frame = frame.f_back
        return found


def plain_hyperparameters(owner: Hyperparameters) -> dict[str, Any]:
    """Return all hyperparameters, in plain dicts and lists; of what a config built, the config."""
    built = built_hyperparameters(owner)
    return {name: built[name] if name in built else plain_containers(value) for name, value in owner.hparams.items()}


def built_hyperparameters(owner: Hyperparameters) -> dict[str, Any]:
    """Return the configs of those hyperparameters that a config built, by name."""
    recorded = owner.__dict__.get("_hparams_configs", {})
    # by identity: a task may have put another object under the name since the config built one
    return {name: config for name, (value, config) in recorded.items() if owner.hparams.get(name) is value}


def plain_containers(value: Any) -> Any:
    """Convert mappings and sequences of other types, such as OmegaConf's, to dicts and lists."""
    if isinstance(value, Mapping):
        return {key: plain_containers(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain_containers, value))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain_containers(item) for item in value]
    return value


def _mapping_items(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(name): item for name, item in value.items()}
    if isinstance(value, Namespace):
        return dict(vars(value))
    if is_dataclass(value) and not isinstance(value, type):
        # not dataclasses.asdict, which copies values and makes dicts of inner dataclasses
        return {field.name: getattr(value, field.name) for field in fields(value)}
    raise TaskError(
        f"save_hyperparameters takes names of arguments, a mapping, a namespace or a dataclass; got "
        f"{type(value).__name__}."
    )
