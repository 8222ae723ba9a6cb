"""Registers the modules of Legato under the name of this package."""

from legato.compat.lightning.stand_in import take_name

take_name(__name__)
