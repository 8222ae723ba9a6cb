"""`legato sweep`: trials of one config with different values, each a run of its own."""
