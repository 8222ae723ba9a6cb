"""Executes a table of runs, compares each run bitwise with its reference, and writes docs/exactness.md.

    python -m benchmarks.exact                  all rows, then docs/exactness.md (make exact)
    python -m benchmarks.exact --only 17 20-30  only some rows; stores their results in build/exact/
    python -m benchmarks.exact --page           only the page, from the stored results

No expected value is stored: each row compares two runs on this machine. The exit code is 1 if a row is wrong or fails.
"""

import argparse
import hashlib
import json
import logging
import os
import shutil
import sys
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch

from legato.trainer.processes import launch

from .compare import Result, judge
from .page import write_page
from .rows import Row, table_rows

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "exact"
"""Folder of the results, with one file per row, so that several commands can run at the same time."""
STANDS = ("exact", "close", "refused")
"""Verdicts that do not fail the table."""
launch.PRELOAD += ["torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.checkpoint"]
launch.PRELOAD += ["torch.distributed.optim", "torch._dynamo", "legato.trainer.setup.start", "benchmarks.exact.cases"]


def code_hash() -> str:
    """Return a hash of the code in the package and this benchmark, to detect outdated results."""
    digest = hashlib.sha256(torch.__version__.encode())
    rooms = ("base", "callbacks", "loggers", "tasks", "trainer", "benchmarks/exact")
    for path in sorted(path for room in rooms for path in (ROOT / room).rglob("*.py")):
        if path.name not in ("page.py", "__main__.py"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def kept_at(row: Row) -> Path:
    """Return the path of the file for a row's result."""
    return KEPT / f"{hashlib.sha256(str(row).encode()).hexdigest()[:16]}.json"


def run_rows(numbers: list[int], rows: list[Row], code: str) -> bool:
    """Run rows, and print and store their results. Return True if no row fails the table."""
    stands = True
    for number in numbers:
        began = time.monotonic()
        result = replace(judge(rows[number]), seconds=round(time.monotonic() - began, 1))
        stands &= result.verdict in STANDS
        shown = f" {result.difference:.1e}" if result.difference else ""
        print(
            f"{number:3} {rows[number]}: {result.verdict.upper()}{shown} ({result.seconds} s) {result.text}", flush=True
        )
        KEPT.mkdir(parents=True, exist_ok=True)
        kept_at(rows[number]).write_text(json.dumps({**asdict(result), "row": str(rows[number]), "code": code}))
    return stands


def write(rows: list[Row], code: str | None) -> int:
    """Write the page from the results for a code hash (None: any). Return 1 if a row has none or fails the table."""
    kept = {row: json.loads(kept_at(row).read_text()) for row in rows if kept_at(row).exists()}
    results = {
        row: Result(*(kept[row][name] for name in ("verdict", "text", "difference", "seconds")))
        if row in kept and code in (None, kept[row]["code"])
        else Result("not run")
        for row in rows
    }
    write_page(results)
    left = [number for number, row in enumerate(rows) if results[row].verdict not in STANDS]
    if left:
        print(f"rows without a result, or with a wrong one: {' '.join(map(str, left))}")
    return int(bool(left))


def numbers_of(words: list[str]) -> list[int]:
    """Return the row numbers that words such as 17 and 20-30 specify."""
    spans = [(word.partition("-")[0], word.partition("-")[2] or word.partition("-")[0]) for word in words]
    return [number for first, last in spans for number in range(int(first), int(last) + 1)]


def main() -> int:
    """Run the command. Return 1 if a row is wrong or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NUMBER", help="the numbers of some rows, such as 17 or 20-30")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    parser.add_argument("--page", action="store_true", help="write the page from the stored results")
    parser.add_argument("--stored", action="store_true", help="with --page: also use results of other code")
    options = parser.parse_args()
    rows, code = table_rows(), code_hash()
    if options.list:
        print("\n".join(f"{number:3} {row}" for number, row in enumerate(rows)))
        return 0
    if options.page:
        return write(rows, None if options.stored else code)
    logging.getLogger("legato").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    numbers = numbers_of(options.only) if options.only else list(range(len(rows)))
    if not options.only:
        shutil.rmtree(KEPT, ignore_errors=True)
    stands = run_rows(numbers, rows, code)
    return int(not stands) if options.only else max(int(not stands), write(rows, code))


if __name__ == "__main__":
    sys.exit(main())
