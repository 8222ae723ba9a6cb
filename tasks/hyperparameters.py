"""Hyperparameters: saves the arguments of `__init__`, so that the object can be rebuilt from a checkpoint."""

import inspect
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

from ..base.errors import TaskError


class AttributeDict(dict[str, Any]):
    """A dict whose keys are also attributes: `hparams.lr`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            # not KeyError: hasattr, and getattr with a default, only catch AttributeError
            raise AttributeError(f"No hyperparameter {name!r} was saved. Saved: {', '.join(self) or 'none'}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Hyperparameters:
    """Mixin with `save_hyperparameters()` and `hparams`."""

    @property
    def hparams(self) -> AttributeDict:
        """The saved hyperparameters; empty until `save_hyperparameters` is called."""
        # not set in __init__: a task may save hyperparameters before it calls super().__init__()
        hparams: AttributeDict = self.__dict__.setdefault("_hparams", AttributeDict())
        return hparams

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save the calling `__init__`'s arguments in `hparams` and in every checkpoint, and pass them to the loggers.

        A checkpoint contains no code, so modules, classes, functions and other objects are kept only in `hparams`. You
        must pass such arguments to `load_from_checkpoint` again. The error message lists any missing arguments.

        Args:
            args: Names of the arguments to save, or a single mapping, namespace or dataclass whose items are saved.
                Default: all arguments.
            ignore: Names to leave out.
            frame: Frame of the `__init__` call. Default: the caller's.
            logger: Whether to pass hyperparameters to the loggers.

        Raises TaskError if a name is unknown.
        """
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        current = inspect.currentframe()
        arguments = self._init_arguments(frame or (current.f_back if current else None))
        if len(args) == 1 and not isinstance(args[0], str):
            # keep the argument's name: load_from_checkpoint passes all items as that argument
            names = [name for name, value in arguments.items() if value is args[0]]
            self.__dict__["_hparams_name"] = names[0] if names else None
            arguments = _mapping_items(args[0])
        elif args:
            unknown = [name for name in args if name not in arguments]
            if unknown:
                raise TaskError(
                    f"save_hyperparameters: {unknown[0]!r} is not an argument of __init__, which takes "
                    f"{', '.join(sorted(arguments))}."
                )
            arguments = {name: arguments[name] for name in args}
        self.__dict__["_log_hyperparams"] = logger
        for name in ignored:  # an earlier call in a base class has also saved the arguments of subclasses
            self.hparams.pop(name, None)
        self.hparams.update({name: value for name, value in arguments.items() if name not in ignored})

    def record_configs(self, configs: Mapping[str, tuple[Any, Any]]) -> None:
        """Record the config that each of the given `__init__` arguments was built from.

        `configs` maps an argument's name to the pair (object, config). Checkpoints and loggers then receive the config,
        which is plain data, instead of the object.
        """
        self.__dict__["_hparams_configs"] = dict(configs)

    def logged_hyperparameters(self) -> dict[str, Any] | None:
        """Return the hyperparameters for loggers as plain dicts and lists, or None to log none."""
        return plain_hyperparameters(self) if self.__dict__.get("_log_hyperparams", True) else None

    def _init_arguments(self, frame: FrameType | None) -> dict[str, Any]:
        """Return the arguments of all running `__init__` calls of this object. The outermost call takes precedence.

        Other methods of the object, such as a dataclass's `__post_init__`, may be on the stack between those calls.
        """
        arguments: dict[str, Any] = {}
        # from the innermost __init__ outwards: a subclass's argument replaces the one that it passed to its base class
        while frame is not None:
            values = inspect.getargvalues(frame)
            # end of this object's frames; the next one may be the __init__ of an object that creates this one
            if not values.args or values.locals.get(values.args[0]) is not self:
                break
            if frame.f_code.co_name == "__init__":
                arguments |= {name: values.locals[name] for name in values.args[1:]}
                if values.keywords:
                    arguments |= values.locals[values.keywords]
            frame = frame.f_back
        return arguments


def plain_hyperparameters(owner: Hyperparameters) -> dict[str, Any]:
    """Return all hyperparameters as plain dicts and lists, with configs in place of the objects built from them."""
    built = built_hyperparameters(owner)
    return {name: built[name] if name in built else plain_containers(value) for name, value in owner.hparams.items()}


def built_hyperparameters(owner: Hyperparameters) -> dict[str, Any]:
    """Return the configs that hyperparameters were built from, keyed by hyperparameter name."""
    recorded = owner.__dict__.get("_hparams_configs", {})
    # by identity: the task may have replaced the object that the config built
    return {name: config for name, (value, config) in recorded.items() if owner.hparams.get(name) is value}


def plain_containers(value: Any) -> Any:
    """Recursively convert mappings and sequences, such as OmegaConf's, to dicts and lists."""
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
        # not dataclasses.asdict, which copies values and converts nested dataclasses to dicts
        return {field.name: getattr(value, field.name) for field in fields(value)}
    raise TaskError(
        f"save_hyperparameters: expected names, a mapping, a namespace or a dataclass, got {type(value).__name__}."
    )
