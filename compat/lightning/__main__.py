"""`python -m legato.compat.lightning train.py [arguments]`: same as `legato lightning train.py [arguments]`."""

import sys

from ...base.errors import ConfigError
from .script import run_lightning

if __name__ == "__main__":
    try:
        run_lightning(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"legato: {error}")
