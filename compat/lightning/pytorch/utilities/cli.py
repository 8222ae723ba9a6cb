"""The location of LightningCLI in Lightning 1."""

from legato.compat.lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

__all__ = ["LightningArgumentParser", "LightningCLI", "SaveConfigCallback"]
