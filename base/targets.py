"""Builds objects from config mappings with `_target_` and rebuilds them from checkpoints.

A checkpoint contains the mapping instead of the object. This module imports torch only to rebuild objects, so that the
config check does not import torch.
"""

import functools
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .environment import get_variable
from .errors import CheckpointError, nearest_name

TARGET = "_target_"
"""Key for the dotted path of the class or function to call."""
PARTIAL = "_partial_"
"""Key that, if true, builds a `functools.partial` of the target instead of calling it."""
POSITIONAL = "_args_"
"""Key for a list of positional arguments."""


def misspelt_word(name: object) -> str:
    """Return the special key (such as `_target_`) that `name` misspells; "" if there is none."""
    words = (TARGET, PARTIAL, POSITIONAL)
    # only names that begin with an underscore: a key such as `target` may be an argument
    likely = isinstance(name, str) and name.startswith("_") and name not in words
    return nearest_name(str(name), words, 0.8) if likely else ""


def call_target(target: Callable[..., Any], arguments: Mapping[str, Any], partial: bool) -> Any:
    """Return `target(*arguments["_args_"], **other_arguments)`, or a partial of that call."""
    named = {name: value for name, value in arguments.items() if name != POSITIONAL}
    positional = arguments.get(POSITIONAL, ())
    return functools.partial(target, *positional, **named) if partial else target(*positional, **named)


def rebuild_targets(value: Any, kind: type, name: str) -> Any:
    """Rebuild the objects in `value`, the config of a hyperparameter.

    `name` is the hyperparameter's name, and `kind` is the class of the task or data module. References to environment
    variables in strings are replaced with the variables' values. Raises CheckpointError if the config contains a target
    that a checkpoint may not call; see `_find_trusted`.
    """
    if isinstance(value, str):
        return re.sub(r"\$\{env:(\w+)\}", lambda match: _value_of(match[1], name), value)
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
            f"The hyperparameter {name!r} refers to the environment variable {variable}, which is not set. Set it, or "
            f"pass the value: load_from_checkpoint(path, {name}=...)."
        )
    return value


def _find_trusted(path: str, kind: type, name: str) -> Callable[..., Any]:
    """Return the object at a dotted path if a checkpoint may call it.

    A checkpoint may come from an untrusted source, so loading it never imports another package. The checkpoint may only
    call:

    * objects defined in torch.nn, in torch.optim or in the package of `kind`;
    * classes of modules, optimizers, learning rate schedulers and datasets in packages that are already imported.
    """
    from torch import nn, optim
    from torch.utils.data import Dataset

    top = path.partition(".")[0]
    try:
        # resolve_name imports modules, so it is called only for packages that the program has already imported, and
        # never for the standard library, which is always imported and can start programs
        target = pkgutil.resolve_name(path) if top in sys.modules and top not in sys.stdlib_module_names else None
    except (ImportError, AttributeError, ValueError):
        target = None
    # check the defining module: a module in the task's package may have imported os.system by name
    home, package = str(getattr(target, "__module__", "")), kind.__module__.partition(".")[0]
    is_class = isinstance(target, type) and issubclass(
        target, nn.Module | optim.Optimizer | optim.lr_scheduler.LRScheduler | Dataset
    )
    is_defined_there = home.startswith(("torch.nn.", "torch.optim.")) or home.partition(".")[0] == package
    if callable(target) and (is_class or is_defined_there):
        trusted: Callable[..., Any] = target
        return trusted
    raise CheckpointError(
        f"To rebuild {name!r} of {kind.__name__}, the checkpoint calls {path!r}. A checkpoint may only call objects "
        f"from torch.nn, torch.optim and {package!r}, and modules, optimizers, schedulers and datasets from imported "
        f"packages. Import {top!r} first, or pass the object: {kind.__name__}.load_from_checkpoint(path, {name}=...)."
    )
