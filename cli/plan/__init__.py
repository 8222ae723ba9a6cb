"""`legato plan`: layout, data order and memory of a run, computed without starting it."""
