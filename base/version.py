"""Version of Legato, apart from the public names, which nothing inside the package imports."""

__version__ = "0.1.0"
LAST_READER = "dbd35eb"
"""The last commit that reads checkpoints made before their format changed."""
LAST_READER_OF_RUNS = "27ceea4"
"""The last commit that reads run directories without `run.json`."""
