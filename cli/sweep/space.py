"""Values that a sweep tries: choices and intervals for keys of a config, and the trials made of them.

A trial's values follow from its number, the sweep's seed and, with Optuna, the results of earlier trials: they are the
same however many trials run at a time.
"""

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...base.errors import ConfigError

Values = dict[str, str]
"""Values that one trial sets: by key, the text of an override."""

AHEAD = 4
"""Number of trials that Optuna chooses ahead, and so of those that can run at a time."""
MOST_VALUES = 100_000
"""Number of values, or of their combinations, that are listed."""
_CALL = re.compile(r"(range|log|uniform)\((.*)\)")
_WHOLE = re.compile(r"[-+]?[0-9]+")


@dataclass(frozen=True)
class Choices:
    """Values to choose from."""

    key: str
    texts: tuple[str, ...]

    def draw(self, source: random.Random) -> str:
        """Return one of them."""
        return source.choice(self.texts)

    def suggest(self, trial: Any) -> str:
        """Return the one that Optuna chooses."""
        return str(trial.suggest_categorical(self.key, self.texts))

    def examples(self) -> tuple[str, ...]:
        """Return all values that the config must accept."""
        return self.texts


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`, uniform or uniform in their logarithm; whole ones if both bounds are."""

    key: str
    low: str
    high: str
    log: bool

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are drawn."""
        return all(_WHOLE.fullmatch(one) for one in (self.low, self.high))

    def draw(self, source: random.Random) -> str:
        """Return a number of the interval."""
        low, high = float(self.low), float(self.high)
        if self.whole and not self.log:
            return str(source.randint(int(self.low), int(self.high)))
        found = math.exp(source.uniform(math.log(low), math.log(high))) if self.log else source.uniform(low, high)
        return self._text(found)

    def suggest(self, trial: Any) -> str:
        """Return the number that Optuna chooses."""
        if self.whole:
            return str(trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log))
        return self._text(trial.suggest_float(self.key, float(self.low), float(self.high), log=self.log))

    def examples(self) -> tuple[str, ...]:
        """Return the bounds."""
        return (self.low, self.high)

    def _text(self, number: float) -> str:
        """Return a number with four digits, which keep the names of trials short."""
        kept = min(max(float(f"{number:.4g}"), float(self.low)), float(self.high))
        return str(round(kept)) if self.whole else repr(kept)


Axis = Choices | Interval


def read_axis(key: str, text: str) -> Axis | None:
    """Read what a sweep varies: `1e-4,1e-3`, `range(32,129,32)`, `log(1e-5,1e-2)`, `uniform(0,1)`.

    None for one value: commas within brackets and quotes do not separate. Raises ConfigError for a malformed one.
    """
    parts = split_choices(text)
    calls = [_CALL.fullmatch(part) for part in parts]
    if len(parts) > 1:
        if any(calls):
            raise ConfigError(f"{key}={text}: range, log and uniform stand alone, not among choices.")
        if "" in parts:
            raise ConfigError(f"{key}={text}: there is nothing between two commas, or after the last one.")
        return Choices(key, tuple(dict.fromkeys(parts)))
    if not calls or calls[0] is None:
        return None
    kind, numbers = calls[0][1], [one.strip() for one in calls[0][2].split(",")]
    try:
        if kind == "range":
            values = range(*map(int, numbers))
            if not values:
                raise ValueError
            _require_few(len(values), f"{key}={text}")
            return Choices(key, tuple(map(str, values)))
        low, high = numbers
        if not (0 if kind == "log" else -math.inf) < float(low) < float(high) < math.inf:
            raise ValueError
    except ConfigError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        wanted = {
            "range": "range(FIRST, END) or range(FIRST, END, STEP) with whole numbers, END not included",
            "log": "log(LOW, HIGH) with 0 < LOW < HIGH",
            "uniform": "uniform(LOW, HIGH) with LOW < HIGH",
        }
        raise ConfigError(f"{key}={text}: write {wanted[kind]}.") from error
    return Interval(key, low, high, kind == "log")


def split_choices(text: str) -> list[str]:
    """Split at the commas that are in neither brackets nor quotes."""
    parts, depth, quote, before = [""], 0, "", ","
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"" and before in ",:[{(":
            quote = sign
        else:
            depth += (sign in "[{(") - (sign in "]})")
        if sign == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += sign
        before = sign if not sign.isspace() else before
    return [part.strip() for part in parts]


class Search(Protocol):
    """Chooses the values of each trial."""

    count: int
    """Number of trials."""
    ahead: int
    """Trial i needs the results of all trials up to i - ahead."""
    repeats_failed: bool
    """Whether a trial that failed may be tried again later."""

    def values(self, index: int, results: Mapping[int, float | None]) -> Values:
        """Return the values of a trial; called in the order of trials. `results`: None for a failed one."""


class Listed:
    """All combinations in order, or some of them or of random numbers."""

    ahead = 10**9
    repeats_failed = True

    def __init__(self, axes: Sequence[Axis], count: int | None, seed: int) -> None:
        self.axes, self.seed = axes, seed
        intervals = [axis for axis in axes if isinstance(axis, Interval)]
        if intervals and count is None:
            one = intervals[0]
            raise ConfigError(
                f"{one.key} is an interval, so there is no end of trials. Say how many: --random 20, or --optuna 20; "
                f"or list values: {one.key}={one.low},{one.high}."
            )
        if not intervals:
            _require_few(math.prod(len(axis.examples()) for axis in axes), "All keys together")
        self.grid = [] if intervals else list(_combinations(axes))
        if count is not None:
            random.Random(seed).shuffle(self.grid)  # so a larger count begins with the same trials
        self.count = (count or 0) if intervals else min(len(self.grid), count or len(self.grid))

    def values(self, index: int, results: Mapping[int, float | None]) -> Values:
        """Return the values of a trial."""
        if self.grid:
            return self.grid[index]
        source = random.Random(f"{self.seed}/{index}")
        return {axis.key: axis.draw(source) for axis in self.axes}


class Guided:
    """Combinations that Optuna's TPE sampler chooses by the results so far."""

    ahead = AHEAD
    repeats_failed = False  # later trials were chosen by their failure

    def __init__(self, axes: Sequence[Axis], count: int, seed: int, mode: str) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ConfigError("--optuna needs the package optuna: pip install optuna. Or say --random N.") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.axes, self.count = axes, count
        sampler = optuna.samplers.TPESampler(seed=seed)
        self.study = optuna.create_study(direction=f"{mode}imize", sampler=sampler)
        self.failed = optuna.trial.TrialState.FAIL
        self.asked: list[Any] = []
        self.told = 0

    def values(self, index: int, results: Mapping[int, float | None]) -> Values:
        """Tell Optuna the results of trials up to index - ahead, and ask it for the next values."""
        for number in range(self.told, index - self.ahead + 1):
            value = results[number]
            self.study.tell(self.asked[number], value, state=self.failed if value is None else None)
            self.told = number + 1
        self.asked.append(self.study.ask())
        return {axis.key: axis.suggest(self.asked[-1]) for axis in self.axes}


def _require_few(count: int, what: str) -> None:
    """Raise ConfigError for more values than a sweep can list."""
    if count > MOST_VALUES:
        raise ConfigError(
            f"{what}: {count:,} values, and a sweep lists {MOST_VALUES:,} at most. Take a step, as in "
            f"range(0,1000000,50000), or an interval, uniform(LOW,HIGH) or log(LOW,HIGH), with --random N."
        )


def _combinations(axes: Sequence[Axis]) -> Iterator[Values]:
    for chosen in itertools.product(*(axis.examples() for axis in axes)):
        yield dict(zip((axis.key for axis in axes), chosen, strict=True))
