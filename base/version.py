"""Version of Legato, apart from the public names, which nothing inside the package imports."""

__version__ = "0.1.0"
LAST_READER = "bf1177d"
"""The last commit that reads run directories and checkpoints made before their formats changed."""
