"""Lightning's public module tree on Legato: in a program written for it, put `legato.compat.` before `lightning`.

`pytorch_lightning` is `legato.compat.lightning.pytorch`. `names.py` is the table of all public names; `tree.py` makes
the modules from it. `install()`, or the command `legato lightning train.py`, lets `import lightning` mean this package.
"""

from typing import TYPE_CHECKING, Any

from .stand_in import install as install
from .tree import fill

if TYPE_CHECKING:  # what type checkers know; of the other names, and the modules made from the table, they know nothing
    from .callbacks.callback import Callback as Callback
    from .module import LightningDataModule as LightningDataModule
    from .module import LightningModule as LightningModule
    from .trainer import Trainer as Trainer
    from .utilities import seed_everything as seed_everything

    def __getattr__(name: str) -> Any: ...


fill(__name__)
