"""Data: the order of samples as a pure function, and the distribution of batches over replicas."""
