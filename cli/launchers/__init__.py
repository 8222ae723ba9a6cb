"""Launchers: start a run on a cluster from the command line; their names are in `cli/config/check.py`."""
