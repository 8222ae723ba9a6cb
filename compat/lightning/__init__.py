"""Lightning's public module tree, built on Legato. In a program's imports, put `legato.compat.` before `lightning`.

`pytorch_lightning` becomes `legato.compat.lightning.pytorch`. The `pytorch` and `fabric` packages re-export the
implementations in the neighboring modules. After `install()`, or under the command `legato lightning train.py`,
`import lightning` imports this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .stand_in import install as install

if TYPE_CHECKING:
    from .callbacks.callback import Callback as Callback
    from .fabric import Fabric as Fabric
    from .module import LightningDataModule as LightningDataModule
    from .module import LightningModule as LightningModule
    from .trainer import Trainer as Trainer
    from .utilities import seed_everything as seed_everything

__all__ = ["Callback", "Fabric", "LightningDataModule", "LightningModule", "Trainer", "seed_everything"]
__version__ = "2.6.6"


def __getattr__(name: str) -> Any:
    # lazy, because `legato lightning` imports this package even if the script does not need torch
    if name in ("pytorch", "fabric"):
        return import_module(f".{name}", __name__)
    if name in __all__:
        return getattr(import_module(".fabric" if name == "Fabric" else ".pytorch", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
