"""Model parallelism: a model split across multiple devices in one process."""
