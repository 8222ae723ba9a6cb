"""Where Lightning 1 had its command line."""

from legato.compat.lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

__all__ = ["LightningArgumentParser", "LightningCLI", "SaveConfigCallback"]
