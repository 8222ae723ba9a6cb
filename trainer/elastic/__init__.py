"""Elastic runs: processes of ddp may die, be replaced and join while the run continues."""
