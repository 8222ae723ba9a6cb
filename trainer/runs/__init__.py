"""Run directories: their names, lock, records, listing and removal."""
