"""The exceptions that Legato raises.

    LegatoError
    |-- ConfigError       (ValueError)       a setting, file or argument is wrong; raised before the run starts
    |-- TaskError         (TypeError)        the task, one of its hooks or the result of a step is wrong
    |-- DataError         (ValueError)       a loader or sampler is not compatible with the run
    |-- CheckpointError   (ValueError)       a checkpoint is missing, damaged or from a different model
    |-- NonFiniteError    (ArithmeticError)  a loss or gradient is NaN or infinite
    |-- CorruptionError   (ArithmeticError)  recomputing a step produced different bits
    |-- DisagreementError (RuntimeError)     a run's ranks disagree about what to do next, or their weights differ
    |-- HangError         (RuntimeError)     the run made no progress; the message shows each rank's position
    `-- WorkerError       (RuntimeError)     one of the run's processes failed; contains its rank and traceback

Each message says what was expected, what was found and what to do about it. For a common mistake, it ends with the
incorrect line of code and the corrected one (see `correction`).
"""

import difflib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

log = logging.getLogger("legato")


class LegatoError(Exception):
    """Base class of Legato's exceptions."""


class ConfigError(LegatoError, ValueError):
    """Raised when a setting, file or argument is wrong."""


class TaskError(LegatoError, TypeError):
    """Raised when the task, one of its hooks or the result of a step is wrong."""


class DataError(LegatoError, ValueError):
    """Raised when a loader or sampler is not compatible with the run."""


class CheckpointError(LegatoError, ValueError):
    """Raised when a checkpoint is missing, damaged or from a different model."""


class NonFiniteError(LegatoError, ArithmeticError):
    """Raised when a loss or gradient is NaN or infinite."""


class CorruptionError(LegatoError, ArithmeticError):
    """Raised when recomputing a step produces different bits (`recheck_every`)."""


class DisagreementError(LegatoError, RuntimeError):
    """Raised when a run's ranks disagree about what to do next, or when their weights differ."""


class HangError(LegatoError, RuntimeError):
    """Raised when a run makes no progress for `hang_timeout` seconds. The message shows each rank's position."""


class WorkerError(LegatoError, RuntimeError):
    """Raised when one of the run's processes fails. The message contains its rank and ends with its traceback."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


SYNONYMS = {"fp16": "16-mixed", "float16": "16-mixed", "half": "16-mixed", "bfloat16": "bf16-mixed", "fp32": "32"}
"""Values used in other libraries for which the most similar name in Legato has a different meaning."""


def did_you_mean(word: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return " Did you mean X?" for the name nearest to `word`; "" if there is none."""
    return suggestion(nearest_name(word, names, cutoff))


def suggestion(name: str) -> str:
    """Return " Did you mean X?" for a name; "" if it is empty."""
    return f" Did you mean {name!r}?" if name else ""


def nearest_name(word: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the name nearest to `word`; "" if none has a similarity of at least `cutoff` (0 to 1)."""
    names = [str(name) for name in names]
    # 0.6 is difflib's default
    near = difflib.get_close_matches(word, names, 1, cutoff)
    # words of very different lengths match only by chance, such as "root" in "dropout"
    near = [name for name in near if abs(len(name) - len(word)) < 3 or difflib.get_close_matches(word, [name], 1, 0.75)]
    near = [SYNONYMS[word]] if SYNONYMS.get(word) in names else near
    return near[0] if near else ""


def correction(wrong: str, right: str) -> str:
    """Return the incorrect line of code and the corrected one, to append to a message."""
    width = max(len(wrong), len(right))
    return f"\n    {wrong:<{width}}  # incorrect\n    {right:<{width}}  # correct"


def describe_kind(value: object) -> str:
    """Return the name of a value's type. If the value is a class, return a hint to instantiate it."""
    return f"the class {value.__name__}: write {value.__name__}()" if isinstance(value, type) else type(value).__name__


def describe_import(error: BaseException) -> str:
    """Describe an import error and its root cause in one line."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    texts = [f"{type(shown).__name__}: {' '.join(str(shown).split())[:300]}" for shown in (error, cause)]
    return ", because of ".join(dict.fromkeys(texts))


def first_names(names: Sequence[str], shown: int = 6) -> str:
    """Join the first `shown` names and append the number of remaining names."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error. Before Python 3.11, append the note to the error's message instead."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif isinstance(error, OSError) and error.strerror is not None:  # its str() reads strerror, not args
        error.strerror += f"\n{note}"
    elif not isinstance(error, SystemExit):  # the argument of SystemExit is the exit code
        error.args = (f"{error.args[0]}\n{note}" if error.args else note, *error.args[1:])


class Errors:
    """The first error in a run, with later errors attached as notes."""

    def __init__(self) -> None:
        self.first: BaseException | None = None

    def attempt(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call `function` and record any exception, including KeyboardInterrupt and SystemExit."""
        try:
            function(*arguments)
        except BaseException as error:  # the caller still has to call the remaining functions
            self.add(error, f"while {name_of(function)} was called")

    def add(self, error: BaseException, when: str) -> None:
        """Record an error. `when` is a clause such as "while teardown was called"."""
        if self.first is None:
            self.first = error
        elif error is not self.first:  # a hook may reraise the error that was passed to it
            note = f"After that, {when}: {type(error).__name__}: {error}"
            add_note(self.first, note)
            if not isinstance(self.first, Exception):  # Python does not print the notes of an exit or interrupt
                log.warning("%s", note)


def name_of(function: Callable[..., object]) -> str:
    """Return the name of a function. For a method, include the class of the object it is bound to."""
    while isinstance(function, partial):  # callback hooks are partials that bind the trainer and the task
        function = function.func
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", repr(function))
    return name if owner is None else f"{type(owner).__name__}.{name}"
