"""Lightning's callbacks with arguments or effects that differ from Legato's callbacks."""
