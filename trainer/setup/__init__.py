"""Setup for a call to fit, validate, test or predict, in order.

checks, parts    before anything starts: check arguments and task, create strategy, loggers and callbacks
join, directory  connect the processes; rank 0 chooses the run directory and the checkpoint
model, data      setup hooks, weights, loaders and optimizers: a complete Run
start, outputs   the rest of the checkpoint's state, the loggers, and the records in the run directory
"""
