"""LightningModule and LightningDataModule."""

from ...tasks.data_module import DataModule
from ...tasks.task import Task


class LightningModule(Task):
    """A Task under Lightning's name."""


class LightningDataModule(DataModule):
    """A DataModule under Lightning's name."""
