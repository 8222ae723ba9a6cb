"""Optimization: optimizers and schedulers, precision, non-finite numbers, compilation and kernels."""
