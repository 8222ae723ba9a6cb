"""Data: the order of samples, computed by a pure function, and the distribution of batches across replicas."""
