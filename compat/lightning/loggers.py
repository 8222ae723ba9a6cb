"""Loggers, with Lightning's arguments."""

from ...trainer.loggers.logger import Logger as Logger
from ...trainer.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
