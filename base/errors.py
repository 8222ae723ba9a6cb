"""Every error that Legato raises on purpose.

    LegatoError
    |-- ConfigError       (ValueError)       a setting, a file or an argument is wrong; found before the run
    |-- TaskError         (TypeError)        the task, one of its hooks or what a step returned is wrong
    |-- DataError         (ValueError)       a loader or a sampler cannot serve this run
    |-- CheckpointError   (ValueError)       a checkpoint is missing, broken or of another model
    |-- NonFiniteError    (ArithmeticError)  a loss or a gradient is NaN or infinite
    |-- CorruptionError   (ArithmeticError)  a step that was computed twice has other bits
    |-- DisagreementError (RuntimeError)     the ranks of one run disagree about what to do, or have other weights
    |-- HangError         (RuntimeError)     the run made no progress; says which rank is where
    `-- WorkerError       (RuntimeError)     a process of the run failed; carries its rank and its traceback

A message says what was expected, what came, and what to do.
"""

import difflib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

log = logging.getLogger("legato")


class LegatoError(Exception):
    """Base of every error that Legato raises on purpose."""


class ConfigError(LegatoError, ValueError):
    """A setting, a file or an argument is wrong."""


class TaskError(LegatoError, TypeError):
    """The task, one of its hooks or what a step returned is wrong."""


class DataError(LegatoError, ValueError):
    """A loader or a sampler cannot serve this run."""


class CheckpointError(LegatoError, ValueError):
    """A checkpoint is missing, broken or of another model."""


class NonFiniteError(LegatoError, ArithmeticError):
    """A loss or a gradient is NaN or infinite."""


class CorruptionError(LegatoError, ArithmeticError):
    """A step has other bits when it is computed a second time (`recheck_every`)."""


class DisagreementError(LegatoError, RuntimeError):
    """The ranks of one run disagree about what to do next, or their weights differ."""


class HangError(LegatoError, RuntimeError):
    """The run made no progress for `hang_timeout`; the message has each rank's position."""


class WorkerError(LegatoError, RuntimeError):
    """A process of the run failed. The message names the rank and ends with that rank's own traceback."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


SYNONYMS = {"fp16": "16-mixed", "float16": "16-mixed", "half": "16-mixed", "bfloat16": "bf16-mixed", "fp32": "32"}
"""Names from other libraries whose most similar word means something else."""


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ' Did you mean X?' for the known word nearest to `word`, '' if none is at least `cutoff` similar."""
    names = [str(name) for name in known]
    # 0.6 is difflib's own measure of what looks alike to a person
    near = difflib.get_close_matches(word, names, 1, cutoff)
    # of words that differ much in length the similar letters are chance: "root" in "dropout"
    near = [name for name in near if abs(len(name) - len(word)) < 3 or difflib.get_close_matches(word, [name], 1, 0.75)]
    near = [SYNONYMS[word]] if SYNONYMS.get(word) in names else near
    return f" Did you mean {near[0]!r}?" if near else ""


def describe_kind(value: object) -> str:
    """Name the type of a value; for a class, say how to make an object of it."""
    return f"the class {value.__name__}: write {value.__name__}()" if isinstance(value, type) else type(value).__name__


def describe_import(error: BaseException) -> str:
    """Describe an error of an import in one line, with what caused it: packages name the module that was asked for."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    texts = [f"{type(one).__name__}: {' '.join(str(one).split())[:300]}" for one in (error, cause)]
    return ", because of ".join(dict.fromkeys(texts))


def first_names(names: Sequence[str], shown: int = 6) -> str:
    """Join the first names, and say how many more there are."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error; before Python 3.11, to its message."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif isinstance(error, OSError) and error.strerror is not None:  # its text is made of strerror, not of args
        error.strerror += f"\n{note}"
    elif not isinstance(error, SystemExit):  # its only argument is the exit code
        error.args = (f"{error.args[0]}\n{note}" if error.args else note, *error.args[1:])


class Errors:
    """The first error of a run; those that come after it are added to it as notes."""

    def __init__(self) -> None:
        self.first: BaseException | None = None

    def attempt(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call `function` and record what it raises, interrupts and exits included."""
        try:
            function(*arguments)
        except BaseException as error:  # each of the others still has to be called
            self.add(error, f"while {name_of(function)} was called")

    def add(self, error: BaseException, when: str) -> None:
        """Record an error."""
        if self.first is None:
            self.first = error
        elif error is not self.first:  # a hook may raise again the error that it was told of
            note = f"After that, {when}: {type(error).__name__}: {error}"
            add_note(self.first, note)
            if not isinstance(self.first, Exception):  # an exit or an interrupt is shown without its notes
                log.warning("%s", note)


def name_of(function: Callable[..., object]) -> str:
    """Return a function's qualified name; of a method with the class of its object."""
    while isinstance(function, partial):  # as hooks of callbacks are, bound to trainer and task
        function = function.func
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", repr(function))
    return name if owner is None else f"{type(owner).__name__}.{name}"
