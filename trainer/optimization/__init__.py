"""Optimization: optimizers and schedulers, precision, non-finite values, compilation and kernels."""
