"""Gives the modules of Legato that stand for this package its name."""

from legato.compat.lightning.stand_in import take_name

take_name(__name__)
