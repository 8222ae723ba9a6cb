"""The training loop and its parts. Read the loop, `trainer.py`, first; the other modules are the parts it uses."""
