"""Elastic runs: under strategy ddp, processes may die, be replaced and join while the run continues."""
