"""Sharding and tensor parallelism along the axes of a mesh of processes."""
