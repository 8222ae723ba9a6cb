"""Hyperparameters: the arguments of `__init__`, saved so that a checkpoint can rebuild the object."""

import inspect
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

from ..trainer.errors import TaskError


class AttributeDict(dict[str, Any]):
    """A dict whose keys can be read as attributes: `hparams.lr`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"No hyperparameter {name!r}; saved are: {', '.join(self)}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Hyperparameters:
    """Mixin with `save_hyperparameters()` and `hparams`."""

    @property
    def hparams(self) -> AttributeDict:
        """The saved hyperparameters; empty if none were saved."""
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

        args: names of arguments to save, or one mapping, namespace or dataclass whose items are saved; default: all.
        logger: False to leave them out of the loggers.

        Raises TaskError for an unknown name, and for a value that is not made of JSON values (a module, a function),
        since a checkpoint holds no pickle.
        """
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        current = inspect.currentframe()
        own, found = self._init_arguments(frame or (current.f_back if current else None))
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
        unfit: dict[str, TaskError] = self.__dict__.setdefault("_hparams_unfit", {})
        for name in ignored:  # a base class's call sees and saves the arguments of its subclasses
            self.hparams.pop(name, None)
            unfit.pop(name, None)
        for name, value in found.items():
            if name in ignored:
                continue
            try:
                _require_json(value, name)
                self.hparams[name] = value
            except TaskError as error:
                if args or name in own:
                    raise
                unfit[name] = error  # a subclass's argument, which its own call may still ignore

    def require_hyperparameters(self) -> None:
        """Raise TaskError if an argument of a subclass cannot be saved and the subclass did not ignore it."""
        for error in self.__dict__.get("_hparams_unfit", {}).values():
            raise error

    def _init_arguments(self, frame: FrameType | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments of this object's innermost running `__init__`, and of all of them (outermost wins).

        Other methods of the object may be in between, such as a dataclass's `__post_init__`.
        """
        own: dict[str, Any] | None = None
        found: dict[str, Any] = {}
        while frame is not None:
            values = inspect.getargvalues(frame)
            if not values.args or values.locals.get(values.args[0]) is not self:
                break
            if frame.f_code.co_name == "__init__":
                found |= {name: values.locals[name] for name in values.args[1:]}
                if values.keywords:
                    found |= values.locals[values.keywords]
                own = dict(found) if own is None else own
            frame = frame.f_back
        return own or {}, found


def _require_json(value: Any, name: str) -> None:
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        for index, item in enumerate(value):
            _require_json(item, f"{name}[{index}]")
    elif isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            _require_json(item, f"{name}.{key}")
    else:
        argument = name.partition("[")[0].partition(".")[0]
        raise TaskError(
            f"save_hyperparameters: {name!r} is a {type(value).__name__}, and a checkpoint holds JSON values only "
            f"(numbers, strings, booleans, lists, dicts). Leave it out with save_hyperparameters(ignore=[{argument!r}])"
            f", and pass it to load_from_checkpoint(..., {argument}=...)."
        )


def _mapping_items(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(name): item for name, item in value.items()}
    if isinstance(value, Namespace):
        return dict(vars(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    raise TaskError(
        f"save_hyperparameters takes names of arguments, a mapping, a namespace or a dataclass; got "
        f"{type(value).__name__}."
    )
