"""The training loop and its parts. Read `trainer.py`, the loop, first; each other module is one thing that it uses."""
