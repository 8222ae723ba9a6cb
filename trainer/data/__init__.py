"""Data: the order of samples, which is a pure function, and the distribution of batches over replicas."""
