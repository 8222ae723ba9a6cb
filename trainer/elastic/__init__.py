"""Elastic runs: under the ddp strategy, processes can die, be replaced, or join while the run continues."""
