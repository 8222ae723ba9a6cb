"""A run's processes: ranks, rendezvous, workers, agreement between ranks, signals and hang reports."""
