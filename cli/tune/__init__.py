"""`legato tune`: search for settings that make a config faster."""
