"""Pipeline parallelism along the mesh axis `pipeline`."""
