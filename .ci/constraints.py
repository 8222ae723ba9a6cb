"""Prints constraints.txt as an environment of .ci/matrix needs it: python .ci/constraints.py lowest|newest|TORCH

With `lowest`, dependencies have the bounds of setup.cfg, and .ci/matrix installs the oldest that its Python has; with
`newest` they are free; with a torch version such as 2.12, torch has that version. The tools stay as they are pinned.
"""

import configparser
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(version: str) -> None:
    """Print the constraints of one kind of environment."""
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    wanted = options["options"]["install_requires"] + "".join(options["options.extras_require"].values())
    lowest = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?>=([\d.]+)", wanted, re.MULTILINE))
    free = {"setuptools", *(["torch"] if version[0].isdigit() else lowest)}  # torch 2.12 wants an older setuptools
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#") and re.match(r"[\w-]*", line)[0] not in free:
            print(line)
    if version == "lowest":
        print(*(f"{name}>={bound}" for name, bound in lowest.items()), sep="\n")
    elif version != "newest":
        print(f"torch=={version}.*")


if __name__ == "__main__":
    main(sys.argv[1])
