"""Data parallel: one process whose threads each drive a device, on a part of every batch."""
