"""Checkpoints: what they hold, how they are written whole, verified, found and taken over."""
