"""How many of the public programs installed here run under `legato lightning` unchanged, and with equal numbers.

python tests/public_programs.py [SCRIPT.py ...]      without names: the quick starts in tests/lightning/packages
python tests/public_programs.py --page               writes the table of packages in docs/dev/lightning-programs.md

Each runs under the real package and under Legato. A program that prints {"exact": {...}} as its last line has its
numbers compared; one that does not run under Lightning here is not counted.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = Path(__file__).parent / "lightning" / "packages"
TRIED = PACKAGES.with_name("programs.csv")
PAGE = Path(__file__).parents[1] / "docs" / "dev" / "lightning-programs.md"
UNDER = {"Lightning": (), "Legato": ("-m", "legato", "lightning")}


def outcome(script, words):
    """Return whether a script ends well, its last line as JSON where it is that, and the last line of its errors."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "NIXTLA_ID_AS_COL": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *words, str(script)]
        options = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": 600}
        done = subprocess.run(command, check=False, **options)
    lines, errors = done.stdout.strip().splitlines(), done.stderr.strip().splitlines()
    try:
        numbers = json.loads(lines[-1]).get("exact", {}) if lines else {}
    except (ValueError, AttributeError):
        numbers = {}
    return done.returncode == 0, numbers, errors[-1] if errors else ""


def same(first, second):
    """Return whether nested numbers are equal to four digits."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, (int, float)) and isinstance(second, (int, float)):
        return abs(first - second) <= 1e-4 * max(1.0, abs(first))
    return first == second


def page():
    """Return the page with its table of packages, one for each row of programs.csv."""
    before, _, rest = PAGE.read_text().partition("| package |")
    with TRIED.open(newline="") as file:
        columns, *rows = csv.reader(file)
    table = [columns, ["---"] * len(columns), *sorted(rows)]
    lines = "".join(f"| {' | '.join(cells)} |\n" for cells in table)
    return before + lines + "\n" + rest.partition("\n\n")[2]


def main(scripts):
    counted = ran = compared = equal = 0
    for script in scripts:
        (works, expected, _), (runs, numbers, error) = (outcome(script, words) for words in UNDER.values())
        if not works:
            print(f"{script.stem:24}does not run under Lightning here")
            continue
        counted, ran = counted + 1, ran + runs
        if runs and expected:
            compared, equal = compared + 1, equal + same(expected, numbers)
        differs = runs and not same(expected, numbers)
        print(f"{script.stem:24}{'runs' if runs else error[:90]}{', differs' if differs else ''}", flush=True)
    print(f"{ran} of {counted} run unchanged; of {compared} that print numbers to compare, {equal} print equal ones.")


if __name__ == "__main__" and sys.argv[1:] == ["--page"]:
    PAGE.write_text(page())
elif __name__ == "__main__":
    main([Path(argument).resolve() for argument in sys.argv[1:]] or sorted(PACKAGES.glob("*.py")))
