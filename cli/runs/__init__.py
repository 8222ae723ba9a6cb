"""Commands for runs on disk: runs, show, compare and clean. They import torch only for `compare --bits`."""
