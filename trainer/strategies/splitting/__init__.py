"""A batch, or a model, split over the devices of one process."""
