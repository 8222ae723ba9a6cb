"""Metrics: logged values, kept on their device, reduced over batches, replicas and ranks."""
