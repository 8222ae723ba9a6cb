"""`legato samples`: what a run did at any of its steps, worked out afterwards."""
