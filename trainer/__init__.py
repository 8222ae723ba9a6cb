"""The training loop and its parts.

Start reading with the loop in `trainer.py`, which uses the other modules.
"""
