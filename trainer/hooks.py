"""Hooks: the overridden methods of callbacks and the task, collected once when a run starts."""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

from ..base.errors import TaskError, correction, nearest_name
from ..callbacks.callback import Callback, MonitoringCallback
from ..callbacks.checkpoint_callback import CheckpointCallback
from ..tasks.data_hooks import DataHooks
from ..tasks.data_module import DataModule
from ..tasks.task import Task
from ..tasks.task_hooks import TaskHooks

if TYPE_CHECKING:
    from ..base.contracts import Trainer

log = logging.getLogger("legato")

CALLBACK_HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown"))
TASK_HOOKS = tuple(name for name in vars(TaskHooks) if name.startswith("on_") or name in ("setup", "teardown"))

Calls = tuple[Callable[..., Any], ...]

RENAMED = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
}
"""Lightning 1 hooks that were renamed in Lightning 2 and take different arguments there."""

MISNOMERS = {
    "val_step": "validation_step",
    "valid_step": "validation_step",
    "validate_step": "validation_step",
    "testing_step": "test_step",
    "prediction_step": "predict_step",
    "validation_dataloader": "val_dataloader",
}
"""Common misnomers for steps and loaders. Using one is an error unless the task also defines the right name."""

STEP_SIMILARITY = 0.9
"""Minimum similarity at which a method's name is treated as a misspelled step; `train_step` only reaches 0.87."""


class Hooks(dict[str, Calls]):
    """Mapping from the name of each hook to the functions to call, or to () if nothing overrides the hook.

    Callbacks are called first, in the user's order, then the task, then late callbacks.

    Late callbacks (MonitoringCallback) evaluate and save the results of the other callbacks. Callbacks' methods are
    bound to the trainer and the task.
    """

    def __init__(self, trainer: "Trainer", task: Task, callbacks: Sequence[Callback]) -> None:
        super().__init__()
        self.of_task: dict[str, Calls] = {}
        self.of_callbacks: dict[str, Calls] = {}
        self.late: dict[str, Calls] = {}
        monitoring = [callback for callback in callbacks if isinstance(callback, MonitoringCallback)]
        plain = [callback for callback in callbacks if callback not in monitoring]
        # a stable sort: otherwise callbacks keep the user's order
        monitoring.sort(key=lambda callback: isinstance(callback, CheckpointCallback))
        for name in {*CALLBACK_HOOKS, *TASK_HOOKS}:
            # the base class implements these, so they are called even if the task doesn't override them
            has_default = name.endswith(("_model_eval", "_model_train"))
            is_of_task = name in TASK_HOOKS and (has_default or overrides(task, Task, name))
            self.of_task[name] = (getattr(task, name),) if is_of_task else ()
            early, self.late[name] = (
                tuple(partial(getattr(c, name), trainer, task) for c in group if overrides(c, Callback, name))
                if name in CALLBACK_HOOKS
                else ()
                for group in (plain, monitoring)
            )
            self.of_callbacks[name] = early + self.late[name]
            self[name] = early + self.of_task[name] + self.late[name]
        self.may_draw = frozenset(name for name, calls in self.items() if not all(map(is_of_this_package, calls)))
        """Names of hooks whose code may draw random numbers. Legato's own hooks draw none."""

    def call(self, name: str, *arguments: Any) -> None:
        """Call the hook with the given name on every object that overrides it."""
        for hook in self[name]:
            hook(*arguments)

    def call_early(self, name: str, *arguments: Any) -> None:
        """Call the hook with the given name on every object except late callbacks."""
        for hook in self[name][: len(self[name]) - len(self.late[name])]:
            hook(*arguments)


