"""Checkpoints: format, atomic commit, verification, search, and restore."""
