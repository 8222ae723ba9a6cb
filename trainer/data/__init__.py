"""Data: the pure order of samples, and how loaders are dealt out to replicas."""
