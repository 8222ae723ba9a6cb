"""`legato samples` and `legato replay`: what a run did at any of its steps, worked out or computed again afterwards."""
