"""Replicas of a run on the processes that it has: in what order their gradients add up, and their batch statistics."""
