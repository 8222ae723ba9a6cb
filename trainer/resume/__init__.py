"""What a run puts into a checkpoint, and takes from one."""
