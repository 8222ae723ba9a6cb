"""Version of Legato. This is a separate module because the package's modules do not import its public names."""

__version__ = "0.1.0"
LAST_READER = "dbd35eb"
"""The last commit that reads checkpoints in the former format."""
LAST_READER_OF_RUNS = "27ceea4"
"""The last commit that reads run directories without `run.json`."""