def is_of_this_package(call: Callable[..., Any]) -> bool:
    """Return whether a function, method, class or partial is part of Legato."""
    function = call.func if isinstance(call, partial) else call
    return str(getattr(function, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def overrides(instance: object, base: type, name: str) -> bool:
    """Return whether `instance` overrides the `base` method with the given name.

    As in Lightning, None does not count as an override.
    """
    # the instance first: programs assign methods to a task (`task.validation_step = None`)
    method = vars(instance)[name] if name in vars(instance) else getattr(type(instance), name, None)
    return method is not None and (name in vars(instance) or method is not getattr(base, name))


def check_names(owner: Task | DataModule | Callback) -> None:
    """Raise TaskError for methods that look like misspelled hooks or steps, and for hooks with the wrong arguments.

    The message suggests a hook, or lists the arguments that a hook receives.
    """
    check_hook_arguments(owner)
    for name in STEP_NAMES if isinstance(owner, Task) else ():
        if overrides(owner, Task, name):
            count_arguments(owner, name)
    for message in describe_misnomers(owner):
        raise TaskError(message)


def names_of(owner: Task | DataModule | Callback) -> tuple[type, tuple[str, ...], tuple[str, ...]]:
    """Return the owner's base class, the names of its hooks, and the names of its other methods, such as steps."""
    if isinstance(owner, Task):
        return Task, TASK_HOOKS, TASK_METHODS
    if isinstance(owner, Callback):
        return Callback, CALLBACK_HOOKS, ()
    return DataModule, ("setup", "teardown", "on_exception"), TASK_METHODS


def check_hook_arguments(owner: Task | DataModule | Callback) -> None:
    """Raise TaskError for overridden hooks that do not accept the arguments that Legato passes."""
    base, hooks, _ = names_of(owner)
    for name in hooks:
        if overrides(owner, base, name):
            _check_arguments(owner, base, name)


def describe_misnomers(owner: Task | DataModule | Callback) -> Iterator[str]:
    """Yield a message for each method that Legato never calls although its name resembles a hook or step."""
    base, hooks, steps = names_of(owner)
    hook_names, step_names = set(hooks), set(steps)
    inherited = {name for kind in base.__mro__ for name in vars(kind)}
    methods = {
        name: kind
        for kind in reversed(type(owner).__mro__)  # bases first: the message reports the most derived class
        for name, value in vars(kind).items()
        if kind not in base.__mro__ and callable(value) and not name.startswith("_") and name not in inherited
        if kind.__module__.partition(".")[0] != __name__.partition(".")[0]  # Legato's own classes need no check
    }
    for name, kind in methods.items():
        cutoff = 0.8 if name.startswith("on_") else STEP_SIMILARITY
        candidates = {RENAMED[name]} & hook_names if name in RENAMED else hook_names | step_names
        # 0.0: the new name of a renamed hook is the only candidate
        near = nearest_name(name, candidates, 0.0 if name in RENAMED else cutoff)
        right_name = MISNOMERS.get(name, "")
        if right_name in step_names and getattr(type(owner), right_name, None) is getattr(base, right_name, None):
            near = right_name
        if near:
            yield (
                f"{kind.__qualname__}.{name} is named like a hook but isn't one, so it would never be called. Did you "
                f"mean {near!r}? If it isn't meant to be one, rename it (for example with a leading underscore)."
                f"{correction(f'def {name}(self, ...):', f'def {near}(self, ...):')}"
            )


def signature_of(method: Callable[..., Any]) -> inspect.Signature:
    """Return a method's signature; for a wrapper of a bound method, the bound method's signature without `self`."""
    inner = inspect.unwrap(method)
    return signature(inner if inspect.ismethod(inner) else method)


def _check_arguments(instance: object, base: type, name: str) -> None:
    parameters = [item for item in signature(getattr(base, name)).parameters.values() if item.name != "self"]
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    try:
        accepted = signature_of(getattr(instance, name))
    except (TypeError, ValueError):
        return  # a builtin without signature
    # a hook may omit the arguments that have defaults
    for arguments in (parameters, required):
        try:
            accepted.bind(*arguments)
        except TypeError:
            continue
        return
    names = ", ".join(parameter.name for parameter in parameters)
    wrong = ", ".join(["self", *map(str, accepted.parameters.values())])
    right = ", ".join(["self", *(parameter.name for parameter in parameters)])
    example = correction(f"def {name}({wrong}):", f"def {name}({right}):")
    raise TaskError(f"{type(instance).__qualname__}.{name}{accepted} must accept the arguments ({names}).{example}")


def check_nones(instance: object, base: type, switched_off: Iterable[str]) -> None:
    """Raise TaskError for a method that is None. Only steps, loaders and hooks may be None, which disables them."""
    for name in {name for kind in base.__mro__[:-1] for name in vars(kind) if not name.startswith("_")}:
        if callable(getattr(base, name)) and getattr(instance, name) is None and name not in switched_off:
            raise TaskError(f"{type(instance).__qualname__}.{name} is None, but Legato calls it. Don't override it.")


STEP_NAMES = ("training_step", "validation_step", "test_step", "predict_step")
LOADER_HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
CONFIGURERS = (
    *("configure_optimizers", "configure_model", "configure_blocks", "configure_callbacks"),
    "configure_gradient_clipping",
)
TASK_METHODS = (
    *STEP_NAMES,
    *LOADER_HOOKS,
    *CONFIGURERS,
    "describe_batch",
    "count_samples",
    *(name for name in vars(DataHooks) if not name.startswith("_")),
)


def counter_of(task: Task) -> Callable[[Any], int] | None:
    """Return the task's count_samples, or None to count samples by the length of a batch's tensors."""
    return task.count_samples if overrides(task, Task, "count_samples") else None


MOST_ARGUMENTS = {"training_step": 2, "validation_step": 3, "test_step": 3, "predict_step": 3}
HOOK_ARGUMENTS = ("batch", "batch_idx", "dataloader_idx")


def count_arguments(task: Any, step: str, several_loaders: bool = True) -> int:
    """Return how many of (batch, batch_idx, dataloader_idx) the step accepts.

    As in Lightning, two kinds of steps receive dataloader_idx only if `several_loaders` is true: those with `*args`,
    and those whose third argument has a default and a name other than dataloader_idx.

    Raises TaskError if the step accepts no batch or requires other arguments.
    """
    try:
        parameters = list(signature_of(getattr(task, step)).parameters.values())
    except ValueError:  # a method without self
        parameters = []
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return MOST_ARGUMENTS[step] if several_loaders else min(2, MOST_ARGUMENTS[step])
    if "dataloader_iter" in (parameter.name for parameter in parameters):
        raise TaskError(
            f"{type(task).__name__}.{step}(dataloader_iter, ...) is not supported. Use a `batch` argument instead; the "
            f"trainer iterates over the loader."
        )
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    wrong = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    wrong += [p.name for p in positional[MOST_ARGUMENTS[step] :] if p.default is p.empty]
    if wrong or not positional:
        accepted = ", ".join(HOOK_ARGUMENTS[: MOST_ARGUMENTS[step]])
        named = ", ".join(parameter.name for parameter in parameters)
        raise TaskError(
            f"{type(task).__name__}.{step}({named}) must accept ({accepted}), or only the first of these, but "
            f"{'it requires ' + ', '.join(wrong) if wrong else 'it accepts no batch'}."
        )
    extra = [p for p in positional[2:3] if p.default is not p.empty and p.name != "dataloader_idx"]
    return 2 if extra and not several_loaders else min(len(positional), MOST_ARGUMENTS[step])


def fitted(hook: Callable[..., Any], count: int, several_loaders: bool) -> Callable[..., Any]:
    """Return `hook` as a function that accepts `count` arguments.

    If the hook accepts only `count` - 1 arguments, the last one, dataloader_idx, is dropped.

    As in Lightning, a hook with `*args` receives dataloader_idx only if `several_loaders` is true.
    """
    accepted = signature_of(hook)
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in accepted.parameters.values())
    try:
        accepted.bind(*range(count))
        taken = count if several_loaders or not takes_any else count - 1
    except TypeError:
        taken = count - 1
    return hook if taken == count else lambda *arguments: hook(*arguments[:taken])
