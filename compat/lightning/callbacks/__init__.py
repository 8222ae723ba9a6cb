"""Lightning callbacks whose arguments or effects differ from those of Legato's callbacks."""
