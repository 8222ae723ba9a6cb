"""Meshes of processes: sharding and tensor parallelism along their axes."""
