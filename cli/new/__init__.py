"""`legato new`: writes a small project that trains at once; its files lie in `project/`."""
