"""Functions from lightning.pytorch.core.saving: hyperparameter files, and loading from a checkpoint."""

import ast
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CHECKPOINT_PAST_HPARAMS_KEYS = ("hparams", "module_arguments")
"""Keys under which very old checkpoints store hyperparameters."""


def update_hparams(hparams: dict[str, Any], updates: Mapping[str, Any]) -> None:
    """Update nested hyperparameters in place."""
    for name, value in updates.items():
        if isinstance(value, Mapping) and isinstance(hparams.get(name), dict):
            update_hparams(hparams[name], value)
        else:
            hparams[name] = value


def load_hparams_from_yaml(config_yaml: str | Path, use_omegaconf: bool = True) -> Any:
    """Return the hyperparameters from a YAML file, or an empty dict if the file does not exist."""
    if not Path(config_yaml).is_file():
        return {}
    text = Path(config_yaml).read_text()
    values: Any = yaml.full_load(text)
    if use_omegaconf and isinstance(values, dict) and "${" in text:
        from omegaconf import OmegaConf

        return OmegaConf.create(values)
    return values


def save_hparams_to_yaml(config_yaml: str | Path, hparams: Any, use_omegaconf: bool = True) -> None:
    """Write hyperparameters to a YAML file. Values that YAML cannot represent are written as strings.

    Raises RuntimeError if the folder does not exist, and TypeError if `hparams` is not a mapping.
    """
    _require_folder(config_yaml)
    from omegaconf import OmegaConf

    if OmegaConf.is_config(hparams):
        Path(config_yaml).write_text(OmegaConf.to_yaml(hparams))
        return
    values = _items(hparams)
    if not isinstance(values, dict):
        raise TypeError("hparams must be dictionary")
    Path(config_yaml).write_text(yaml.dump({name: _shown(value) for name, value in values.items()}))


def convert(val: str) -> Any:
    """Return the value of a Python literal, or the string unchanged if it is not a literal."""
    try:
        return ast.literal_eval(val)
    except (ValueError, SyntaxError):
        return val


def load_from_checkpoint(
    cls: Any,
    checkpoint_path: str | Path,
    map_location: Any = None,
    hparams_file: str | Path | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Build a module or data module from a checkpoint, which is read with weights_only=True."""
    from .module import LightningDataModule, LightningModule

    options = {} if strict is None else {"strict": strict}
    base = LightningModule if issubclass(cls, LightningModule) else LightningDataModule
    # not the class's method, which may call this function
    loader = vars(base)["load_from_checkpoint"].__func__
    return loader(cls, checkpoint_path, map_location=map_location, hparams_file=hparams_file, **options, **kwargs)


def _items(hparams: Any) -> Any:
    if isinstance(hparams, Namespace):
        return dict(vars(hparams))
    return dict(hparams) if isinstance(hparams, Mapping) else hparams or {}


def _shown(value: Any) -> Any:
    try:
        yaml.safe_dump(value)
    except yaml.YAMLError:
        return str(value)
    return value


def _require_folder(path: str | Path) -> None:
    if not Path(path).parent.is_dir():
        raise RuntimeError(f"Missing folder: {Path(path).parent}.")
