"""Lightning's public module tree on Legato: in a program written for it, put `legato.compat.` before `lightning`.

`pytorch_lightning` is `legato.compat.lightning.pytorch`. `names.py` is the table of all public names; `tree.py` makes
the modules from it. `install()`, or the command `legato lightning train.py`, lets `import lightning` mean this package.
"""

from .stand_in import install as install
from .tree import fill

fill(__name__)
