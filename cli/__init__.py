"""The `legato` command, which runs YAML configs. No other Legato package imports this one."""
