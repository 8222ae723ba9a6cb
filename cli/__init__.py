"""The command `legato`: YAML in, runs out. Nothing imports it."""
