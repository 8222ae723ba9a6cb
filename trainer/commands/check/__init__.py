"""`legato check`: a trial run of everything that could fail later."""
