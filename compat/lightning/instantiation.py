"""Creates objects from a LightningCLI's configs with jsonargparse."""

from typing import Any, TypeVar

ModuleType = TypeVar("ModuleType")


def require_jsonargparse() -> None:
    """Raise ModuleNotFoundError with installation instructions if jsonargparse is not installed."""
    try:
        import jsonargparse  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "LightningCLI requires jsonargparse: pip install 'legato[lightning]'. Alternatively, use a Legato config "
            "with `_target_` instead of class_path: `legato fit CONFIG.yaml task.lr=0.1 trainer.max_epochs=2`.",
            name="jsonargparse",
        ) from None


def instantiate_module(class_type: type[ModuleType], config: dict[str, Any]) -> ModuleType:
    """Instantiate a class, or the subclass that `config["_class_path"]` specifies, from a config."""
    require_jsonargparse()
    from jsonargparse import ArgumentParser

    parser, values = ArgumentParser(exit_on_error=False), dict(config)
    path = values.pop("_class_path", None)
    if path is None:
        parser.add_class_arguments(class_type, "module", fail_untyped=False)
    else:
        parser.add_subclass_arguments(class_type, "module", fail_untyped=False)
        values = {"class_path": path, "dict_kwargs": values}
    module: ModuleType = parser.instantiate(parser.parse_object({"module": values})).module
    return module
