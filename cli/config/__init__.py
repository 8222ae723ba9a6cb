"""Config: YAML files and overrides, checked against the signatures of the classes that they configure, and built."""
