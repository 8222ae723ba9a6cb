"""How training works. `trainer.py` is the loop, read first; each other module is one thing that the loop leans on."""
