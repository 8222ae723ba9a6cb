"""Registers Legato's modules under the name of this package."""

from legato.compat.lightning.stand_in import register_name

register_name(__name__)
