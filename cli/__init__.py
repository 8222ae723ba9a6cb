"""The command `legato`, which runs YAML configs. No other package imports it."""
