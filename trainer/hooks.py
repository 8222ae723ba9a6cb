"""Hooks: the overridden methods of callbacks and the task, collected once when a run starts."""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

from ..base.errors import TaskError, did_you_mean
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
"""Hooks of Lightning 1 that were renamed in Lightning 2, with other arguments."""

MISNOMERS = {
    "val_step": "validation_step",
    "valid_step": "validation_step",
    "validate_step": "validation_step",
    "testing_step": "test_step",
    "prediction_step": "predict_step",
    "validation_dataloader": "val_dataloader",
}
"""Common misnomers of steps and loaders; an error if the task does not define the right name as well."""

STEP_SIMILARITY = 0.9
"""Least similarity of a method's name to a step's to count as a misspelling of it; `train_step` has 0.87."""


class Hooks(dict[str, Calls]):
    """Maps a hook's name to its calls: callbacks in order, the task, then late callbacks; () if nothing overrides it.

    Late are those that judge and save what the others have done: see MonitoringCallback. Callbacks' methods are bound
    to the trainer and the task.
    """

    def __init__(self, trainer: "Trainer", task: Task, callbacks: Sequence[Callback]) -> None:
        super().__init__()
        self.of_task: dict[str, Calls] = {}
        self.of_callbacks: dict[str, Calls] = {}
        self.late: dict[str, Calls] = {}
        monitoring = [callback for callback in callbacks if isinstance(callback, MonitoringCallback)]
        plain = [callback for callback in callbacks if callback not in monitoring]
        # a stable sort: among themselves, callbacks stay in the order in which they were given
        monitoring.sort(key=lambda callback: isinstance(callback, CheckpointCallback))
        for name in {*CALLBACK_HOOKS, *TASK_HOOKS}:
            # those two do their work in the base class, so that they are called also where nothing overrides them
            works_anyway = name.endswith(("_model_eval", "_model_train"))
            is_of_task = name in TASK_HOOKS and (works_anyway or overrides(task, Task, name))
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
        """Names of hooks with code that may draw random numbers; this package's own hooks draw none."""

    def call(self, name: str, *arguments: Any) -> None:
        """Call the hook `name` of everything that overrides it."""
        for hook in self[name]:
            hook(*arguments)

    def call_early(self, name: str, *arguments: Any) -> None:
        """Call the hook `name` of everything but late callbacks."""
        for hook in self[name][: len(self[name]) - len(self.late[name])]:
            hook(*arguments)


