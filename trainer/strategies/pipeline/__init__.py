"""Pipelines: stages on their processes, and batches on their way through them."""
