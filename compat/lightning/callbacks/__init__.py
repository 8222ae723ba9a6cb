"""Lightning's callbacks whose arguments or effects differ from Legato's own."""
