"""Entry point for `python -m legato` and for launchers that run a module: `torchrun -m legato fit config.yaml`."""

import sys

from .cli.main import main

sys.exit(main())
