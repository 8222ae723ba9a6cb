"""The `legato` command, which runs YAML configs. No other package of Legato imports this one."""
