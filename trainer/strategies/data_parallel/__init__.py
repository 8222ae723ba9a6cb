"""Data parallelism in one process: each batch is split over several devices."""
