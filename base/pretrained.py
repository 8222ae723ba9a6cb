"""Saves models, adapters and tokenizers in Hugging Face format.

Such objects have a `save_pretrained(folder)` method, as in Hugging Face Transformers, PEFT and Diffusers.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import TaskError


def is_pretrained(value: Any) -> bool:
    """Return whether an object has a `save_pretrained` method."""
    return callable(getattr(value, "save_pretrained", None))


def find_models(module: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and module of each outermost module with a `save_pretrained` method.

    For example, an adapter is yielded, but the base model inside it is not.
    """
    if is_pretrained(module):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from find_models(child, f"{name}.{child_name}".removeprefix("."))


def require_models(task: Any) -> dict[str, Any]:
    """Return the task's models that have `save_pretrained`, keyed by name. Raises TaskError if there are none."""
    models = dict(find_models(task))
    if not models:
        raise TaskError(
            f"{type(task).__name__} has no module with a save_pretrained(folder) method, such as a model from Hugging "
            f"Face Transformers, PEFT or Diffusers. Assign the model to an attribute, such as self.model = "
            f"AutoModelForCausalLM.from_pretrained(...), or export its weights: legato export RUN weights.safetensors"
        )
    return models


def save_pretrained(task: Any, folder: Path, shard_size: str | None = None) -> list[Path]:
    """Save the models of a task to `folder` and return the folders written.

    If the task has multiple models, each is saved to its own subfolder. Tokenizers and processors that are attributes
    of the task are saved alongside each model. An existing folder is replaced once the new folder is complete.

    Args:
        shard_size: Maximum size of a weights file, such as "5GB". None: the library's default.
    """
    models = require_models(task)
    partial, replaced = (folder.with_name(f".{folder.name}.{word}") for word in ("partial", "replaced"))
    options = {} if shard_size is None else {"max_shard_size": shard_size}
    extras = [value for value in vars(task).values() if is_pretrained(value)]
    folders = []
    for old in (partial, replaced):
        shutil.rmtree(old, ignore_errors=True)  # left by a run that was killed while writing
    for name, model in models.items():
        place = Path(name) if len(models) > 1 else Path()
        folders.append(folder / place)
        for extra in extras:  # before the model, whose config must replace a config that is an attribute of the task
            extra.save_pretrained(partial / place)
        model.save_pretrained(partial / place, **options)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    return folders
