"""Data parallelism in one process: each batch is split across multiple devices."""
