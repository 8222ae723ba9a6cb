"""Objects from the configs of a LightningCLI, by jsonargparse."""

from typing import Any, TypeVar

ModuleType = TypeVar("ModuleType")


def require_jsonargparse() -> None:
    """Raise ModuleNotFoundError where jsonargparse is not installed, with what to do."""
    try:
        import jsonargparse  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "LightningCLI needs jsonargparse: pip install 'legato[lightning]'. Without it `legato fit CONFIG.yaml "
            "task.lr=0.1 trainer.max_epochs=2` does the same with a config of Legato's (`_target_` for class_path).",
            name="jsonargparse",
        ) from None


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
    made: ModuleType = parser.instantiate(parser.parse_object({"module": values})).module
    return made