def is_of_this_package(call: Callable[..., Any]) -> bool:
    """Return whether the code of a function, method, class or partial is this package's own."""
    function = call.func if isinstance(call, partial) else call
    return str(getattr(function, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def overrides(instance: object, base: type, name: str) -> bool:
    """Return whether `instance` overrides the method `name` of `base`.

    None does not count, as in Lightning.
    """
    # on the instance first: programs assign methods to a task (`task.validation_step = None`)
    own = vars(instance)[name] if name in vars(instance) else getattr(type(instance), name, None)
    return own is not None and (name in vars(instance) or own is not getattr(base, name))


def check_names(owner: Task | DataModule | Callback) -> None:
    """Raise TaskError for methods that look like misspelt hooks or steps, and for hooks with wrong arguments.

    The message names the probable hook, or the arguments that a hook receives.
    """
    check_hook_arguments(owner)
    for name in STEP_NAMES if isinstance(owner, Task) else ():
        if overrides(owner, Task, name):
            count_arguments(owner, name)
    for told in describe_misnomers(owner):
        raise TaskError(told)


def names_of(owner: Task | DataModule | Callback) -> tuple[type, tuple[str, ...], tuple[str, ...]]:
    """Return the base class of an owner of hooks, the names of the hooks, and those of steps and other methods."""
    if isinstance(owner, Task):
        return Task, TASK_HOOKS, TASK_METHODS
    if isinstance(owner, Callback):
        return Callback, CALLBACK_HOOKS, ()
    return DataModule, ("setup", "teardown", "on_exception"), TASK_METHODS


def check_hook_arguments(owner: Task | DataModule | Callback) -> None:
    """Raise TaskError for overridden hooks that do not take the arguments they receive."""
    base, hooks, _ = names_of(owner)
    for name in hooks:
        if overrides(owner, base, name):
            _check_arguments(owner, base, name)


def describe_misnomers(owner: Task | DataModule | Callback) -> Iterator[str]:
    """Yield a sentence for each method that is named almost like a hook or step, and would never be called."""
    base, hooks, steps = names_of(owner)
    known_hooks, known_steps = set(hooks), set(steps)
    inherited = {name for kind in base.__mro__ for name in vars(kind)}
    own = {
        name: kind
        for kind in reversed(type(owner).__mro__)  # bases first: the message names the class that defines it last
        for name, value in vars(kind).items()
        if kind not in base.__mro__ and callable(value) and not name.startswith("_") and name not in inherited
        if kind.__module__.partition(".")[0] != __name__.partition(".")[0]  # this package's own classes are right
    }
    for name, kind in own.items():
        cutoff = 0.8 if name.startswith("on_") else STEP_SIMILARITY
        known = {RENAMED[name]} & known_hooks if name in RENAMED else known_hooks | known_steps
        # 0.0: for a hook that was renamed the new name is the only candidate
        meant = did_you_mean(name, known, 0.0 if name in RENAMED else cutoff)
        right = MISNOMERS.get(name, "")
        if right in known_steps and getattr(type(owner), right, None) is getattr(base, right, None):
            meant = f" Did you mean {right!r}?"
        if meant:
            yield (
                f"{kind.__qualname__}.{name} is named like a hook but is none, so it would never be called.{meant} "
                f"If it is meant to be something else, rename it (for example with a leading underscore)."
            )


def signature_of(method: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a method; of one that wraps another bound method that one's, which `inspect` shortens."""
    inner = inspect.unwrap(method)
    return signature(inner if inspect.ismethod(inner) else method)


def _check_arguments(instance: object, base: type, name: str) -> None:
    given = [one for one in signature(getattr(base, name)).parameters.values() if one.name != "self"]
    needed = [one for one in given if one.default is one.empty]
    try:
        own = signature_of(getattr(instance, name))
    except (TypeError, ValueError):
        return  # a builtin without signature
    # a hook may do without the arguments that have defaults
    for arguments in (given, needed):
        try:
            own.bind(*arguments)
        except TypeError:
            continue
        return
    raise TaskError(
        f"{type(instance).__qualname__}.{name}{own} must accept the arguments ({', '.join(one.name for one in given)})."
    )


def check_nones(instance: object, base: type, switched_off: Iterable[str]) -> None:
    """Raise TaskError for a method set to None, except steps, loaders and hooks, which None disables."""
    for name in {name for kind in base.__mro__[:-1] for name in vars(kind) if not name.startswith("_")}:
        if callable(getattr(base, name)) and getattr(instance, name) is None and name not in switched_off:
            raise TaskError(f"{type(instance).__qualname__}.{name} is None, but it is called: do not override it.")


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
    """Return what counts the samples of a stream's batch; None: its tensors do, which must agree."""
    return task.count_samples if overrides(task, Task, "count_samples") else None


MOST_ARGUMENTS = {"training_step": 2, "validation_step": 3, "test_step": 3, "predict_step": 3}
HOOK_ARGUMENTS = ("batch", "batch_idx", "dataloader_idx")


def count_arguments(task: Any, step: str, several_loaders: bool = True) -> int:
    """Return how many of (batch, batch_idx, dataloader_idx) the step takes.

    A step with `*args`, or with an argument of another name and its own default in the third place, is given
    dataloader_idx only with `several_loaders`, as in Lightning.

    Raises TaskError if it takes no batch, or requires other arguments.
    """
    try:
        parameters = list(signature_of(getattr(task, step)).parameters.values())
    except ValueError:  # a method without self
        parameters = []
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return MOST_ARGUMENTS[step] if several_loaders else min(2, MOST_ARGUMENTS[step])
    if "dataloader_iter" in (parameter.name for parameter in parameters):
        raise TaskError(
            f"{type(task).__name__}.{step}(dataloader_iter, ...) is not supported: take `batch`, and leave "
            f"the iteration to the trainer."
        )
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    wrong = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    wrong += [p.name for p in positional[MOST_ARGUMENTS[step] :] if p.default is p.empty]
    if wrong or not positional:
        accepted = ", ".join(HOOK_ARGUMENTS[: MOST_ARGUMENTS[step]])
        named = ", ".join(parameter.name for parameter in parameters)
        raise TaskError(
            f"{type(task).__name__}.{step}({named}) cannot be called with ({accepted}) or the first of these; "
            f"{'unknown: ' + ', '.join(wrong) if wrong else 'it takes no batch'}."
        )
    own = [p for p in positional[2:3] if p.default is not p.empty and p.name != "dataloader_idx"]
    return 2 if own and not several_loaders else min(len(positional), MOST_ARGUMENTS[step])


def fitted(hook: Callable[..., Any], given: int, several_loaders: bool) -> Callable[..., Any]:
    """Return `hook` as a function of `given` arguments, dropping the last one, dataloader_idx, if it takes one less.

    A hook with `*args` is given dataloader_idx only with `several_loaders`, as in Lightning.
    """
    own = signature_of(hook)
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in own.parameters.values())
    try:
        own.bind(*range(given))
        taken = given if several_loaders or not takes_any else given - 1
    except TypeError:
        taken = given - 1
    return hook if taken == given else lambda *arguments: hook(*arguments[:taken])
