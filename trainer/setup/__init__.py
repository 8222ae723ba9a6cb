"""Set-up of a call of fit, validate, test or predict, in the order of its phases.

checks, parts    before anything starts: arguments, the task, and the objects that arguments name
join, directory  processes meet; rank 0 chooses run directory and checkpoint
model, data      set-up hooks, weights, loaders, optimizers: a complete Run
start, outputs   the rest of the checkpoint, loggers, the record of the run directory
"""
