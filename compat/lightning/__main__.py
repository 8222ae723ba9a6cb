"""`python -m legato.compat.lightning SCRIPT.py` is equivalent to `legato lightning SCRIPT.py`."""

import sys

from ...base.errors import ConfigError
from .script import run_lightning

if __name__ == "__main__":
    try:
        run_lightning(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"legato: {error}")
