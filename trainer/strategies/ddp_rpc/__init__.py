"""DDP with parameter servers: modules in separate processes."""
