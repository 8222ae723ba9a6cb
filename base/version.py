"""Version of Legato, apart from the public names, which nothing inside the package imports."""

__version__ = "0.1.0"
