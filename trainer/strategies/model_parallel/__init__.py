"""Model parallelism: a model split over several devices of one process."""
