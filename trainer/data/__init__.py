"""Data: the order of samples as a pure function, and how batches are dealt out to replicas."""
