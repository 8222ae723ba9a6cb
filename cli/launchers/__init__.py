"""Launchers, which start a run on a cluster. `cli/config/check.py` lists their names."""
