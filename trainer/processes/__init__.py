"""Processes: ranks and places, rendezvous, workers, agreement between ranks, signals, hangs."""
