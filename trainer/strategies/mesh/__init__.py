"""Meshes of processes: their axes, and what is sharded, cut and put together along them."""
