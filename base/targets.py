"""Objects that a config builds from mappings with `_target_`: how they are called, and how a checkpoint rebuilds them.

A checkpoint holds the mapping in place of the object. torch is imported only to rebuild, so that the config's check
can use this module without it.
"""

import functools
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .environment import get_variable
from .errors import CheckpointError, did_you_mean

TARGET = "_target_"
"""The key under which a mapping names the class or function to call."""
PARTIAL = "_partial_"
"""The key that, if true, asks for `functools.partial` of the target, for arguments that are known later."""
POSITIONAL = "_args_"
"""The key for a list of positional arguments."""


def misspelt_word(name: object) -> str:
    """Return ' Did you mean ...?' for a name that is nearly one of these words; "" for any other."""
    words = (TARGET, PARTIAL, POSITIONAL)
    # only words with an underscore: a key such as `target` may be an argument
    likely = isinstance(name, str) and name.startswith("_") and name not in words
    return did_you_mean(str(name), words, 0.8) if likely else ""


def call_target(target: Callable[..., Any], arguments: Mapping[str, Any], partial: bool) -> Any:
    """Return `target(*arguments["_args_"], **rest)`, or a partial of that."""
    named = {name: value for name, value in arguments.items() if name != POSITIONAL}
    positional = arguments.get(POSITIONAL, ())
    return functools.partial(target, *positional, **named) if partial else target(*positional, **named)


def rebuild_targets(value: Any, kind: type, name: str) -> Any:
    """Build what a config had built as hyperparameter `name` of a task or data module of class `kind`.

    In texts references to environment variables are replaced by their values. Raises CheckpointError where the
    checkpoint names something that may not be called for it; see `_find_trusted`.
    """
    if isinstance(value, str):
        return re.sub(r"\$\{env:(\w+)\}", lambda found: _value_of(found[1], name), value)
    if isinstance(value, list | tuple):
        return type(value)(rebuild_targets(item, kind, name) for item in value)
    if not isinstance(value, Mapping):
        return value
    if TARGET not in value:
        return {key: rebuild_targets(item, kind, name) for key, item in value.items()}
    target = _find_trusted(str(value[TARGET]), kind, name)
    rest = {key: item for key, item in value.items() if key not in (TARGET, PARTIAL)}
    return call_target(target, rebuild_targets(rest, kind, name), bool(value.get(PARTIAL)))


def _value_of(variable: str, name: str) -> str:
    value = get_variable(variable)
    if value is None:
        raise CheckpointError(
            f"The hyperparameter {name!r} is that of the environment variable {variable}, which is not set. Set it, or "
            f"hand the value over: load_from_checkpoint(path, {name}=...)."
        )
    return value


def _find_trusted(path: str, kind: type, name: str) -> Callable[..., Any]:
    """Return what is at a dotted path, if a checkpoint may have it called.

    A checkpoint may come from anywhere, so that no package is imported for it, and only these are called: what
    torch.nn, torch.optim and the package of `kind` define, and modules, optimizers, schedulers and datasets of others.
    """
    from torch import nn, optim
    from torch.utils.data import Dataset

    top = path.partition(".")[0]
    try:
        # resolve_name imports: so only within packages that the program has imported by itself
        # nothing of the standard library, which is imported in any case and can start programs
        found = pkgutil.resolve_name(path) if top in sys.modules and top not in sys.stdlib_module_names else None
    except (ImportError, AttributeError, ValueError):
        found = None
    # where it is defined, not where it was found: a module of the task's package may import os.system by name
    home, own = str(getattr(found, "__module__", "")), kind.__module__.partition(".")[0]
    known = isinstance(found, type) and issubclass(
        found, nn.Module | optim.Optimizer | optim.lr_scheduler.LRScheduler | Dataset
    )
    if callable(found) and (known or home.startswith(("torch.nn.", "torch.optim.")) or home.partition(".")[0] == own):
        trusted: Callable[..., Any] = found
        return trusted
    raise CheckpointError(
        f"The checkpoint says that {name!r} of {kind.__name__} was built by {path!r}, which is not built for a "
        f"checkpoint: it is not imported, or neither of torch nor of {own!r}. Import {top!r} first, if it is a module, "
        f"optimizer, scheduler or dataset; or hand it over: {kind.__name__}.load_from_checkpoint(path, {name}=...)."
    )
