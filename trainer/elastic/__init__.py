"""Elastic runs: processes of strategy ddp may die, be replaced and join while the run continues."""
