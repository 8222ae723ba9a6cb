"""Config: reads YAML files and overrides, checks them against the signatures of classes, and builds objects."""
