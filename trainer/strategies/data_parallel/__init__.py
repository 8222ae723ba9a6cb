"""Data parallel: one process that drives several devices, each with a part of every batch."""
