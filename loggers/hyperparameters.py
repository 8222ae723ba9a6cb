"""Converts hyperparameters to YAML or to flat names for loggers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

HPARAMS_FILE = "hparams.yaml"


def write_hyperparameters(folder: Path, params: Mapping[str, Any]) -> None:
    """Write `hparams.yaml`. Values other than numbers, strings, lists and mappings become strings."""
    folder.mkdir(parents=True, exist_ok=True)
    # "{}" instead of an empty file, which YAML reads as null
    (folder / HPARAMS_FILE).write_text(yaml.safe_dump(plain(params), sort_keys=False) if params else "{}\n")


def plain(value: Any) -> Any:
    """Convert a value to types that YAML and JSON support."""
    # bool first: it is a subclass of int, and True would become 1
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)  # YAML rejects subclasses such as numpy.float64
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    return str(value)


def flat_params(params: Mapping[str, Any], prefix: str = "") -> dict[str, int | float | str]:
    """Return nested hyperparameters under names such as "outer/inner". Values other than numbers become strings."""
    flat: dict[str, int | float | str] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= flat_params(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, (int, float, str)) else str(value)
    return flat
