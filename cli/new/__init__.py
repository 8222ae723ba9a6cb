"""`legato new`: creates a small project from the templates in `project/`."""
