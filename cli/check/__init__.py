"""`legato check`: a short trial of every stage of a run."""
