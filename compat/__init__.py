"""Compatibility with programs that were written for other trainers. No other package of Legato imports it."""
