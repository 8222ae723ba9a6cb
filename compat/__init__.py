"""Compatibility with programs written for other trainers. No other package in Legato imports this one."""
