"""Processes of a run: ranks, rendezvous, workers, agreement between ranks, signals and hang reports."""
