"""Commands that look at runs on disk: runs, show, compare, board, clean. None of them imports torch."""
