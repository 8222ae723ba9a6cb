"""`legato plan`: what would run where, and how large it would be, without starting anything."""
