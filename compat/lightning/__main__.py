"""`python -m legato.compat.lightning train.py [arguments]`: the same as `legato lightning train.py [arguments]`."""

import sys

from ...cli.main import main

if __name__ == "__main__":
    sys.exit(main(["lightning", *sys.argv[1:]]))
