"""Functions of lightning.pytorch.utilities and lightning.fabric.utilities."""

from ...trainer.data.randomness import seed_everything as seed_everything
