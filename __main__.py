"""`python -m legato`, for launchers that start a module: `torchrun -m legato fit config.yaml`."""

import sys

from .trainer.__main__ import main

sys.exit(main())
