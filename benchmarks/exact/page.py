"""Writes docs/exactness.md from the results of the rows."""

import datetime
import math
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from .compare import BOUNDS, Result
from .rows import COLUMNS, LEFT_OUT, NOT_TRIED, REFUSED, SEED, Refusal, Row, excludes

PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"
Results = Mapping[Row, Result]
HEAD = Path(__file__).with_name("head.md")


def power(difference: float) -> str:
    """Return a difference rounded up to a power of ten."""
    return f"{10.0 ** math.ceil(math.log10(difference)):.0e}" if 0 < difference < math.inf else str(difference)


def summary(results: Iterable[Result]) -> str:
    """Return a sentence with the numbers of exact and close runs."""
    several = list(results)
    exact, close = (sum(result.verdict == verdict for result in several) for verdict in ("exact", "close"))
    if not exact + close:
        return next((word for word in ("not run", "refused") if any(result.verdict == word for result in several)), "-")
    words = [f"{exact} exact"] if exact else []
    if close:
        words.append(f"{close} close")
    return ", ".join(words)


def reasons(results: Iterable[Result]) -> str:
    """Return the reasons why runs are close, without duplicates."""
    return "; ".join(dict.fromkeys(result.text for result in results if result.verdict == "close"))


def largest(pairs: Iterable[tuple[Row, Result]]) -> str:
    """Return the largest difference for each precision."""
    at = dict.fromkeys(COLUMNS["precision"], 0.0)
    for row, result in pairs:
        if result.verdict == "close":
            at[row.precision] = max(at[row.precision], result.difference)
    return ", ".join(f"{precision}: {power(value)}" for precision, value in at.items() if value)


def table(*rows: Iterable[object]) -> str:
    """Return a Markdown table. The first row is its header."""
    head, *body = [list(map(str, row)) for row in rows]
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def by_value(column: str, results: Results) -> str:
    """Return a table of the verdicts for each value of a column."""
    lines = []
    for value in COLUMNS[column]:
        here = {row: result for row, result in results.items() if getattr(row, column) == value}
        order, bitwise = (
            [result for row, result in here.items() if row.reproducible == word] for word in ("order", "bitwise")
        )
        lines.append([value, summary(order), largest(here.items()) or "-", summary(bitwise)])
    return table([column, "`order`", "largest difference", "`bitwise`"], *lines)


def strategies(results: Results) -> str:
    """Return a table of the verdicts for each strategy."""
    lines = []
    for name in COLUMNS["strategy"]:
        here = {row: result for row, result in results.items() if row.strategy == name}
        order, bitwise = (
            {row: result for row, result in here.items() if row.reproducible == word} for word in ("order", "bitwise")
        )
        ran = [result for result in bitwise.values() if result.verdict == "exact"]
        message = next((result.text for result in bitwise.values() if result.verdict == "refused"), "")
        why = "; ".join(filter(None, (reasons(order.values()), "" if ran else message)))
        lines.append(
            [
                f"`{name}`",
                f"exact ({len(ran)} rows)" if ran else "refused",
                summary(order.values()),
                largest(order.items()) or "-",
                why,
            ]
        )
    return table(
        ["strategy", "`bitwise`", "`order`", "largest difference under `order`", "reason, or the message"], *lines
    )


def name_refusal(refusal: Refusal) -> str:
    """Return the values of a refusal as text."""
    return " x ".join(", ".join(f"`{value}`" for value in several) for several in refusal.values())


def refusals(results: Results) -> str:
    """Return a table of refused combinations and their messages."""
    lines = []
    for refusal in REFUSED:
        messages = dict.fromkeys(
            result.text
            for row, result in results.items()
            if result.verdict == "refused" and excludes(refusal, asdict(row))
        )
        lines.append([name_refusal(refusal), next(iter(messages), "not refused")])
    return table(["combination", "message"], *lines)


def machine() -> str:
    """Return the name of the processor that ran the rows."""
    names = [line.split(":")[1].strip() for line in _cpu_info() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def write_page(results: Results) -> None:
    """Write the page. The results are in the order of the rows."""
    bounds = ", ".join(f"{precision}: {bound:.0e}" for precision, bound in BOUNDS.items())
    counts = {verdict: sum(result.verdict == verdict for result in results.values()) for verdict in ("exact", "close")}
    shown = [
        [number, *asdict(row).values(), result.verdict + (f", {power(result.difference)}" if result.difference else "")]
        for number, (row, result) in enumerate(results.items())
    ]
    not_tried = [[name_refusal(values), reason] for values, reason in (*NOT_TRIED, *LEFT_OUT)]
    parts = [
        HEAD.read_text().replace("BOUNDS", bounds),
        f"## Strategies\n\n{strategies(results)}",
        *(f"## By {name}\n\n{by_value(column, results)}" for column, name in NAMES.items()),
        f"## Refused\n\n{refusals(results)}",
        f"## Not tried\n\n{table(['combination', 'reason'], *not_tried)}",
        f"## All rows\n\n{table(['', *COLUMNS, 'result'], *shown)}",
        f"## Made with\n\n{len(results)} rows ({counts['exact']} exact, {counts['close']} close), seed {SEED}, "
        f"{datetime.date.today():%d %B %Y}; torch {torch.__version__}, Python {platform.python_version()}, "
        f"{machine()}.",
    ]
    PAGE.write_text("\n".join(parts) + "\n")


NAMES = {"precision": "precision", "kind": "kind of model", "option": "option", "disturbance": "break"}
"""Columns with their own table, and their titles on the page."""
