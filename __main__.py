"""`python -m legato`, for launchers that start a module: `torchrun -m legato fit config.yaml`."""

import sys

from .cli.main import main

sys.exit(main())
