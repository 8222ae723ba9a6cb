"""Elastic runs: under the ddp strategy, processes may die, be replaced and join while the run continues."""
