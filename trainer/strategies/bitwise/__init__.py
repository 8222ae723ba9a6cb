"""Bitwise reproducibility: gradients added up in one order on any number of processes, and buffers that follow it."""
