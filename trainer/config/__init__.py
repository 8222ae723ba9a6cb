"""Config: YAML files and overrides, checked against the signatures of what they configure, and built."""
