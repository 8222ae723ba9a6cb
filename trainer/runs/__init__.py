"""Reads run directories without importing torch, for `legato.runs` and the commands `runs`, `show` and `compare`.

run = legato.runs.open("digits")     # a path, or the newest run with this name under runs/
print(run.state, run.step, run.best)
run.frame()["val/loss"].plot()       # `run.metrics` contains NumPy arrays
for run in legato.runs.list("sweep"):
    print(run.name, run.config.get("optimizer.lr"), run.best_checkpoint)
"""

from .directory import BestValue as BestValue
from .directory import CheckpointEntry as CheckpointEntry
from .directory import RunDirectory as RunDirectory
from .directory import find_run as open
from .directory import find_runs as list

__all__ = ["BestValue", "CheckpointEntry", "RunDirectory", "list", "open"]
