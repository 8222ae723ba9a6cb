"""Time to import Legato, compared with importing torch.

Run: python -m benchmarks.imports [--rounds 5]
The imports take turns, each in a new process. The results are the minimum CPU time and wall time over all rounds.
"""

import argparse
import json
import subprocess
import sys

IMPORTS = {
    "nothing": "pass",
    "torch": "import torch",
    "legato": "import legato",
    "legato.Trainer": "import legato; legato.Trainer",
    "a misspelt key": "from legato.cli.main import main; main(['fit', 'digits.yaml', 'trainer.max_epohcs=3'])",
    "every public name": "import legato; [getattr(legato, name) for name in legato.__all__]",
}
PROGRAM = """
import json, time
wall, cpu = time.perf_counter(), time.process_time()
{statement}
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
"""


def seconds_of(statement: str) -> tuple[float, float]:
    """Return the wall time and the CPU time of a statement in a new process, in seconds."""
    command = [sys.executable, "-c", PROGRAM.format(statement=statement)]
    wall, cpu = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in IMPORTS}
    for _ in range(options.rounds):
        for name, statement in IMPORTS.items():
            taken[name].append(seconds_of(statement))
    least = {name: (min(wall for wall, _ in rounds), min(cpu for _, cpu in rounds)) for name, rounds in taken.items()}
    print(f"{'import':<24}{'seconds':>9}{'of torch':>10}{'CPU':>9}{'over torch':>12}")
    for name, (wall, cpu) in least.items():
        print(f"  {name:<22}{wall:>9.2f}{wall / least['torch'][0]:>10.2f}{cpu:>9.2f}{cpu - least['torch'][1]:>+12.2f}")


if __name__ == "__main__":
    main()
