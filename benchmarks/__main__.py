"""Runs all benchmarks, one after another, each in its own process.

Run: python -m benchmarks [--full] [NAME ...]
The quick form takes less than five minutes. The figures in docs/benchmarks.md were measured with --full.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
QUICK = {
    "bitwise": ["--rounds", "2", "--steps", "4", "--workloads", "gpt"],
    "checkpoint": ["--quick"],
    "checkpoint_disk": ["--megabytes", "500", "--rounds", "2"],
    "ddp_step": ["--blocks", "40"],
    "elastic": ["--processes", "2", "--kills", "4"],
    "imports": ["--rounds", "3"],
    "memory": ["--steps", "4"],
    "scale": ["--processes", "2", "4", "8", "--kill"],
    "replay": ["--steps", "200", "--rounds", "1"],
    "tensor_bits": ["--rounds", "1", "--steps", "4"],
    "step_overhead": ["--modes", "bare,usual", "--steps", "1000", "--rounds", "2"],
}
"""Arguments of the quick form."""
LONG = {"gpu", "one_run_picture", "peer_behavior", "peer_resumes", "same_results", "soak"}
"""Benchmarks that have no quick form, have their own command (make gpu), or need the packages of peers."""


def main() -> int:
    """Run the benchmarks and return how many failed."""
    every = sorted(path.stem for path in HERE.glob("[a-z]*.py"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(every), choices=[*every, []])
    options = parser.parse_args()
    names = options.names or [name for name in every if options.full or name not in LONG]
    failed = 0
    for name in names:
        print(f"=== {name} ".ljust(72, "="), flush=True)
        arguments = [] if options.full else QUICK.get(name, [])
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments], cwd=HERE.parent, check=False)
        failed += done.returncode != 0
        how = "done" if done.returncode == 0 else f"FAILED with exit code {done.returncode}"
        print(f"--- {how} after {time.monotonic() - began:.0f} s\n", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
