"""Legato's version. It is in a separate module because Legato's modules don't import the package's public names."""

__version__ = "0.1.0"
LAST_READER = "dbd35eb"
"""The last commit that can read checkpoints in the old format."""
LAST_READER_OF_RUNS = "27ceea4"
"""The last commit that can read run directories without `run.json`."""
