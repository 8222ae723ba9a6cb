"""Processes: where this one stands, how others are started and watched, what they agree on."""
