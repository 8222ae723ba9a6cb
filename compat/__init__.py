"""Rooms for programs that were written for other trainers; the rest of Legato knows nothing of them."""
