"""Pipeline parallelism: the axis `pipeline` of a mesh."""
