"""`legato config`: prints the resolved config. No torch."""

from collections.abc import Sequence

from .config.resumed import load_to_fit


def show_config(arguments: Sequence[str]) -> None:
    """Print the resolved config with the origin of each value."""
    print(load_to_fit(arguments).text(origins=True), end="")
