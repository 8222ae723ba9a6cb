"""One device; with several replicas, one after the other on it."""

from .strategy import Strategy


class SingleStrategy(Strategy):
    """One process, one device."""

    name = "single"
