"""`legato config`: prints the resolved config. No torch."""

from collections.abc import Sequence

from ..config.check import load_config


def show_config(arguments: Sequence[str]) -> None:
    """Print the resolved config with the origin of each value."""
    print(load_config(arguments).text(origins=True), end="")
