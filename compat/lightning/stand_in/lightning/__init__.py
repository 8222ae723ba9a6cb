"""Registers the modules of Legato under the name of this package."""

from legato.compat.lightning.stand_in import register_name

register_name(__name__)
