"""Model parallel: a model spread over several devices of one process."""
