"""Registers Legato's modules under this package's name."""

from legato.compat.lightning.stand_in import register_name

register_name(__name__)
