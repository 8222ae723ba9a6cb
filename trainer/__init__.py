"""The training loop and its parts. Start reading with the loop in `trainer.py`.

The other modules are parts that it uses.
"""
