"""Parts of a task that write themselves as files of their library: models, adapters and tokenizers of the Hub.

The protocol is a method `save_pretrained(folder)`, which those of transformers, peft and diffusers have.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import TaskError


def is_pretrained(part: Any) -> bool:
    """Return whether a part of a task writes itself."""
    return callable(getattr(part, "save_pretrained", None))


def find_models(module: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and module of the outermost modules that write themselves: of an adapter that, not its base."""
    if is_pretrained(module):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from find_models(child, f"{name}.{child_name}".removeprefix("."))


def require_models(task: Any) -> dict[str, Any]:
    """Return the models that write themselves, by their name in the task; raises TaskError where there is none."""
    models = dict(find_models(task))
    if not models:
        raise TaskError(
            f"{type(task).__name__} has no module with a method save_pretrained(folder), by which a model of "
            f"transformers, peft or diffusers writes the files of the Hub. Keep the model in an attribute, as in "
            f"self.model = AutoModelForCausalLM.from_pretrained(...), or export its weights: "
            f"legato export RUN weights.safetensors"
        )
    return models


def save_pretrained(task: Any, folder: Path, shard_size: str | None = None) -> list[Path]:
    """Have the models of a task write themselves into a folder, several into one each; return these folders.

    What else the task has that writes itself (a tokenizer, a processor) goes beside each. A folder that is there
    already is replaced, once the new one is complete.

    shard_size: such as "5GB"; a larger model is written into several files. None: as the library decides.
    """
    models = require_models(task)
    partial, replaced = (folder.with_name(f".{folder.name}.{word}") for word in ("partial", "replaced"))
    options = {} if shard_size is None else {"max_shard_size": shard_size}
    beside = [part for part in vars(task).values() if is_pretrained(part)]
    folders = []
    for old in (partial, replaced):
        shutil.rmtree(old, ignore_errors=True)  # a run was killed while it wrote
    for name, model in models.items():
        place = Path(name) if len(models) > 1 else Path()
        folders.append(folder / place)
        for part in beside:  # first: a model's config counts, where one is also an attribute of the task
            part.save_pretrained(partial / place)
        model.save_pretrained(partial / place, **options)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    return folders
