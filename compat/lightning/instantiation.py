"""Objects from the configs of a LightningCLI, by jsonargparse where it is installed."""

from collections.abc import Sequence
from typing import Any, TypeVar

from .placeholders import UnsupportedError

ModuleType = TypeVar("ModuleType")


def require_jsonargparse() -> None:
    """Raise UnsupportedError where jsonargparse is not installed."""
    try:
        import jsonargparse  # noqa: F401
    except ModuleNotFoundError:
        raise UnsupportedError(
            'LightningCLI needs jsonargparse: pip install "jsonargparse[signatures]". Without it `legato fit '
            "CONFIG.yaml task.lr=0.1 trainer.max_epochs=2` does the same with a config of Legato's (`_target_` for "
            "class_path)."
        ) from None


def made_of(parser: Any, config: Any, instantiators: Sequence[tuple[Any, type, bool]] = ()) -> Any:
    """Return a config with objects instead of their descriptions, by the name that jsonargparse has for it."""
    if hasattr(parser, "instantiate"):
        return parser.instantiate(config, instantiators=list(instantiators))
    for function, kind, subclasses in instantiators:
        parser.add_instantiator(function, kind, subclasses=subclasses)
    return parser.instantiate_classes(config)


def instantiate_module(class_type: type[ModuleType], config: dict[str, Any]) -> ModuleType:
    """Return an object of a class, or of the subclass that `config["_class_path"]` names, made from a config."""
    require_jsonargparse()
    from jsonargparse import ArgumentParser

    parser, values = ArgumentParser(exit_on_error=False), dict(config)
    path = values.pop("_class_path", None)
    if path is None:
        parser.add_class_arguments(class_type, "module", fail_untyped=False)
    else:
        parser.add_subclass_arguments(class_type, "module", fail_untyped=False)
        values = {"class_path": path, "dict_kwargs": values}
    made: ModuleType = made_of(parser, parser.parse_object({"module": values})).module
    return made
