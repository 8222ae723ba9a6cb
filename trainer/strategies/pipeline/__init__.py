"""Pipeline parallelism along the `pipeline` axis of a mesh."""
